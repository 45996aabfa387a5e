"""One child process in a process group of its own, tied to our life by a lifeline, its output in a log file."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from penstock import leftovers, lifeline

logger = logging.getLogger(__name__)

GONE_S = 10.0
"""How long is waited for the rest of a group after its SIGKILL; a device's driver may hold a process for seconds."""

OPEN_FILES = 1 << 20
"""More than any router or client here has at once."""


def raise_file_limit() -> None:
    """Let this process open as many files as it may, up to `OPEN_FILES`.

    Each request in flight is a socket, in a router two; the soft limit of most systems is 1024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


_SHORTAGES = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.ENOMEM: "no memory is left",
    errno.EMFILE: "this process has no file descriptor left (ulimit -n)",
    errno.ENFILE: "this machine has no file descriptor left",
    errno.EAGAIN: "this user may start no more processes (ulimit -u)",
}


def shortage(error: OSError) -> str:
    """What an error of the system says that it lacks, in words, with the file that it is about."""
    what = _SHORTAGES.get(error.errno or 0)
    return str(error) if what is None else f"{what}{f': {error.filename}' if error.filename else ''}"


def full_disk(log: Path) -> str:
    """A line that says so where the disk of `log` has no room: a process that writes there may have said nothing."""
    free = os.statvfs(log.parent)
    return "" if free.f_bavail and free.f_favail != 0 else f"the disk is full: {log.parent}\n"


class ChildProcess:
    """A running child. Build it with `start`; `stop` it, or let the lifeline end it with us."""

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
        """Named shared memory that it had."""
        self._earlier = earlier
        self._lifeline_fd = lifeline_fd
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
        """Start `argv`; stdout and stderr are appended to `log`. `env` is added to our environment.

        `pass_fds` are open in it, under their numbers. `scratch` is a folder of its own, removed when it has ended.

        The child must call `penstock.lifeline.watch()` first thing.
        """
        added = dict(env or {})
        if scratch is not None:
            added[leftovers.SCRATCH_ENV] = str(scratch)
        log.parent.mkdir(parents=True, exist_ok=True)
        read_fd, write_fd = os.pipe()
        try:
            with log.open("ab") as out:
                earlier = out.tell()
                process = await asyncio.create_subprocess_exec(
                    *argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env={**os.environ, **added, lifeline.ENV: str(read_fd)},
                    pass_fds=(read_fd, *pass_fds),
                    start_new_session=True,
                )
        except BaseException:
            os.close(write_fd)
            raise
        finally:
            os.close(read_fd)
        return cls(name, process, log, write_fd, earlier, scratch)

    @property
    def pid(self) -> int:
        """Process id, also the id of its process group."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait until it has ended and its group is gone; cancelling this wait leaves the child alone."""
        return await asyncio.shield(self._reaper)

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM to the whole group, and SIGKILL after `timeout_s` seconds; returns when it has ended."""
        if not self._reaper.done():
            with suppress(ProcessLookupError):  # it ended on its own in between
                os.killpg(self.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(self.wait(), timeout_s)
        except TimeoutError:
            self.kill()
            await self.wait()

    def kill(self) -> None:
        """SIGKILL to the whole group, at once."""
        if not self._reaper.done():
            self.remember()
            lifeline.kill_group(self.pid)

    def remember(self) -> None:
        """Note which named shared memory its group has mapped: it is unlinked when all of them have ended.

        For a process that somebody else may kill, together with what would unlink it.
        """
        self._shared |= leftovers.shared_memory_of(lifeline.members(self.pid))

    def said(self) -> str:
        """What it has written to its log; what was there before it began is another run's."""
        with self.log.open("rb") as log:
            log.seek(self._earlier)
            return log.read().decode(errors="replace")

    async def _reap(self) -> int:
        status = await self._process.wait()
        self.remember()
        lifeline.kill_group(self.pid)  # usually nobody of the group is left
        try:
            async with asyncio.timeout(GONE_S):
                for pid in lifeline.members(self.pid):
                    await _ended(pid)
        except TimeoutError:
            logger.warning("%s: processes of its group are not gone %g s after SIGKILL", self.name, GONE_S)
        os.close(self._lifeline_fd)
        leftovers.remove(self._shared, self._scratch)
        return status


async def _ended(pid: int) -> None:
    """Return when a process has ended, which need not be a child of ours."""
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


async def read_line(fd: int, deadline_s: float) -> bytes:
    """A line that another process writes on a pipe, which is closed then; empty if that process closed it first.

    Raises:
        TimeoutError: neither within `deadline_s` seconds.
    """
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", buffering=0)
    )
    try:
        async with asyncio.timeout(deadline_s):
            return await reader.readline()
    finally:
        transport.close()
