"""Pauses that end no request, and small steps before an update.

vLLM's pause with `abort` finishes every request in flight. Here it acts as `keep`: requests give up their KV and wait
in the core's queue. At resume they are recomputed from prompt and tokens, and their clients see a delay.
`POST /pause?mode=abort&release=true` is vLLM's own abort, for an engine that will not be resumed. Our client's requests
then continue on other engines.

`PauseState`, in the core's process, decides whether tokens are made. `cores.py` redirects the API server's routes to
it. `sleeping.py` has sleep and wake-up.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable
from concurrent.futures import Future
from functools import cached_property
from typing import Any

from penstock.errors import EngineError, StateError
from penstock.plugin.steps import Steps
from penstock.rooms import plugged_in

PAUSE, UPDATE, WEIGHTS = "pause", "update", "torn"
"""Reasons to hold a core. `PAUSE`: a client called `/pause`, not yet `/resume`. `UPDATE`: an update waits for a step,
and has changed nothing. `WEIGHTS`: weights were dropped, or an update has written only a part of them."""
ASLEEP = frozenset({"weights", "kv_cache", "scheduling"})
"""Reasons of a sleep, by vLLM's names: memory that is gone, or (level 0) none."""
CAP_S = 5.0
"""Seconds of small steps after a version was prepared. A fleet's slowest engine may need as long to prepare."""
CAP_TOKENS = 1024
"""Tokens of a small step. An H200 computes so many prompt tokens about as fast as one token for 256 long contexts."""


class PauseState:
    """The holds on one engine core's generation. Methods run in the core's thread, between two steps."""

    def __init__(self, core: Any, steps: Steps) -> None:
        self.holds: set[object] = set()
        """`PAUSE`, `UPDATE`, `WEIGHTS`, some of `ASLEEP`, and changes of adapters that wait for the step under way."""
        self.core = core
        self._steps = steps
        self._idle_updates: deque[Hashable] = deque(maxlen=8)
        """Updates of an idle core before the meter was needed."""
        self._held_s = 0.0
        self._since: float | None = None

    @cached_property
    def meter(self) -> Any:
        """Meter of the core's tokens, `token_meter.TokenMeter`."""
        return plugged_in("token_meter")(self._steps, self._idle_updates)

    @property
    def _measures(self) -> bool:
        """Whether the meter is needed: requests are in flight, or were at an earlier update or pause."""
        return "meter" in vars(self) or any(self.core.scheduler.get_request_counts())

    @property
    def held_s(self) -> float:
        """Seconds of the core's life during which it was held, from the call on."""
        return self._held_s + (0.0 if self._since is None else time.perf_counter() - self._since)

    def measure(self, update: Hashable) -> None:
        """Start to measure an update's cost, if tokens are being made."""
        if self.holds:
            return
        if self._measures:
            self.meter.begin(update, self.core.scheduler.get_request_counts()[0])
        else:
            self._idle_updates.append(update)

    def end_measurement(self) -> None:
        """End a measurement under way now, because something else stops the tokens."""
        if self._measures:
            self.meter.close()

    def hold(self, reason: object) -> None:
        """Make no tokens until `let_go`."""
        self._since = time.perf_counter() if self._since is None else self._since
        self.holds.add(reason)

    def let_go(self, *reasons: object) -> None:
        """End holds, and resume unless something else holds the core."""
        self.holds.difference_update(reasons)
        if not self.holds:
            self.core.resume_scheduler()
            self._held_s, self._since = self.held_s, None
            if self._measures:
                self.meter.resume()

    def pause(self, mode: str, clear_cache: bool) -> Any:  # noqa: FBT001 - as in vLLM
        """`/pause`. Return a future if steps are under way."""
        self.end_measurement()
        done = self.core.pause_scheduler(mode, clear_cache)
        self.hold(PAUSE)
        return done

    def resume(self) -> None:
        """`/resume`."""
        self.let_go(PAUSE)

    def weights_are_in(self) -> None:
        """Let go, because new weights are in force and labelled."""
        self.let_go(UPDATE, WEIGHTS)

    def require_awake(self) -> None:
        """Raise StateError if the memory of the weights is gone."""
        if "weights" in self.holds:
            raise StateError(
                "the engine's weights are asleep: wake them (wake_up with the tag weights) before an update"
            )


class StepCap:
    """Small steps of one engine core between `prepare` and `apply`, because a pause waits for running steps.

    A step of 8,192 prompt tokens takes 0.2 s for an 8B model on an H200, four times as long as loading its weights. No
    step can be taken back, so `prepare` is answered once the larger ones have ended. Small steps cost tokens/s until
    `apply`, or for `CAP_S`. Methods run in the core's thread, between two steps.
    """

    def __init__(self, core: Any, steps: Steps) -> None:
        self._core = core
        self._steps = steps
        self._usual: int | None = None
        """Most tokens of the core's usual steps, while steps are small; else None."""
        self._until = 0.0
        self._large: Any = None
        """The last step launched before steps became small, until it has ended."""
        self._waiting: list[Future[dict[str, Any]]] = []

    def begin(self) -> Future[dict[str, Any]]:
        """Make small steps until `end`, or for `CAP_S`. The future ends once no larger step is under way."""
        core, scheduler = self._core, self._core.scheduler
        if self._usual is None:
            self._large = core.batch_queue[0] if core.batch_queue else None
            self._usual = usual = scheduler.max_num_scheduled_tokens
            scheduler.max_num_scheduled_tokens = min(usual, _small(scheduler))
            self._steps.after.add(self._after_step)
        self._until = time.monotonic() + CAP_S
        done: Future[dict[str, Any]] = Future()
        self._waiting.append(done)
        self._after_step()
        return done

    def end(self) -> None:
        """Make steps of the usual size. A second call is harmless."""
        if self._usual is not None:
            self._core.scheduler.max_num_scheduled_tokens, self._usual = self._usual, None
            self._steps.after.discard(self._after_step)
        self._large = None
        self._after_step()

    def _after_step(self, *_: float) -> None:
        """Answer once the last large step has ended. End small steps after `CAP_S`."""
        if self._large is None or not any(step is self._large for step in self._core.batch_queue):
            self._large = None
            waiting, self._waiting = self._waiting, []
            for done in waiting:
                done.set_result({"ok": True})
        if self._usual is not None and time.monotonic() > self._until:
            self.end()


def _small(scheduler: Any) -> int:
    """Return the tokens of a small step.

    It holds every running request's next token and a block, or a whole prompt that cannot be cut. An image that a model
    needs at once (`disable_chunked_mm_input`) and that did not fit would wait, and all new requests behind it.
    """
    decoding = scheduler.max_num_running_reqs * (1 + scheduler.num_spec_tokens)
    config = scheduler.scheduler_config
    cut = config.enable_chunked_prefill and not config.disable_chunked_mm_input
    whole = 0 if cut else scheduler.max_model_len
    return max(CAP_TOKENS, decoding + scheduler.block_size, whole)


def clear_kv(core: Any) -> None:
    """Empty the caches of a paused core that depend on its weights.

    Raises:
        EngineError: vLLM could not empty them. The core must not continue.
    """
    if not core.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
        raise EngineError("vLLM could not empty its KV cache, or its connector's: the engine must be restarted")
    core.reset_encoder_cache()


def mode_in_core(mode: str) -> str:
    """Return vLLM's mode for ours, which ends no request."""
    return "keep" if mode == "abort" else mode
