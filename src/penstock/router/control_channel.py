"""Calls between the hub and a worker, both ways: JSON frames over a pair of sockets that only these two have."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self

import orjson

from penstock.errors import DeadlineError, EngineDeadError
from penstock.router.refusal import RefusalError

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
_LENGTH = 4


class ControlChannel:
    """One end. Calls of the other end are answered by `handler`, several at a time; frames arrive in order.

    A `RefusalError` that the handler raises is raised at the caller. The channel holds when a call is not answered.

    Args:
        name: of the other end, for messages.
        reader: from it.
        writer: to it.
        handler: answers its calls.
    """

    def __init__(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler) -> None:
        self._name = name
        self._reader = reader
        self._writer = writer
        self._handler = handler
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._calls = 0
        self._serving: set[asyncio.Task[None]] = set()
        self._reading = asyncio.create_task(self._read(), name=f"control-{name}")

    @classmethod
    async def open(cls, name: str, sock: socket.socket, handler: Handler) -> Self:
        """Take over a connected socket."""
        reader, writer = await asyncio.open_connection(sock=sock)
        return cls(name, reader, writer, handler)

    async def call(self, message: Mapping[str, Any], *, deadline_s: float) -> dict[str, Any]:
        """Send `message` and return the answer.

        Raises:
            DeadlineError: no answer within `deadline_s` seconds.
            EngineDeadError: the other end is gone.
            RefusalError: what its handler raised.
        """
        if self._reading.done():
            raise EngineDeadError(f"{self._name} is gone")
        self._calls += 1
        number = self._calls
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send({"call": number, "message": message})
        try:
            async with asyncio.timeout(deadline_s):
                return await answer
        except TimeoutError as error:
            raise DeadlineError(f"{self._name} did not answer within {deadline_s:g} s", seconds=deadline_s) from error
        finally:
            del self._waiting[number]

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send `message`, and do not care for an answer."""
        if not self._reading.done():
            self._send({"call": 0, "message": message})

    async def ended(self) -> None:
        """Wait until the other end is gone; cancelling this wait leaves the channel alone."""
        await asyncio.shield(self._reading)

    async def close(self) -> None:
        """End it; calls under way fail with `EngineDeadError`."""
        tasks = [self._reading, *self._serving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._writer.transport.abort()

    def _send(self, frame: Mapping[str, Any]) -> None:
        data = orjson.dumps(frame)
        self._writer.write(len(data).to_bytes(_LENGTH, "little") + data)

    async def _read(self) -> None:
        try:
            while True:
                size = int.from_bytes(await self._reader.readexactly(_LENGTH), "little")
                frame = orjson.loads(await self._reader.readexactly(size))
                if "call" in frame:
                    task = asyncio.create_task(self._serve(frame["call"], frame["message"]))
                    self._serving.add(task)
                    task.add_done_callback(self._serving.discard)
                elif (answer := self._waiting.get(frame["answer"])) is not None and not answer.done():
                    if "refusal" in frame:
                        answer.set_exception(RefusalError(*frame["refusal"]))
                    else:
                        answer.set_result(frame["result"])
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the other process has ended; whoever waits is told below
        finally:
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(EngineDeadError(f"{self._name} is gone"))

    async def _serve(self, number: int, message: dict[str, Any]) -> None:
        try:
            self._send({"answer": number, "result": await self._handler(message)})
        except RefusalError as refusal:
            self._send({"answer": number, "refusal": [refusal.status, refusal.code, str(refusal)]})
