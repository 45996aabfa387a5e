"""The process that drives Ray for a fleet, as its launcher sees it: calls as JSON lines over a socket pair.

Ray ends the process of a driver whose node is lost, takes over its signal handlers, and knows one cluster in a process;
a trainer is spared all three. Being a child under a lifeline, the driver ends with the launcher by any signal, and Ray
frees what a dead driver owned: actors and placement groups that are not detached.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import orjson

from penstock.engine.client import cancelled
from penstock.errors import DeadlineError, EngineDeadError, error_from_json
from penstock.process import ChildProcess

MAX_LINE = 1 << 20
SHUTDOWN_S = 20.0
"""What Ray may take to leave a cluster, or to end one of its own."""


class RayLink:
    """A running driver. Build it with `start`, and `close` it."""

    def __init__(self, child: ChildProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._child = child
        self._writer = writer
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._ended = False
        self._listener = asyncio.create_task(self._listen(reader), name="ray-link")

    @classmethod
    async def start(cls, log: Path, env: Mapping[str, str], folder: Path | None = None) -> Self:
        """Start the process; what it and Ray say is appended to `log`. A cluster's own `folder` goes with it."""
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE)
            argv = (sys.executable, "-m", "penstock.fleet.ray_driver", str(theirs.fileno()))
            try:
                child = await ChildProcess.start(
                    argv, name="ray", log=log, env=env, pass_fds=(theirs.fileno(),), scratch=folder
                )
            except BaseException:
                writer.close()
                raise
        return cls(child, reader, writer)

    @property
    def ended(self) -> bool:
        """It is gone, and all that it owned."""
        return self._ended

    async def call(self, what: str, *, deadline_s: float | None, **arguments: Any) -> Any:
        """Call a method of `ray_driver.RayDriver`.

        `deadline_s` None: it answers when an engine ends, or with its own end.

        Raises:
            EngineDeadError: the process ended.
            DeadlineError: it gave no answer in time.
            PenstockError: whatever the method raises.
        """
        if self._ended:
            raise EngineDeadError(self._death())
        number = next(self._numbers)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        self._send(number, what, arguments)
        try:
            async with asyncio.timeout(deadline_s):
                return await answer
        except TimeoutError as error:
            raise DeadlineError(
                f"Ray did not answer {what} within {deadline_s} s", seconds=deadline_s or 0.0
            ) from error
        finally:
            self._open.pop(number, None)

    def post(self, what: str, **arguments: Any) -> None:
        """Call a method without waiting for its answer."""
        if not self._ended:
            self._send(next(self._numbers), what, arguments)

    def kill(self) -> None:
        """End it at once, with a cluster of its own; Ray frees what it owned elsewhere."""
        self._child.kill()

    async def close(self) -> None:
        """Leave the cluster; one of its own ends. Closing twice is harmless."""
        self._writer.close()
        try:
            async with asyncio.timeout(SHUTDOWN_S):
                await self._child.wait()
        except TimeoutError:
            self._child.kill()
            await self._child.wait()
        await cancelled(self._listener)

    def _send(self, number: int, what: str, arguments: dict[str, Any]) -> None:
        self._writer.write(orjson.dumps({"id": number, "call": what, "arguments": arguments}) + b"\n")

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                said = orjson.loads(line)
                answer = self._open.get(said["id"])
                if answer is None or answer.done():
                    continue
                if "error" in said:
                    answer.set_exception(error_from_json(said["error"]))
                else:
                    answer.set_result(said["result"])
        except ConnectionError:
            pass  # as an end
        finally:
            self._ended = True
            for answer in self._open.values():
                if not answer.done():
                    answer.set_exception(EngineDeadError(self._death()))

    def _death(self) -> str:
        said = " ".join(self._child.said().splitlines()[-3:])
        return f"the process that drives Ray has ended: {said or 'it said nothing'}"
