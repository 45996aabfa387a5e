"""A child's start: its report on a pipe, or what its log says if it fails. Errors as JSON for another process."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from inspect import signature
from pathlib import Path
from typing import Any, Self

import orjson

from penstock import errors
from penstock.errors import EngineStartError, FanOutError, PenstockError
from penstock.process import ChildProcess

MOST_REPORT = 2**20
"""Most bytes of a child's start report."""


class StartReport:
    """A child's single report to `serving`, its `url` or `error`, on a pipe, which no full disk stops."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def give(self, message: Mapping[str, Any]) -> None:
        """Write the report and close the pipe; later calls have no effect."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with suppress(OSError):  # its launcher is gone
                os.write(fd, orjson.dumps(message) + b"\n")
            os.close(fd)


async def _read_line(fd: int) -> bytes:
    """Read a line from a pipe and close it; a part of one, or nothing, if the other end closes first."""
    reader = asyncio.StreamReader(limit=MOST_REPORT)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", buffering=0)
    )
    try:
        return await reader.readline()
    finally:
        transport.close()


class ReportingProcess(ChildProcess):
    """A running child that reported its start."""

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
        """Start a child; return when it reports its `url` on the pipe given to `argv`.

        Raises:
            PenstockError: the error that it reported.
            EngineStartError: it ended, was not ready in `start_s` seconds, or cannot be started. It is gone, and the
                message holds the relevant lines of its log.
        """
        async with AsyncExitStack() as failed:
            try:
                read_fd, write_fd = os.pipe()
                failed.callback(os.close, read_fd)
                try:
                    child = await cls.start(argv(write_fd), name=name, log=log, env=env, pass_fds=(write_fd,))
                finally:
                    os.close(write_fd)
            except OSError as error:  # no memory, descriptor or disk space is left, or the log's folder is gone
                raise EngineStartError(f"the {name} cannot be started: {error}") from error
            failed.pop_all()  # the pipe is closed by the function that reads it
            failed.push_async_callback(child.stop, 0.0)
            try:
                async with asyncio.timeout(start_s):
                    line = await _read_line(read_fd)
            except TimeoutError:
                raise EngineStartError(f"the {name} was not ready within {start_s:g} s; {says(child)}") from None
            if not line.endswith(b"\n"):
                raise EngineStartError(f"the {name} ended as it started; {says(child)}")
            report: Any = orjson.loads(line)
            if "error" in report:
                raise error_from_json(report["error"])
            child.url = str(report["url"])
            failed.pop_all()
        return child


# --- The log of a child that failed -----------------------------------------------------------------------------------


def says(child: ChildProcess) -> str:
    """Quote the lines of a child's log about its end."""
    try:
        said = full_disk(child.log) + telling_lines(child.said())
    except OSError as error:  # its folder may be gone
        said = f"nothing, since it cannot be read: {error.strerror}"
    return f"its log ({child.log}) says:\n{said}"


def full_disk(log: Path) -> str:
    """Return a warning if the disk of `log` is full, since the log may then be empty."""
    free = os.statvfs(log.parent)
    return "" if free.f_bavail and free.f_favail != 0 else f"the disk is full: {log.parent}\n"


TELLING = re.compile(r"(^[\w.]*(Error|Exception)\b: .)|\berror: |^Value error, |out of memory|No space left|Killed")
"""Matches an error's own line and not its traceback; for a config that vLLM's pydantic refuses, the reason's line."""

LOG_PREFIX = re.compile(r"^(\([\w-]+ pid=\d+\) )?(ERROR|WARNING|INFO) \S+ \S+ \[[^]]*\] ")
"""Prefix that vLLM puts before each line of a traceback that it logs."""

MOST_LINES = 6


def telling_lines(log: str) -> str:
    """Return the last lines of a log that name an error, or else its last lines."""
    lines = [LOG_PREFIX.sub("", line).strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if TELLING.search(line)]
    return "\n".join(dict.fromkeys((errors or lines)[-MOST_LINES:]))


# --- Errors for another process ---------------------------------------------------------------------------------------

_MORE = ("status", "error_type", "seconds", "results")


def error_to_json(error: PenstockError) -> dict[str, Any]:
    """Return the error as JSON, for another process that raises the same error, or its nearest known base."""
    more = {name: getattr(error, name) for name in _MORE if hasattr(error, name)}
    if isinstance(error, FanOutError):
        more["failures"] = {engine: error_to_json(failure) for engine, failure in error.failures.items()}
    known = next(kind for kind in type(error).__mro__ if hasattr(errors, kind.__name__))  # a room may have its own
    return {"type": known.__name__, "message": str(error), **more}


def error_from_json(data: Mapping[str, Any]) -> PenstockError:
    """Return the error described by `error_to_json`, in its own class; a PenstockError if that is unknown."""
    kind = getattr(errors, str(data["type"]), None)
    if not (isinstance(kind, type) and issubclass(kind, PenstockError)):
        return PenstockError(str(data["message"]))
    takes = signature(kind.__init__).parameters  # fewer than those of a class that only the other process knows
    more = {name: data[name] for name in _MORE if name in data and name in takes}
    if kind is FanOutError:
        more["failures"] = {str(engine): error_from_json(failure) for engine, failure in data["failures"].items()}
    return kind(str(data["message"]), **more)
