"""Asks an engine that is down whether it is back."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from penstock.router.engine import Engine

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 2.0
_DEADLINE_S = 2.0
_ALIVE = re.compile(rb"HTTP/1\.[01] [234]\d\d ")
"""Any answer but a 5xx says that a server is there and can serve; vLLM answers 503 once its engine is dead."""


class Probes:
    """One probe for each engine that is down, with exponential back-off between tries.

    Args:
        up: called with an engine that answers again.
    """

    def __init__(self, up: Callable[[Engine], None]) -> None:
        self._up = up
        self._tasks: dict[Engine, asyncio.Task[None]] = {}

    def start(self, engine: Engine) -> None:
        """Probe it until it answers; harmless where that is being done."""
        if engine not in self._tasks:
            self._tasks[engine] = asyncio.get_running_loop().create_task(self._watch(engine))

    def stop(self, engine: Engine) -> None:
        """Leave it alone."""
        task = self._tasks.pop(engine, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Stop all."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, engine: Engine) -> None:
        delay = _FIRST_DELAY_S
        while True:
            await asyncio.sleep(delay)  # another process: there is no event to wait for
            if await answers(*engine.address):
                del self._tasks[engine]
                self._up(engine)
                return
            delay = min(2 * delay, _LONGEST_DELAY_S)


async def answers(host: str, port: int) -> bool:
    """Whether `GET /health` is answered in time, and not with a server error."""
    try:
        async with asyncio.timeout(_DEADLINE_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"GET /health HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
                line = await reader.readline()
            finally:
                writer.transport.abort()
    except (OSError, ValueError):  # refused, broken, too late, or an endless line
        return False
    return is_alive(line)


def is_alive(answer: bytes | bytearray) -> bool:
    """Whether this answer to a health check says that the engine is well."""
    return _ALIVE.match(answer) is not None
