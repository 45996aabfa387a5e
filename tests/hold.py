"""Makes requests certainly in flight: engines of tests hold each at a number of tokens until the test lets it go on.

    config = EngineConfig(..., extra_args=hold.extra_args)
    with hold.at(20):
        task = asyncio.create_task(engine.sample(prompt, 4, params))
        await hold.reached(4)
        await engine.update_weights(...)
    await task

However slow the test or the engine is, four requests have 20 tokens each when the update comes. The engine itself is
free: its core takes calls, new requests are computed, and a step without the held ones is one of vLLM's own. A request
that is computed again after an update makes one token more each time. `held_scheduler.py` is the engine's side.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from patience import asked


class Hold:
    """The hold of all engines that were started with its `extra_args`; the folder is its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._limit = folder / "limit"
        self._moves = 0
        self.extra_args = {
            "scheduler-cls": "held_scheduler.HeldScheduler",
            "additional-config": json.dumps({"hold": str(folder)}),
        }

    @contextmanager
    def at(self, tokens: int) -> Iterator[None]:
        """Hold every request at so many tokens of its own, those that it is sent with not among them."""
        self.move(tokens)
        try:
            yield
        finally:
            self.release()

    def move(self, tokens: int) -> None:
        """Let requests go on to another number of tokens."""
        new = self._folder / "new"
        self._moves += 1
        new.write_text(f"{self._moves} {tokens}")
        new.rename(self._limit)

    def release(self) -> None:
        """Let requests go on to their end; more than once is harmless."""
        self._limit.unlink(missing_ok=True)

    async def reached(self, requests: int) -> None:
        """Return when at least so many samples stand at the limit, in all engines together."""
        await asked(self._held, lambda held: held >= requests)

    async def _held(self) -> int:
        reports = [file.read_text().split() for file in self._folder.glob("held-*")]
        return sum(int(held) for move, held in reports if int(move) == self._moves)
