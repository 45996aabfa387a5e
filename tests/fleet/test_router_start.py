"""How a fleet hears of its router's start: by a pipe, whatever becomes of the log."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from penstock.errors import ConfigError, EngineStartError
from penstock.fleet.router_process import RouterProcess, open_router
from penstock.router.admin_client import RouterAdmin
from penstock.settings import RouterConfig


async def test_a_router_whose_log_disk_is_full_serves_and_the_reason_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "router.log").symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING):
        router = await RouterProcess.launch(RouterConfig(access_log=True), log_dir=tmp_path, api_key=None)
    try:
        assert f"cannot write its log {tmp_path / 'router.log'}: No space left on device" in caplog.text
        admin = RouterAdmin(router.url)
        await admin.health()
        await admin.close()
    finally:
        await router.stop()


async def test_a_log_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("no folder")
    async with AsyncExitStack() as owned:
        with pytest.raises(EngineStartError, match=r"cannot open the router's log .*logs.*: (Not a dir|File exists)"):
            await open_router(RouterConfig(), log_dir=tmp_path / "logs", api_key=None, owned=owned)


async def test_what_a_router_refuses_is_told_by_the_pipe(tmp_path: Path) -> None:
    first = await RouterProcess.launch(RouterConfig(), log_dir=tmp_path, api_key=None)
    (tmp_path / "router.log").unlink()
    (tmp_path / "router.log").symlink_to(os.devnull)
    try:
        port = int(first.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: .*address already in use; choose"):
            await RouterProcess.launch(RouterConfig(port=port), log_dir=tmp_path, api_key=None)
    finally:
        await first.stop()


async def test_one_that_ends_without_a_word_shows_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho 'OSError: what it was'\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(EngineStartError, match=r"(?s)ended with status 3; its log .*OSError: what it was"):
        await RouterProcess.launch(RouterConfig(), log_dir=tmp_path, api_key=None)
