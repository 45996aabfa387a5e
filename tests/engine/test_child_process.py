"""Child processes: their whole group ends, nobody is kept waiting for it, and their log is theirs."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from penstock.config import EngineConfig
from penstock.engine.process import EngineProcess, reserved_port
from penstock.errors import EngineStartError
from penstock.process import ChildProcess

FAMILY = """
import subprocess, sys
from penstock import lifeline
lifeline.watch()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
if sys.argv[1] == "stay":
    child.wait()
"""

SLOW_TO_DIE = """
import os, signal, subprocess, sys
from penstock import lifeline
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
kills = []
lifeline.os.kill = lambda pid, number: kills.append((pid, number))
lifeline.kill_group(child.pid)
os.killpg(child.pid, signal.SIGKILL)  # Popen.kill would go through the os.kill replaced above
child.wait()
assert kills == [(child.pid, signal.SIGKILL)], kills
"""


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def first_line(child: ChildProcess) -> str:
    async with asyncio.timeout(20):
        while "\n" not in child.said():  # noqa: ASYNC110 - a file sends no event
            await asyncio.sleep(0.01)
    return child.said().splitlines()[0]


@pytest.mark.parametrize("end", ["by itself", "stop", "kill"])
async def test_when_wait_returns_the_whole_group_is_gone(end: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", FAMILY, "leave" if end == "by itself" else "stay"]
    child = await ChildProcess.start(argv, name="family", log=tmp_path / "log")
    grandchild = int(await first_line(child))
    if end == "stop":
        await child.stop(10.0)
    elif end == "kill":
        child.kill()
    await asyncio.wait_for(child.wait(), 10.0)
    assert not alive(grandchild)


def test_killing_a_group_does_not_wait_for_its_end() -> None:
    """One whose GPU is being closed would keep the control plane of a whole fleet from going on."""
    done = subprocess.run([sys.executable, "-c", SLOW_TO_DIE], timeout=10, check=False)
    assert done.returncode == 0


async def test_an_earlier_runs_errors_are_not_this_ones(tmp_path: Path) -> None:
    (tmp_path / "e0.log").write_text("RuntimeError: of yesterday\n")
    config = EngineConfig(model="sim", profile="sim", extra_args={"no-such-option": 1})
    with pytest.raises(EngineStartError, match="no-such-option") as caught:
        await EngineProcess.launch(config, name="e0", log_dir=tmp_path)
    assert "yesterday" not in str(caught.value)
    assert "yesterday" in (tmp_path / "e0.log").read_text(), "appended to"


def test_a_reserved_port_is_nobody_elses_but_a_server_can_listen_on_it() -> None:
    with reserved_port() as port:
        with socket.socket() as stranger, pytest.raises(OSError, match=os.strerror(errno.EADDRINUSE)):
            stranger.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
            pass
