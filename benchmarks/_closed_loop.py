"""Load from a closed loop: so many clients, each with its next request as soon as it has its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from penstock.errors import PenstockError
from penstock.fleet.fleet import Fleet

Ask = Callable[[int], Awaitable[int]]
"""Makes request number i; returns the tokens received."""


class ClosedLoop:
    """`async with ClosedLoop(ask, 64) as loop:`; on leaving it, no request is begun and those in flight end."""

    def __init__(self, ask: Ask, concurrent: int) -> None:
        self.received = 0
        """Tokens of complete answers."""
        self.answers = 0
        self.failed: list[str] = []
        self.latencies: list[tuple[float, float]] = []
        """When each answer came (`time.perf_counter`), and how long it took, in seconds."""
        self._ask = ask
        self._concurrent = concurrent
        self._begun = 0
        self._stopping = False
        self._workers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._workers = [asyncio.create_task(self._work()) for _ in range(self._concurrent)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        if error is not None:
            for worker in self._workers:
                worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=error is not None)

    async def _work(self) -> None:
        while not self._stopping:
            self._begun += 1
            began = time.perf_counter()
            try:
                tokens = await self._ask(self._begun)
            except PenstockError as failed:
                self.failed.append(str(failed))
                continue
            self.received += tokens
            self.answers += 1
            now = time.perf_counter()
            self.latencies.append((now, now - began))


async def made(fleet: Fleet) -> int:
    """Tokens that the live engines count as generated."""
    return sum(engine.stats.generation_tokens for engine in await fleet.engines() if engine.stats is not None)
