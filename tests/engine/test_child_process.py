"""Child processes: their whole group ends, nobody is kept waiting for it, and their log is theirs."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from patience import WAIT_S, alive, eventually
from penstock.engine.command import server_command
from penstock.engine.launch import EngineProcess, reserved_port
from penstock.errors import EngineStartError
from penstock.process import LIFELINE_ENV, ChildProcess
from penstock.settings import EngineConfig

FAMILY = """
import subprocess, sys
from penstock.lifeline import watch_lifeline
watch_lifeline()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
if sys.argv[1] == "stay":
    child.wait()
"""

NAMES = """
import mmap, os, pathlib, sys, time
from penstock.lifeline import watch_lifeline
watch_lifeline()
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    kept = mmap.mmap(file.fileno(), 4096)
pathlib.Path(os.environ["PENSTOCK_SCRATCH"], "socket").touch()
print("there", flush=True)
time.sleep(600)
"""

SEMAPHORE = """
import multiprocessing, time
from penstock.lifeline import watch_lifeline
watch_lifeline()
lock = multiprocessing.get_context("spawn").Lock()
print(f"sem.{lock._semlock.name[1:]} there", flush=True)
time.sleep(600)
"""

STAYS_WHEN_ASKED = ("sh", "-c", "trap '' TERM; echo there; exec sleep 600")

USES_ALL_DESCRIPTORS = """
import itertools, os, resource, time
from penstock.lifeline import watch_lifeline
watch_lifeline()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
try:
    kept = [os.open("/dev/null", os.O_RDONLY) for _ in itertools.count()]
except OSError:
    print("there", flush=True)
time.sleep(600)
"""

ENDS_WHEN_ASKED = """
import os, signal
from penstock.lifeline import watch_lifeline
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # so that none is lost before the wait
watch_lifeline()
print(os.getpid(), "there", flush=True)
signal.sigwait({signal.SIGTERM})
"""

LAUNCHES_NAMES = """
import asyncio, pathlib, sys
from penstock.process import ChildProcess

async def main():
    argv = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
    log, scratch = pathlib.Path(sys.argv[3]), pathlib.Path(sys.argv[4])
    await (await ChildProcess.start(argv, name="names", log=log, scratch=scratch)).wait()

asyncio.run(main())
"""

SLOW_TO_DIE = """
import os, signal, subprocess, sys
from penstock.process import kill_group
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
kills = []
os.kill = lambda pid, number: kills.append((pid, number))
kill_group(child.pid)
os.killpg(child.pid, signal.SIGKILL)  # Popen.kill would go through the os.kill replaced above
child.wait()
assert kills == [(child.pid, signal.SIGKILL)], kills
"""


async def written(log: Path) -> None:
    await eventually(lambda: log.exists() and "there" in log.read_text())


@pytest.mark.parametrize("end", ["by itself", "stop", "kill"])
async def test_when_wait_returns_the_whole_group_is_gone(end: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", FAMILY, "leave" if end == "by itself" else "stay"]
    child = await ChildProcess.start(argv, name="family", log=tmp_path / "log")
    await eventually(lambda: "\n" in child.said())
    grandchild = int(child.said().splitlines()[0])
    if end == "stop":
        await child.stop(10.0)
    elif end == "kill":
        child.kill()
    await asyncio.wait_for(child.wait(), WAIT_S)
    assert not alive(grandchild)


@pytest.mark.parametrize("killed", ["by us", "by others", "with its launcher"])
async def test_names_that_a_killed_group_leaves_are_taken_away(killed: str, tmp_path: Path) -> None:
    """What C++ made in /dev/shm no resource tracker knows; and others may kill a tracker along."""
    shared = Path(f"/dev/shm/vllm_dist_test-{os.getpid()}")  # noqa: S108 - as vLLM names it
    stranger = Path(f"/dev/shm/trainer-{os.getpid()}")  # noqa: S108
    scratch, log = tmp_path / "scratch", tmp_path / "log"
    scratch.mkdir()
    stranger.touch()
    try:
        if killed == "with its launcher":
            launcher = await asyncio.create_subprocess_exec(
                sys.executable, "-c", LAUNCHES_NAMES, NAMES, str(shared), str(log), str(scratch)
            )
            await written(log)
            launcher.kill()
            await launcher.wait()
            await eventually(lambda: not shared.exists() and not scratch.exists())
        else:
            argv = [sys.executable, "-c", NAMES, str(shared)]
            child = await ChildProcess.start(argv, name="names", log=log, scratch=scratch)
            await written(log)
            if killed == "by us":
                child.kill()
            else:
                child.remember()
                os.killpg(child.pid, signal.SIGKILL)
            await asyncio.wait_for(child.wait(), WAIT_S)
        assert not shared.exists()
        assert not scratch.exists()
        assert stranger.exists()
    finally:
        stranger.unlink()
        shared.unlink(missing_ok=True)


@pytest.mark.parametrize("end", ["killed by us", "killed by others", "stopped by others, then killed by us"])
async def test_a_semaphore_of_pythons_is_taken_away_with_its_tracker(end: str, tmp_path: Path) -> None:
    """It is mapped under another name than it has, and its tracker was killed or stopped along with its group."""
    child = await ChildProcess.start([sys.executable, "-c", SEMAPHORE], name="semaphore", log=tmp_path / "log")
    await written(tmp_path / "log")
    name = Path("/dev/shm") / child.said().split()[0]  # noqa: S108 - as Python names it
    group = [p for p in psutil.Process(child.pid).children(recursive=True) if os.getpgid(p.pid) == child.pid]
    assert name.exists()
    assert len(group) == 1, "the tracker"
    if end == "killed by others":
        child.remember()
        os.killpg(child.pid, signal.SIGKILL)
    else:
        if end != "killed by us":
            os.killpg(child.pid, signal.SIGSTOP)
        child.kill()
    await asyncio.wait_for(child.wait(), WAIT_S)
    assert not name.exists()
    await eventually(lambda: not alive(group[0].pid))


async def test_what_ends_in_order_takes_its_folder_along(tmp_path: Path) -> None:
    """Who started it may be gone by then, by the second of two signals; here it stands still."""
    scratch, log = tmp_path / "scratch", tmp_path / "log"
    scratch.mkdir()
    launcher = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LAUNCHES_NAMES, ENDS_WHEN_ASKED, "", str(log), str(scratch)
    )
    await written(log)
    launcher.send_signal(signal.SIGSTOP)
    try:
        pid = int(log.read_text().split()[0])
        os.kill(pid, signal.SIGTERM)
        await eventually(lambda: not alive(pid))
        assert not scratch.exists()
    finally:
        launcher.kill()
        await launcher.wait()


def test_a_child_without_a_free_descriptor_ends_with_its_launcher() -> None:
    reader, writer = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", USES_ALL_DESCRIPTORS], env={**os.environ, LIFELINE_ENV: str(reader)}, pass_fds=[reader],
        start_new_session=True, stdout=subprocess.PIPE,
    ) as child:  # fmt: skip
        os.close(reader)
        assert child.stdout is not None
        assert child.stdout.readline() == b"there\n"
        os.close(writer)
        assert child.wait(WAIT_S) == -signal.SIGKILL


def test_killing_a_group_does_not_wait_for_its_end() -> None:
    """One whose GPU is being closed would keep the control plane of a whole fleet from going on."""
    done = subprocess.run([sys.executable, "-c", SLOW_TO_DIE], timeout=WAIT_S, check=False)
    assert done.returncode == 0


async def test_an_earlier_runs_errors_are_not_this_ones(tmp_path: Path) -> None:
    (tmp_path / "e0.log").write_text("RuntimeError: of yesterday\n")
    config = EngineConfig(model="sim", profile="sim", extra_args={"no-such-option": 1})
    with pytest.raises(EngineStartError, match="no_such_option") as caught:
        await EngineProcess.launch(server_command(config), name="e0", log_dir=tmp_path)
    assert "yesterday" not in str(caught.value)
    assert "yesterday" in (tmp_path / "e0.log").read_text(), "appended to"


def test_a_reserved_port_is_nobody_elses_but_a_server_can_listen_on_it() -> None:
    with reserved_port() as port:
        with socket.socket() as stranger, pytest.raises(OSError, match=os.strerror(errno.EADDRINUSE)):
            stranger.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
            pass


async def test_a_log_that_cannot_be_written_leaves_no_descriptor_open(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(OSError, match=r"exists|Not a directory"):
            await ChildProcess.start([sys.executable], name="x", log=tmp_path / "file" / "x.log")
    assert len(list(Path("/proc/self/fd").iterdir())) <= before  # of earlier tests one may be closed meanwhile


async def test_a_stop_that_is_cancelled_kills(tmp_path: Path) -> None:
    """Another failure may cut off the end of an engine, and nobody asks again."""
    child = await ChildProcess.start(STAYS_WHEN_ASKED, name="stays", log=tmp_path / "log")
    await eventually(lambda: "there" in child.said())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(child.stop(10 * WAIT_S), 0.2)
    assert await asyncio.wait_for(child.wait(), WAIT_S) == -signal.SIGKILL


async def test_a_process_that_the_kernel_does_not_end_is_named_and_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who killed it waits for it no longer: the supervisor of engines, the router's guard, `stop`."""
    monkeypatch.setattr("penstock.process.GONE_S", 0.1)
    child = await ChildProcess.start(STAYS_WHEN_ASKED, name="stays", log=tmp_path / "log")
    await eventually(lambda: "there" in child.said())
    with monkeypatch.context() as kernel:
        kernel.setattr("penstock.process.kill_group", lambda _: None)
        child.kill()
        assert await asyncio.wait_for(child.wait(), WAIT_S) == -signal.SIGKILL
    assert await child.stop() == [child.pid]
    assert f"stays: processes [{child.pid}] are still there 0.1 s after SIGKILL" in caplog.text
    os.killpg(child.pid, signal.SIGKILL)
    await eventually(lambda: not alive(child.pid))
    assert await child.stop() == [], "it has ended since"
