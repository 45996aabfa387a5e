"""Pauses and sleeps that end no request, and wake-ups that start none too early, as Penstock's plugin has them in vLLM.

`SimEngine` itself pauses, sleeps and wakes up as vLLM does, and a plain one is left to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.types import PauseMode

if TYPE_CHECKING:
    from penstock.sim.engine import SimEngine

MEMORY_TAGS = frozenset({"weights", "kv_cache"})
DROPS_WEIGHTS = 2


class Holds:
    """What holds the generation of one engine; see `engine/vllm_plugin/pause.py`."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine
        self._paused = False
        self._without_weights = False

    async def pause(self, mode: PauseMode, *, clear_cache: bool, release: bool) -> None:
        """`/pause`; `release`: what is in flight ends with the finish reason `abort`, to go on elsewhere."""
        await self._engine.pause(self._mode(mode, release=release), clear_cache=clear_cache)
        self._paused = True

    async def resume(self) -> None:
        """`/resume`."""
        self._paused = False
        if self._engine.config.plain:
            await self._engine.resume()
        else:
            await self._go_on()

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """`/sleep`."""
        await self._engine.sleep(level, self._mode(mode))
        self._without_weights |= level == DROPS_WEIGHTS

    async def wake_up(self, tags: Sequence[str] | None) -> bool:
        """`/wake_up`; returns whether all memory is back."""
        if self._engine.config.plain:
            return await self._engine.wake_up(tags)
        awake = await self._engine.wake_up(tags, resume=False)
        await self._go_on()
        return awake

    def weights_are_out(self) -> None:
        """Nothing may be computed before weights are in."""
        self._without_weights = True

    async def weights_are_in(self) -> None:
        """New weights are in force, and labelled."""
        self._without_weights = False
        if not self._engine.config.plain:
            await self._go_on()

    async def _go_on(self) -> None:
        if not self._paused and not self._engine.asleep and not self._without_weights:
            await self._engine.resume()

    def _mode(self, mode: PauseMode, *, release: bool = False) -> PauseMode:
        ends = release or self._engine.config.plain
        return PauseMode.KEEP if mode is PauseMode.ABORT and not ends else mode
