"""Child processes in their own groups, which end with their launcher and leave no shared memory behind.

A child holds the read end of a pipe from its launcher, the lifeline. When the launcher is gone, the pipe ends, and the
child ends its whole group (`lifeline.py`). Its output goes to a log file.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import resource
import shutil
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from penstock.aio import settled

logger = logging.getLogger(__name__)

GONE_S = 10.0
"""Most seconds until a process, and then its group, has ended after SIGKILL; a driver may hold it for seconds."""

STOP_S = 10.0
"""Seconds between SIGTERM and SIGKILL."""

OPEN_FILES = 1 << 20
"""Open files that any router or client here stays below."""


def raise_file_limit() -> None:
    """Raise this process's limit of open files as far as allowed, up to `OPEN_FILES`.

    Each request in flight takes a socket, in a router two. The soft limit of most systems is 1024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


_OWN_FILES = 64
"""Descriptors that a server needs in addition to its connections."""


def most_connections() -> int:
    """Return the most clients of a server that opens one more connection for each."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (OPEN_FILES if limit == resource.RLIM_INFINITY else max(limit - _OWN_FILES, 16)) // 2


class ChildProcess:
    """A running child process. Make it with `start`. End it by `stop`; its lifeline ends it with us."""

    url = ""
    """The URL where it serves, if it does."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        log: Path,
        lifeline_fd: int,
        earlier: int,
        scratch: Path | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self._process = process
        self._scratch = scratch
        self._shared: set[Path] = set()
        """Named shared memory that it has used."""
        self.earlier = earlier
        """Bytes that its log file held before it started."""
        self._lifeline_fd = lifeline_fd
        self._late = asyncio.Event()
        """Set `GONE_S` seconds after SIGKILL."""
        self._left: Sequence[int] = ()
        """Processes that outlived it."""
        self._reaper = asyncio.create_task(self._reap(), name=f"reap-{name}")

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        *,
        name: str,
        log: Path,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        scratch: Path | None = None,
    ) -> Self:
        """Start `argv`, which calls `watch_lifeline()` first; append its output to `log`.

        `env` is added to our environment. `pass_fds` stay open in the child under their numbers. The folder `scratch`
        is removed when the child has ended.
        """
        added = {**(env or {}), **({SCRATCH_ENV: str(scratch)} if scratch is not None else {})}
        log.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as kept, ExitStack() as closed:
            read_fd, write_fd = os.pipe()
            closed.callback(os.close, read_fd)
            kept.callback(os.close, write_fd)
            out = closed.enter_context(log.open("ab"))
            earlier = out.tell()
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **added, LIFELINE_ENV: str(read_fd)},
                pass_fds=(read_fd, *pass_fds),
                start_new_session=True,
            )
            kept.pop_all()
        return cls(name, process, log, write_fd, earlier, scratch)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait until its group is gone, or outlives SIGKILL; return the exit status. Cancelling does not end it."""
        return await asyncio.shield(self._reaper)

    async def stop(self, timeout_s: float = STOP_S) -> Sequence[int]:
        """End its group: SIGTERM, SIGKILL after `timeout_s` or if cancelled. Return the processes that outlive it."""
        if not self._reaper.done():
            with suppress(ProcessLookupError):  # it ended on its own in between
                os.killpg(self.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(self.wait(), timeout_s)
        except TimeoutError:
            self.kill()
            await self.wait()
        except asyncio.CancelledError:  # nobody may ask again
            self.kill()
            raise
        return self._left and [pid for pid in group_members(self.pid) if pid in self._left]  # some may have ended since

    def kill(self) -> None:
        if not self._reaper.done():
            self._kill_group()
            self._reaper.get_loop().call_later(GONE_S, self._late.set)

    def _kill_group(self) -> None:
        try:
            self.remember()
            kill_group(self.pid)
        except OSError as error:  # without a free file descriptor, the group cannot be listed
            logger.warning("%s: its whole group is killed, unlisted: %s", self.name, error)
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def remember(self) -> None:
        """Record its group's named shared memory, to unlink it even after a sudden death."""
        self._shared |= shared_memory_of(group_members(self.pid))

    def said(self, most: int = 1 << 62) -> str:
        """Return at most the last `most` bytes that it has written to its log."""
        with self.log.open("rb") as log:
            log.seek(max(self.earlier, log.seek(0, os.SEEK_END) - most))
            return log.read().decode(errors="replace")

    async def _reap(self) -> int:
        exited = await settled(self._process.wait(), self._late.wait())
        self._kill_group()  # the group is usually empty
        try:
            async with asyncio.timeout(GONE_S):
                for pid in group_members(self.pid):
                    await _ended(pid)
        except TimeoutError:  # they are in a call of a driver or of a network's file system
            self._left = group_members(self.pid)
            message = "%s: processes %s are still there %g s after SIGKILL, and are left"
            logger.warning(message, self.name, self._left, GONE_S)
        except OSError as error:
            logger.warning("%s: its group is not waited for: %s", self.name, error)
        os.close(self._lifeline_fd)
        remove_leftovers(self._shared, self._scratch)
        return -signal.SIGKILL if exited.cancelled() else exited.result()


async def _ended(pid: int) -> None:
    """Wait for the end of a process, which need not be our child."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(fd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


# --- The end of a group, with its shared memory and its folder --------------------------------------------------------


SCRATCH_ENV = "PENSTOCK_SCRATCH"
"""Environment variable that names a folder of a process group, which is removed with the group."""
_SHARED = Path("/dev/shm")  # noqa: S108 - where names of shared memory are
_OWN = ("psm_", "sem.mp-", "vllm_dist_", "nccl-")
"""Prefixes of names from Python, vLLM and NCCL. Other mapped memory may belong to a trainer."""
_MAPPED = re.compile(rf"(\w+):(\w+) (\d+) +{_SHARED}/")
"""Device and inode. The name beside them may be outdated: glibc creates a semaphore under one name and renames it."""


def shared_memory_of(pids: Iterable[int]) -> set[Path]:
    """Return these processes' mapped shared memory whose name begins as in `_OWN`."""
    mapped: set[tuple[int, int]] = set()
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # ended in between
            maps = _MAPPED.findall(Path(f"/proc/{pid}/maps").read_text())
            mapped |= {(os.makedev(int(major, 16), int(minor, 16)), int(inode)) for major, minor, inode in maps}
    found: set[Path] = set()
    for name in _SHARED.iterdir() if mapped else ():
        with suppress(FileNotFoundError):  # unlinked in between
            there = name.stat(follow_symlinks=False)
            if name.name.startswith(_OWN) and (there.st_dev, there.st_ino) in mapped:
                found.add(name)
    return found


def remove_leftovers(names: Iterable[Path], scratch: Path | None) -> None:
    """Unlink remaining `names`, and the folder `scratch`, after their processes' end."""
    for name in names:
        name.unlink(missing_ok=True)
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)


LIFELINE_ENV = "PENSTOCK_LIFELINE_FD"
"""Environment variable for the descriptor number of the read end."""
TRACKER = b"multiprocessing.resource_tracker"
PARENT, GROUP = 1, 2  # positions in /proc/PID/stat


def kill_group(group: int) -> None:
    """Send SIGKILL to a group, except to this process and to Python's resource trackers.

    It does not wait for their end, since closing devices takes seconds. A resource tracker unlinks the semaphores and
    shared memory that dead processes left, and ends after the last of them. So it must not be killed with them. A
    tracker that was stopped with its group is continued, or it would stay for ever.
    """
    sent = {os.getpid()}
    while others := set(group_members(group)) - sent:  # repeat, since a process may have forked in between
        for pid in others:
            with suppress(ProcessLookupError):  # ended in between
                os.kill(pid, signal.SIGKILL)
        sent |= others
    for pid in (pid for pid, tracker in _processes_of(group).items() if tracker):
        with suppress(ProcessLookupError):  # it ended after the others
            os.kill(pid, signal.SIGCONT)


def group_members(group: int, field: int = GROUP) -> list[int]:
    """Return the living processes of a group or `PARENT`, without resource trackers."""
    return [pid for pid, tracker in _processes_of(group, field).items() if not tracker]


def _processes_of(group: int, field: int = GROUP) -> dict[int, bool]:
    """Return the living processes of a group, and whether each is a resource tracker."""
    found: dict[int, bool] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The command name may hold any character, so fields are counted from its closing parenthesis.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(fields[field]) == group and fields[0] not in "ZX":
                found[int(entry.name)] = TRACKER in (entry / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):  # ended in between
            continue
    return found


# --- Restarts ---------------------------------------------------------------------------------------------------------


LONGEST_S = 120.0
"""Most seconds before a restart."""
Clock = Callable[[], float]
"""Monotonic seconds."""
Sleep = Callable[[float], Awaitable[None]]


@dataclass(slots=True)
class RestartBudget:
    """Restarts of one process: the wait doubles each time, and `max_restarts` can limit them."""

    max_restarts: int | None
    """Most restarts in any `window_s` seconds; `None` for no limit."""
    window_s: float
    """Seconds without a restart after which the wait is short again."""
    first_s: float
    """Seconds before the first restart."""
    clock: Clock = time.monotonic
    _spent: deque[float] = field(default_factory=deque[float], init=False)
    _last: float = field(default=-math.inf, init=False)
    """Time at which the last restart was due, or was over."""
    _in_a_row: int = field(default=0, init=False)

    def left(self) -> bool:
        while self._spent and self._spent[0] <= self.clock() - self.window_s:
            self._spent.popleft()
        return self.max_restarts is None or len(self._spent) < self.max_restarts

    def spend(self) -> float | None:
        """Take one restart; return the seconds to wait before it, or None if exhausted."""
        if not self.left():
            return None
        now = self.clock()
        self._in_a_row = 0 if self._last <= now - self.window_s else self._in_a_row + 1
        self._spent.append(now)
        wait_s = min(self.first_s * 2.0 ** min(self._in_a_row, 64), LONGEST_S)
        self._last = now + wait_s
        return wait_s

    def restarted(self) -> None:
        """Note that the process has started: its time of running counts from now."""
        self._last = self.clock()


async def keep_running(
    until_ended: Callable[[], Awaitable[None]],
    restart: Callable[[], Awaitable[bool]],
    budget: RestartBudget,
    sleep: Sleep = asyncio.sleep,
) -> None:
    """Restart a process each time it ends; return when its budget is exhausted.

    If `restart` returns False, it failed and is tried again after the next wait.
    """
    while True:
        await until_ended()
        while True:
            if (wait_s := budget.spend()) is None:
                return
            await sleep(wait_s)
            if await restart():
                budget.restarted()
                break
