"""The router as a process, with the clients and the (simulated) engine that people use."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from patience import WAIT_S, asked, eventually
from penstock.process import ChildProcess
from penstock.router.state import RouterAdmin
from penstock.start_report import StartReport


async def run(*argv: str, env: dict[str, str] | None = None) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ, **(env or {})}
    )
    async with asyncio.timeout(WAIT_S):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_wrong_options_are_one_line_and_exit_2() -> None:
    for options, message in (
        ('{"policy": "fastest"}', "there is no policy 'fastest'"),
        ('{"port": 70000}', "'port'"),
        ('{"max_hold_s": -1}', "'max_hold_s'"),
        ('{"max_holds": 1}', "unknown config key 'max_holds'; did you mean 'max_hold_s'?"),
        ("port=1", "the options of the router is not JSON that can be read"),
        ('{"host": "0.0.0.0"}', "there is no API key"),
        ('{"host": "192.0.2.1"}', "cannot listen on 192.0.2.1"),
    ):
        env = {"PENSTOCK_API_KEY": "k" if "192" in options else ""}
        status, out, err = await run(sys.executable, "-m", "penstock.router", options, env=env)
        assert (status, out) == (2, "")
        assert message in err
        assert "Traceback" not in err


async def test_it_stops_on_sigterm_with_requests_under_way(tmp_path: Path) -> None:
    child = await ChildProcess.start([sys.executable, "-m", "penstock.router"], name="router", log=tmp_path / "log")
    async with asyncio.timeout(WAIT_S):
        await eventually(lambda: "ready" in child.log.read_text())
        url = child.log.read_text().split()[-1]
        held = asyncio.create_task(run("curl", "-sS", "--max-time", "600", f"{url}/v1/models"))
        admin = RouterAdmin(url)
        await asked(admin.engines, lambda state: state.held == 1)
        await admin.close()
        os.kill(child.pid, signal.SIGTERM)
        assert await child.wait() == 0
        assert (await held)[0] == 52  # curl: empty reply
    assert "Traceback" not in child.said()


def test_an_error_after_the_report_is_not_written_into_another_file(tmp_path: Path) -> None:
    read_fd, ready_fd = os.pipe()
    report = StartReport(ready_fd)
    report.give({"url": "http://127.0.0.1:1"})
    other = os.open(tmp_path / "other", os.O_WRONLY | os.O_CREAT)
    assert other == ready_fd, "it gets the number that the pipe had"
    report.give({"error": "failed at its end"})
    os.close(other)
    with os.fdopen(read_fd, "rb") as pipe:
        assert [*json.loads(pipe.read())] == ["url"]
    assert (tmp_path / "other").read_bytes() == b""
