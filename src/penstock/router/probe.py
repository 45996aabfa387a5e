"""Whether an engine is there: asked of one that refused a connection until it is back, and of one that seems gone."""

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
    """One probe for each engine that is down, with exponential back-off between tries; and single health checks.

    Args:
        up: called with an engine that was down and answers again.
        down: called with an engine that failed a health check.
    """

    def __init__(self, up: Callable[[Engine], None], down: Callable[[Engine], None]) -> None:
        self._up = up
        self._down = down
        self._tasks: dict[Engine, asyncio.Task[None]] = {}
        self._checks: dict[Engine, asyncio.Task[None]] = {}

    def start(self, engine: Engine) -> None:
        """Probe it until it answers; harmless where that is being done."""
        if engine not in self._tasks:
            self._tasks[engine] = asyncio.get_running_loop().create_task(self._watch(engine))

    def check(self, engine: Engine) -> None:
        """See whether it is down; harmless where that is being done, or known."""
        if engine not in self._tasks and engine not in self._checks:
            self._checks[engine] = asyncio.get_running_loop().create_task(self._check(engine))

    def stop(self, engine: Engine) -> None:
        """Leave it alone."""
        for tasks in (self._tasks, self._checks):
            task = tasks.pop(engine, None)
            if task is not None:
                task.cancel()

    async def close(self) -> None:
        """Stop all."""
        tasks = [*self._tasks.values(), *self._checks.values()]
        self._tasks.clear()
        self._checks.clear()
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

    async def _check(self, engine: Engine) -> None:
        healthy = await answers(*engine.address)
        del self._checks[engine]
        if healthy is False:  # no answer in time is None: an engine may be too busy to say that it is well
            self._down(engine)


async def answers(host: str, port: int) -> bool | None:
    """Whether `GET /health` is answered, and not with a server error; None where nothing came in time."""
    try:
        async with asyncio.timeout(_DEADLINE_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"GET /health HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
                line = await reader.readline()
            finally:
                writer.transport.abort()
    except TimeoutError:
        return None
    except (OSError, ValueError):  # refused, broken, or an endless line
        return False
    return _ALIVE.match(line) is not None
