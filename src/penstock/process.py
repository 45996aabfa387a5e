"""Run a child process in a group of its own. It ends with its launcher and leaves no shared memory behind.

The child watches its lifeline (`process_group.py`). Its output is in a log file.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import resource
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import orjson

from penstock.errors import EngineStartError, error_from_json
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
"""Wait for a group's end after its SIGKILL; a device's driver may hold a process for seconds."""

STOP_S = 10.0
"""Between SIGTERM and SIGKILL."""

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


_OWN_FILES = 64
"""Descriptors that a server needs besides those of its connections."""


def most_connections() -> int:
    """Return how many clients a server can have, each with one more connection to another server."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (OPEN_FILES if limit == resource.RLIM_INFINITY else max(limit - _OWN_FILES, 16)) // 2


def backoff_s(failures: int, base_s: float = 0.05, cap_s: float = 120.0) -> float:
    """Seconds to wait before another try after `failures` in a row: doubles from `base_s` up to `cap_s`."""
    return min(base_s * 2.0 ** min(failures, 64), cap_s)


def full_disk(log: Path) -> str:
    """Return a line that says so if the disk of `log` is full: a process may then have written nothing."""
    free = os.statvfs(log.parent)
    return "" if free.f_bavail and free.f_favail != 0 else f"the disk is full: {log.parent}\n"


TELLING = re.compile(r"(^[\w.]*(Error|Exception)\b: .)|\berror: |^Value error, |out of memory|No space left|Killed")
"""An error's own line, not the traceback above it; of a config that vLLM's pydantic refuses, the line that says why."""

LOG_PREFIX = re.compile(r"^(\([\w-]+ pid=\d+\) )?(ERROR|WARNING|INFO) \S+ \S+ \[[^]]*\] ")
"""What vLLM puts before each line of a traceback that it logs."""


MOST_LINES = 6


def telling_lines(log: str) -> str:
    """Return the lines of a log that say what went wrong: the last that name an error, else the last."""
    lines = [LOG_PREFIX.sub("", line).strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if TELLING.search(line)]
    return "\n".join(dict.fromkeys((errors or lines)[-MOST_LINES:]))


class ChildProcess:
    """A running child. Build it with `start` or `serving`; `stop` it, or let the lifeline end it with us."""

    url = ""
    """Where it serves, if it does."""

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
        self.earlier = earlier
        """Bytes of its log that were there before it."""
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
        """Start `argv`, which must call `watch_lifeline()` first. Its output is appended to `log`.

        `env` is added to our environment; `pass_fds` are open in the child under their numbers; the folder `scratch` is
        removed when the child has ended.
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

    @classmethod
    async def serving(
        cls,
        argv: Callable[[int], Sequence[str]],
        *,
        name: str,
        log: Path,
        start_s: float,
        env: Mapping[str, str] | None = None,
    ) -> Self:
        """Start a child and return when it serves: it reports `url` on a pipe, whose number `argv` is given.

        Raises:
            PenstockError: what it reported.
            EngineStartError: it ended, was not ready in `start_s` seconds, or cannot be started. It is gone, and the
                message holds the telling lines of its log.
        """
        async with AsyncExitStack() as failed:
            try:
                read_fd, write_fd = os.pipe()
                failed.callback(os.close, read_fd)
                try:
                    child = await cls.start(argv(write_fd), name=name, log=log, env=env, pass_fds=(write_fd,))
                finally:
                    os.close(write_fd)
            except OSError as error:  # no memory, descriptor or room on a disk is left, or its log's folder is gone
                raise EngineStartError(f"the {name} cannot be started: {error}") from error
            failed.pop_all()  # the pipe is closed by the function that reads it
            failed.push_async_callback(child.wait)
            failed.callback(child.kill)
            try:
                report = await read_report(read_fd, start_s)
            except EngineStartError as error:
                raise EngineStartError(f"the {name} {error}; {child.says()}") from error
            if "error" in report:
                raise error_from_json(report["error"])
            if not report:
                raise EngineStartError(f"the {name} ended as it started; {child.says()}")
            child.url = str(report["url"])
            failed.pop_all()
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait until its group is gone; return its exit status. Cancelling the wait leaves the child alone."""
        return await asyncio.shield(self._reaper)

    async def stop(self, timeout_s: float = STOP_S) -> None:
        """End the group: SIGTERM, then SIGKILL after `timeout_s` seconds; return when it has ended."""
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
        except OSError as error:  # without a file descriptor left, the group cannot be listed
            logger.warning("%s: its whole group is killed, unlisted: %s", self.name, error)
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def remember(self) -> None:
        """Record the named shared memory of its group, to unlink it even if all of the group is killed at once."""
        self._shared |= shared_memory_of(group_members(self.pid))

    def said(self, most: int = 1 << 62) -> str:
        """Return what it has written to its log, without what was there before; of that the last `most` bytes."""
        with self.log.open("rb") as log:
            log.seek(max(self.earlier, log.seek(0, os.SEEK_END) - most))
            return log.read().decode(errors="replace")

    def says(self) -> str:
        """Quote what its log tells of its end."""
        try:
            said = full_disk(self.log) + telling_lines(self.said())
        except OSError as error:  # its folder may be gone
            said = f"nothing, since it cannot be read: {error.strerror}"
        return f"its log ({self.log}) says:\n{said}"

    async def _reap(self) -> int:
        status = await self._process.wait()
        self._kill_group()  # usually it is empty
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
    """Return when a process has ended, also if it is not our child."""
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


class StartReport:
    """What a child says once, on the pipe that `ChildProcess.serving` reads: its `url`, or the `error` that ends it."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def give(self, message: Mapping[str, Any]) -> None:
        """Write it and close the pipe; later calls do nothing. A pipe, since no full disk stops it."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with suppress(OSError):  # its launcher is gone
                os.write(fd, orjson.dumps(message) + b"\n")
            os.close(fd)


async def read_report(fd: int, deadline_s: float) -> dict[str, Any]:
    """Read the line of JSON that a child writes on a pipe once it has started; empty if it closed the pipe first.

    Raises:
        EngineStartError: neither within `deadline_s` seconds, or another line; says what the child did.
    """
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", buffering=0)
    )
    line = b""
    try:
        async with asyncio.timeout(deadline_s):
            line = await reader.readline()
        report: Any = orjson.loads(line or b"{}")
    except TimeoutError:
        raise EngineStartError(f"was not ready within {deadline_s:g} s") from None
    except ValueError:  # no JSON, or no end of the line: it has died inside it
        report = None
    finally:
        transport.close()
    if not isinstance(report, dict) or (report and not report.keys() & {"url", "error"}):
        raise EngineStartError(f"ended inside the report of its start, {line[:200]!r}")
    return report  # pyright: ignore[reportUnknownVariableType] - a JSON object
