"""`penstock tinker-api` says what is wrong in one line."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tinker_rig import Rig, rig
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.config import TrainConfig
from penstock.errors import ConfigError
from penstock.router_settings import RouterConfig
from penstock.settings import EngineConfig, FleetConfig
from penstock.tinker import tenants
from penstock.tinker.database import DATABASE, open_engine
from penstock.tinker.service import ServiceConfig, _api
from penstock.tinker.tenants import read_keys


def test_keys_that_others_can_read_are_refused(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("alice: {key: tml-of-alice-0}\n")
    refused = run("--database", f"sqlite:///{tmp_path}/x.db", "--keys", str(keys), "--port", "0")
    assert "chmod 600" in str(refused)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "holds no tenants"),
        ("alice: {key: short}", "begins with tml-"),
        ("alice: {key: tml-of-alice-0, quota: 1}", "unknown quota"),
        ("alice: {key: tml-of-alice-0, max_queued: 0}", "from 1"),
        ("alice: tml-of-alice-0\nbob: tml-of-alice-0", "two tenants"),
        ("[", "cannot be read"),
    ],
)
def test_keys_that_are_wrong_are_refused_with_the_reason(tmp_path: Path, text: str, why: str) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(text)
    keys.chmod(0o600)
    assert why in str(run("--database", f"sqlite:///{tmp_path}/x.db", "--keys", str(keys), "--port", "0"))


def test_any_key_opens_a_service_of_this_machine_alone(tmp_path: Path) -> None:
    refused = run("--database", f"sqlite:///{tmp_path}/x.db", "--host", "0.0.0.0", "--port", "0")
    assert "give --keys FILE" in str(refused)


def test_a_database_that_is_not_there_is_named_and_not_made(tmp_path: Path) -> None:
    refused = run("--database", f"sqlite:///{tmp_path}/servce.db", "--port", "0")
    assert f"no file {tmp_path}/servce.db" in str(refused)
    assert not list(tmp_path.iterdir())


def test_the_url_of_a_database_may_come_by_the_environment_and_is_shown_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TINKER_DATABASE", f"sqlite:///{tmp_path}/servce.db")
    assert f"no file {tmp_path}/servce.db" in str(run("--port", "0"))
    monkeypatch.setenv("PENSTOCK_TINKER_DATABASE", "nosuch://me:secret@host/x")
    assert "secret" not in str(run("--port", "0"))
    config = ServiceConfig(
        EngineConfig(model="m"), FleetConfig(), RouterConfig(), TrainConfig(), tmp_path, database="x://me:secret@host/x"
    )
    child = _api(config, tmp_path, "http://fleet", {})
    assert child.env[DATABASE] == config.database
    assert "secret" not in str(child.options)


def test_a_database_of_no_service_is_refused(tmp_path: Path) -> None:
    open_engine(f"sqlite:///{tmp_path}/x.db").dispose()
    assert "of no service" in str(run("--database", f"sqlite:///{tmp_path}/x.db", "--port", "0"))


@pytest.mark.usefixtures("shared_fleet")
async def test_a_process_without_the_keys_of_its_service_is_refused(tmp_path: Path) -> None:
    async with rig(tmp_path) as service:
        with pytest.raises(ConfigError, match="give its --keys FILE"):
            async with service.second(tenants=read_keys(None)):
                pass
        async with service.second() as second:
            await second.session()


@pytest.mark.usefixtures("shared_fleet")
async def test_keys_that_change_count_when_their_file_has_settled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1 << 62
    monkeypatch.setattr(tenants, "time", SimpleNamespace(time_ns=lambda: now))
    keys, old, new = tmp_path / "keys.yaml", "tml-of-alice-0", "tml-of-alice-1"
    keys.touch(mode=0o600)
    keys.write_text(f"alice: {old}")

    async def statuses(service: Rig) -> list[int]:
        found = [
            await service.http.post("/api/v1/create_session", json={}, headers={"X-API-Key": key}) for key in (old, new)
        ]
        return [answer.status_code for answer in found]

    def aged(seconds: float) -> None:
        nonlocal now
        now = keys.stat().st_mtime_ns + int(seconds * 1e9)

    async with rig(tmp_path, tenants=read_keys(keys)) as service, service.second(tenants=read_keys(keys)) as second:
        assert [await statuses(each) for each in (service, second)] == [[200, 401]] * 2
        with keys.open("w") as half:
            half.write(f"alice: {{key: {new}, max_queued: 7}}\n")
            half.flush()
            aged(0.9)
            assert await statuses(service) == [200, 401], "it may be half written"
            half.write("robert: tml-of-robert-0\n")
        aged(1.0)
        assert [await statuses(each) for each in (service, second)] == [[401, 200]] * 2
        assert service.options.tenants.of(new) == tenants.Tenant("alice", new, max_queued=7)
        for text, why in (
            ("alice: {key: short}", "tenant alice needs a key"),
            ('alice: "tml-of-alice-\\uD800"', "of ASCII"),
            ('"alice\\uD800": tml-of-alice-0', "surrogates not allowed"),
            ("alice: " + "[" * 3000, "maximum recursion depth"),
            (f"alice: {{key: {new}, max_queued: {'9' * 5000}}}", "Exceeds the limit"),
        ):
            keys.write_text(text)
            aged(1.0)
            assert await statuses(service) == [401, 200]
            assert "the tenants stay as they were" in caplog.text
            assert why in caplog.text
        keys.unlink()
        os.mkfifo(keys, 0o600)
        aged(1.0)
        assert await statuses(service) == [401, 200]
        assert "is no regular file" in caplog.text
        keys.unlink()
        assert await statuses(service) == [401, 200]
        keys.symlink_to(keys)
        assert await statuses(service) == [401, 200], "the file cannot be reached"


def test_a_signal_is_its_usual_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    @asynccontextmanager
    async def serving(*_: Any, **__: Any) -> AsyncGenerator[str]:
        os.kill(os.getpid(), signal.SIGTERM)
        yield "http://127.0.0.1:1"

    monkeypatch.setattr("penstock.tinker.api.serving", serving)
    arguments = ["tinker-api", "--database", "sqlite://", "--data", str(tmp_path), "--port", "0"]
    assert CliRunner().invoke(app, arguments).exit_code == 0


def run(*arguments: str) -> BaseException | None:
    error = CliRunner().invoke(app, ["tinker-api", *arguments]).exception
    assert isinstance(error, ConfigError), error
    return error
