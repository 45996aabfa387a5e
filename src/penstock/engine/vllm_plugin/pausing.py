"""Pauses and sleeps that end no request, and wake-ups that start none too early.

VLLM's pause with `abort`, and its sleep, finish every request in flight. The one process that is to answer the pause
then builds all those answers first, and a client that cannot send its request again gets half an answer. Here both do
what `keep` does: requests give up their KV and wait in the core's queue, to be computed again from prompt and tokens at
resume; their clients see a delay. `POST /pause?mode=abort&release=true` is vLLM's own abort, for an engine that is not
to be resumed: requests of our client go on elsewhere. `/abort_requests` ends requests as ever.

So there is something in the queue when an engine wakes up. VLLM's wake-up resumes the scheduler whoever paused it, and
after a sleep of level 2 also before there are weights; and a resume while the memory is away would end the engine. Here
`Holds`, in the core's own process, says whether generation may go on: when nobody has paused, all memory is back, and
weights that were dropped have been replaced (by an update of ours, a native one, or `reload_weights`).

VLLM (0.26 to 0.32) has no extension point for this: the API server's calls on the core are led to functions of ours.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any
from urllib.parse import parse_qs

from penstock.engine.vllm_plugin.every_rank import hear_all

ROUTES = frozenset({"/pause", "/resume", "/sleep", "/wake_up", "/finish_weight_update", "/collective_rpc"})
MEMORY_TAGS = frozenset({"weights", "kv_cache"})
DROPS_WEIGHTS = 2
"""The sleep level whose wake-up brings memory and no weights."""

_release: ContextVar[bool] = ContextVar("penstock_release", default=False)
"""The pause that this task serves asks for vLLM's own abort."""


# --- in the core's process -------------------------------------------------------------------------------------------


class Holds:
    """What holds the generation of one engine core. Its methods run in the core's own thread, between two steps."""

    def __init__(self, core: Any) -> None:
        self.paused = False
        """Somebody has called `/pause` and not yet `/resume`."""
        self.asleep: frozenset[str] = frozenset()
        self.without_weights = False
        self._core = core

    def pause(self, mode: str, clear_cache: bool) -> Any:  # noqa: FBT001 - as vLLM has it
        """`/pause`; a future where steps are under way."""
        done = self._core.pause_scheduler(mode, clear_cache)
        self.paused = True
        return done

    def resume(self) -> None:
        """`/resume`."""
        self.paused = False
        self.go_on()

    def sleep(self, level: int, mode: str) -> Any:
        """`/sleep`; a future where steps are under way."""
        done = self._core.sleep(level, mode)
        self.asleep = MEMORY_TAGS if level else self.asleep
        self.without_weights |= level == DROPS_WEIGHTS
        return done

    def wake_up(self, tags: list[str] | None) -> Any:
        """`/wake_up`: vLLM's, whose last word, the resume, is left out, and said if it may be."""
        self._core.resume_scheduler = lambda: None
        try:
            awake = self._core.wake_up(tags)
        finally:
            del self._core.resume_scheduler
        still = frozenset[str]() if tags is None else self.asleep - set(tags)
        back, self.asleep = self.asleep - still, still
        if self.without_weights and "weights" in back:
            self._core.collective_rpc("penstock_weights_dropped")
        self.go_on()
        return awake

    def check_awake(self) -> str | None:
        """Why weights cannot be loaded now: where they belong there is no memory."""
        if "weights" in self.asleep:
            return "the engine's weights are asleep: wake them (wake_up with the tag weights) before an update"
        return None

    def weights_are_out(self) -> None:
        """Nothing may be computed before weights are in."""
        self.without_weights = True

    def weights_are_in(self) -> None:
        """New weights are in force, and labelled."""
        self.without_weights = False
        self.go_on()

    def go_on(self) -> None:
        """Let tokens be made unless something holds them."""
        if not self.paused and not self.asleep and not self.without_weights:
            self._core.resume_scheduler()


def mode_in_core(mode: str) -> str:
    """VLLM's mode for ours: nothing is ended."""
    return "keep" if mode == "abort" else mode


def holds_of(core: Any) -> Holds:
    """Of vLLM's EngineCore, in its process."""
    if not hasattr(core, "penstock_holds"):
        core.penstock_holds = Holds(core)
    return core.penstock_holds


def extend_core() -> None:
    """Make the methods of `Holds` callable on the core, as `penstock_pause` and so on; again is harmless."""
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415 - only inside vLLM

    for method in (
        Holds.pause, Holds.resume, Holds.sleep, Holds.wake_up, Holds.weights_are_out, Holds.weights_are_in,
        Holds.check_awake,
    ):  # fmt: skip
        setattr(EngineCore, f"penstock_{method.__name__}", _on_holds(method))


def _on_holds(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)  # vLLM reads the signature
    def call(core: Any, *args: Any) -> Any:
        return method(holds_of(core), *args)

    return call


# --- in the API server's process -------------------------------------------------------------------------------------


class Pausing:
    """Leads the control calls of one API server to `Holds`."""

    def __init__(self) -> None:
        self._core: Any = None

    def install(self, engine: Any) -> None:
        """Hook into the AsyncLLM, once."""
        if self._core is not None:
            return
        self._core = core = engine.engine_core
        hear_all(engine)
        engine.pause_generation = functools.partial(self._pause, engine.renderer)
        engine.resume_generation = functools.partial(core.call_utility_async, "penstock_resume")
        core.sleep_async = self._sleep
        core.wake_up_async = self._wake_up
        engine.collective_rpc = functools.partial(self._collective_rpc, engine.collective_rpc)
        if hasattr(engine, "update_weight_version"):  # vLLM 0.26 has its label later: `/penstock/weights/label`
            engine.finish_weight_update = functools.partial(self._finish, engine.finish_weight_update)

    def read(self, query: bytes) -> None:
        """Note what a request to one of `ROUTES` says beyond vLLM's own parameters."""
        asked = parse_qs(query.decode(errors="replace")).get("release", [""])
        _release.set(asked[-1].lower() in {"true", "1"})

    async def weights_are_in(self, engine: Any) -> None:
        """New weights are in force, and labelled: let generation go on unless something else holds it."""
        self.install(engine)
        await self._core.call_utility_async("penstock_weights_are_in")

    async def _pause(
        self,
        renderer: Any,
        *,
        mode: str = "abort",
        clear_cache: bool = True,
        wait_for_inflight_requests: bool | None = None,
    ) -> None:
        """`AsyncLLM.pause_generation`, without its 20 ms of sleep, "not required for correctness" by its comment."""
        if wait_for_inflight_requests:  # an older name of vLLM 0.26, whose route gives it
            mode = "wait"
        if clear_cache:
            await renderer.clear_mm_cache_async()
        await self._core.call_utility_async("penstock_pause", _mode(mode), clear_cache)

    async def _sleep(self, level: int = 1, mode: str = "abort") -> None:
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
