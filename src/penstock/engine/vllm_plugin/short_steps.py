"""Steps that an update does not wait for long: between `prepare` and `apply` an engine makes small ones, one at a time.

VLLM launches a step before the last one has ended, and a step may be of 8,192 prompt tokens: 0.2 s of an 8B model on an
H200, four times what it takes to bring all its weights there. Nothing takes back a step that was launched, so a pause
waits for one and a half of them, and in a fleet everyone waits for the engine that has the longest. But an update
announces itself. Once a version is prepared here, steps are of few tokens, and none is launched before the last one has
ended; `prepare` is answered when what was launched before is done, so that time passes while tokens are made. And since
the answer to the last `prepare` is followed by `apply`, an engine that has answered waits for it a moment, `HOLD_S` at
most, before it launches another step: else `apply` always comes when one has just begun.

It costs tokens/s, for the few milliseconds until `apply` comes, or for `UNTIL_S` where none does. The wait is part of
the update's bubble, also where `apply` came too late for it.

Where tokens are drafted and steps launched ahead, the scheduler has but placeholders for the drafts of the step before.
For a request with a grammar vLLM looks them up only where that step is still under way; else 0.26 leaves what follows
the first token of a step unconstrained (its own error ends the request), and 0.32 accepts no draft. So there steps are
small, and launched ahead as ever.

VLLM has no extension point for this: the core's `step_fn`, and two attributes of its scheduler, are set for that while
(0.26 to 0.32).
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from penstock.engine.vllm_plugin.pausing import holds_of

logger = logging.getLogger("vllm.penstock")

UNTIL_S = 5.0
"""After a version was prepared; the slowest engine of a fleet may take so long for what this one has done already."""
SHORT_TOKENS = 1024
"""Of a step: prompts of so many tokens take an H200 about as long as the next tokens of 256 long contexts."""
HOLD_S = 0.01
"""From the answer to `prepare` to `apply` it takes 4 ms where no other engine is asked; else maybe more than a step."""

StepFunction = Callable[[], tuple[Mapping[int, Any] | None, bool]]


class ShortSteps:
    """Of one engine core. Its methods run in the core's own thread, between two steps."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._usual: StepFunction | None = None
        """The core's own `step_fn`, while there is another in its place."""
        self._tokens = 0
        self._drafts_ahead = False
        self._until = 0.0
        self._waiting: list[Callable[[], None]] = []
        self._long: Any = None
        """The last step that was launched before they became short."""
        self._told: float | None = None
        """When (`time.perf_counter()`) somebody was told that no other step is under way, until `apply` was awaited."""
        self._apply_is_here = threading.Event()
        self._stood_s = 0.0

    def apply_is_here(self) -> None:
        """What ends this is about to be in the core's input queue; of these methods the one for any thread."""
        self._apply_is_here.set()

    def begin(self, then: Callable[[], None]) -> None:
        """Make short steps until `end`, or for `UNTIL_S`; call `then` once no other step is under way."""
        self._apply_is_here.clear()
        self._told = None
        if self._usual is None:
            try:
                self._shorten()
            except AttributeError as error:  # an update is worth more than that it waits for next to none
                logger.warning("an update waits for long steps: vLLM or its scheduler has changed: %s", error)
                then()
                return
        self._until = time.monotonic() + UNTIL_S
        self._waiting.append(then)
        if not self._long_is_under_way():
            self._tell()

    def _shorten(self) -> None:
        core, scheduler = self._core, self._core.scheduler
        # All is read before anything is set.
        ahead = bool(core.check_for_draft_tokens and core.async_scheduling)
        usual, tokens, queue = core.step_fn, scheduler.max_num_scheduled_tokens, core.batch_queue
        scheduler.max_num_scheduled_tokens = min(tokens, _short(scheduler))
        self._tokens, self._drafts_ahead = tokens, ahead
        self._long = queue[0] if queue else None
        self._usual, core.step_fn = usual, self._step

    def end(self) -> float:
        """Make steps as ever; more than once is harmless.

        Returns:
            Seconds in which the core has waited for this and made nothing, since steps became short.
        """
        if self._usual is not None:
            self._core.step_fn, self._usual = self._usual, None
            self._core.scheduler.max_num_scheduled_tokens = self._tokens
            self._long = None
        self._tell()
        stood, self._stood_s = self._stood_s, 0.0
        return stood

    def _step(self) -> tuple[Mapping[int, Any] | None, bool]:
        """In place of the core's `step_fn`; what it makes goes to the clients at once, and not to the caller."""
        usual = self._usual
        if usual is None or time.monotonic() > self._until:
            self.end()
            return self._core.step_fn()
        if self._drafts_ahead:
            if not self._long_is_under_way():
                self._tell()
            return usual()
        self._finish(usual)
        self._tell()
        if self._apply_comes():
            return None, False
        outputs, executed = usual()
        self._hand_on(outputs)
        self._finish(usual)
        return None, executed

    def _apply_comes(self) -> bool:
        """Whether it is in the core's input by now, for which a core that has just told that it is ready waits."""
        told, self._told, began = self._told, None, time.perf_counter()
        if told is not None and (left := told + HOLD_S - began) > 0:  # else it had nothing to do since, and now has
            self._apply_is_here.wait(left)
            stood = time.perf_counter() - began
            self._stood_s += stood
            holds_of(self._core).stood_still(stood)
        return self._apply_is_here.is_set()

    def _long_is_under_way(self) -> bool:
        return any(step is self._long for step in self._core.batch_queue or ())

    def _finish(self, usual: StepFunction) -> None:
        """Wait for what was launched, and launch nothing."""
        scheduler = self._core.scheduler
        while self._core.batch_queue:
            scheduler.has_requests = lambda: False
            try:
                outputs, _ = usual()
            finally:
                del scheduler.has_requests
            self._hand_on(outputs)

    def _hand_on(self, outputs: Mapping[int, Any] | None) -> None:
        for output in (outputs or {}).items():
            self._core.output_queue.put_nowait(output)

    def _tell(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._told = time.perf_counter()
        for then in waiting:
            then()


def short_steps_of(core: Any) -> ShortSteps:
    """Of vLLM's EngineCore, in its process."""
    if not hasattr(core, "penstock_short_steps"):
        core.penstock_short_steps = ShortSteps(core)
    return core.penstock_short_steps


def _short(scheduler: Any) -> int:
    """Enough for a token of every request that runs, and for a block of a prompt, or all of it where it is not cut.

    Nor is an image of a model that looks at all of it at once (`disable_chunked_mm_input`): what does not fit in a step
    would wait, and all new requests behind it.
    """
    decoding = scheduler.max_num_running_reqs * (1 + scheduler.num_spec_tokens)
    config = scheduler.scheduler_config
    cut = config.enable_chunked_prefill and not config.disable_chunked_mm_input
    whole = 0 if cut else scheduler.max_model_len
    return max(SHORT_TOKENS, decoding + scheduler.block_size, whole)
