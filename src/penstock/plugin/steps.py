"""The steps of an engine core: their tokens in the last seconds, and calls after each step or between two.

A step costs one count of its tokens, from which `token_meter.py` takes the steady rate before an update. Updates and
small steps (`pause.py`) add a call while they last.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

STEADY_S = 2.0
"""Seconds of steps that give the steady rate; fewer if requests came or generation resumed since."""

_CALL = object()
"""Marks an item of a core's input queue that is a function to call."""


def between_steps(core: Any, work: Callable[[], None]) -> None:
    """Let the core's thread call `work` between two steps."""
    core.input_queue.put_nowait((_CALL, work))


def taking_calls(handle: Callable[..., None]) -> Callable[..., None]:
    """Wrap `EngineCoreProc._handle_client_request` for `between_steps`."""

    @functools.wraps(handle)
    def call(core: Any, request_type: Any, request: Any) -> None:
        if request_type is _CALL:
            request()
        else:
            handle(core, request_type, request)

    return call


class Steps:
    """The steps of one engine core, or simulated engine. The clock is in seconds. Methods run in the core's thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.in_flight = 0
        """Requests after the last step, running or waiting."""
        self.after: set[Callable[[float, int], None]] = set()
        """Called after each step with its time and tokens."""
        self.tokens = 0
        self.window: deque[tuple[float, int]] = deque()
        """Time and total tokens of each step in the last `STEADY_S` seconds."""

    def follow(self, scheduler: Any) -> None:
        """Count the steps of vLLM's scheduler. vLLM (0.26 to 0.33) has no hook for this."""
        scheduler.update_from_output = functools.partial(self._update, scheduler, scheduler.update_from_output)

    def _update(self, scheduler: Any, update_from_output: Any, scheduled: Any, *args: Any) -> Any:
        outputs = update_from_output(scheduled, *args)
        tokens = sum([len(one.new_token_ids) for of_client in outputs.values() for one in of_client.outputs])
        self.count(tokens, sum(scheduler.get_request_counts()))
        return outputs

    def count(self, tokens: int, in_flight: int) -> None:
        """Count a step's tokens; `in_flight`: requests left, running or waiting."""
        now, window = self.clock(), self.window
        self.tokens += tokens
        if not self.in_flight:
            window.clear()
        window.append((now, self.tokens))
        while len(window) > 2 and window[1][0] <= now - STEADY_S:  # noqa: PLR2004 - two make a rate
            window.popleft()
        self.in_flight = in_flight
        if self.after:
            for call in tuple(self.after):
                call(now, tokens)
