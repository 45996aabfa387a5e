"""VLLM's own routes that pause, sleep and wake an engine, led from the API server to `PauseState` in its cores.

vLLM (0.26 to 0.33) has no extension point for this: methods of its AsyncLLM are replaced.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
import functools
from contextvars import ContextVar
from typing import Any
from urllib.parse import parse_qs

from penstock.plugin import compat
from penstock.plugin.pause import mode_in_core
from penstock.rooms import plugged_in

_release: ContextVar[bool] = ContextVar("penstock_release", default=False)
"""The pause that this task serves asks for vLLM's own abort."""


class PauseControl:
    """Leads the control calls of one API server to `PauseState`, in the cores."""

    routes = frozenset({"/pause", "/resume", "/sleep", "/wake_up", "/finish_weight_update", "/collective_rpc"})

    def __init__(self) -> None:
        self._core: Any = None
        self.changing = asyncio.Lock()
        """Held by a sleep, which takes memory away, and by an update, which writes to it."""

    def install(self, engine: Any) -> None:
        if self._core is not None:
            return
        self._core = core = engine.engine_core
        plugged_in("replies.cores")(engine)
        engine.pause_generation = self._pause
        engine.resume_generation = functools.partial(core.call_utility_async, "penstock_resume")
        core.sleep_async = self._sleep
        core.wake_up_async = self._wake_up
        engine.collective_rpc = functools.partial(self._collective_rpc, engine.collective_rpc)
        if compat.labels_weights(engine):  # others have their label later: `/penstock/weights/label`
            engine.finish_weight_update = functools.partial(self._finish, engine.finish_weight_update)

    def read(self, query: bytes) -> None:
        """Read the parameter of ours in a query to one of `routes`."""
        asked = parse_qs(query.decode(errors="replace")).get("release", [""])
        _release.set(asked[-1].lower() in {"true", "1"})

    async def weights_are_in(self, engine: Any) -> None:
        """Let generation go on unless something else holds it: new weights are in force, and labelled."""
        self.install(engine)
        await self._core.call_utility_async("penstock_weights_are_in")

    async def _pause(
        self,
        *,
        mode: str = "abort",
        clear_cache: bool = True,
        wait_for_inflight_requests: bool | None = None,
    ) -> None:
        """`AsyncLLM.pause_generation` without its 20 ms of sleep, "not required for correctness" by its comment.

        It leaves the cache of processed images, whose other half stays too.
        """
        mode = compat.pause_mode(mode, wait_for_inflight_requests)
        await self._core.call_utility_async("penstock_pause", _mode(mode), clear_cache)

    async def _sleep(self, level: int = 1, mode: str = "abort") -> None:
        async with self.changing:
            await self._core.call_utility_async("penstock_sleep", level, _mode(mode))

    async def _wake_up(self, tags: list[str] | None = None) -> Any:
        return await self._core.call_utility_async("penstock_wake_up", tags)

    async def _finish(self, finish: Any, *args: Any, **kwargs: Any) -> None:
        await finish(*args, **kwargs)
        await self._core.call_utility_async("penstock_weights_are_in")

    async def _collective_rpc(self, collective_rpc: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        results = await collective_rpc(method, *args, **kwargs)
        if method == "reload_weights":
            await self._core.call_utility_async("penstock_weights_are_in")
        return results


def _mode(mode: str) -> str:
    return mode if _release.get() else mode_in_core(mode)
