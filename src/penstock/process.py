"""Child processes in their own groups, which end with their launcher and leave no shared memory behind.

A child watches its lifeline (`process_group.py`). Its output goes to a log file.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from penstock.process_group import (
    LIFELINE_ENV,
    SCRATCH_ENV,
    group_members,
    kill_group,
    remove_leftovers,
    shared_memory_of,
)

logger = logging.getLogger(__name__)

GONE_S = 10.0
"""Most seconds until a group has ended after SIGKILL; a device's driver may hold a process for seconds."""

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


def backoff_s(failures: int, base_s: float = 0.05, cap_s: float = 120.0) -> float:
    """Return the seconds before a retry: `base_s`, doubled per failure, up to `cap_s`."""
    return min(base_s * 2.0 ** min(failures, 64), cap_s)


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
        """Wait until its group is gone; return the exit status. Cancelling does not end it."""
        return await asyncio.shield(self._reaper)

    async def stop(self, timeout_s: float = STOP_S) -> None:
        """End its group: SIGTERM, then SIGKILL after `timeout_s`; return when it is gone."""
        if not self._reaper.done():
            with suppress(ProcessLookupError):  # it ended on its own in between
                os.killpg(self.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(self.wait(), timeout_s)
        except TimeoutError:
            self.kill()
            await self.wait()

    def kill(self) -> None:
        if not self._reaper.done():
            self._kill_group()

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
        status = await self._process.wait()
        self._kill_group()  # the group is usually empty
        try:
            async with asyncio.timeout(GONE_S):
                for pid in group_members(self.pid):
                    await _ended(pid)
        except TimeoutError:
            logger.warning("%s: processes of its group are not gone %g s after SIGKILL", self.name, GONE_S)
        except OSError as error:
            logger.warning("%s: its group is not waited for: %s", self.name, error)
        os.close(self._lifeline_fd)
        remove_leftovers(self._shared, self._scratch)
        return status


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
