"""Requests that wait: for the gate to open, or for an engine that may serve them. First come, first served."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import Protocol

from penstock.router.refusal import RefusalError

_SLICE = 64
"""Requests let go in one turn of the event loop, so that ten thousand of them do not keep it from accepting."""


class Waiting(Protocol):
    """A request as the gate sees it."""

    patience_used: float
    """Seconds that it has waited for an engine so far, time at a closed gate not counted. Kept by the gate."""

    def try_place(self) -> bool:
        """Send it on its way; False where no engine may serve it now."""
        ...

    def held(self) -> None:
        """It starts to wait."""
        ...

    def refuse(self, refusal: RefusalError) -> None:
        """It cannot wait, or not any longer."""
        ...


class Gate:
    """Lets requests through in order of arrival, or holds them.

    A request goes through when the gate is open and it can be placed. There is no polling: `recheck` says that the
    engines have changed.

    Args:
        max_held: bound of the queue; a request beyond it is refused with 503.
        max_hold_s: seconds that a request waits for an engine before it is refused with 503. Time at a closed gate does
            not count: a pause may be as long as it likes, and no request fails of it.
    """

    def __init__(self, *, max_held: int, max_hold_s: float) -> None:
        self._max_held = max_held
        self._max_hold_s = max_hold_s
        self._closed_at: float | None = None
        self._closed_s = 0.0
        """How long the gate was closed before, all times together."""
        self._queue: OrderedDict[Waiting, float] = OrderedDict()
        """Waiting requests with the time at which each gives up, by a clock that stands still while it is closed."""
        self._parked: OrderedDict[Waiting, float] = OrderedDict()
        """Those of them that this pass has looked at and no engine may serve."""
        self._passing = False
        self._again = False

    @property
    def closed(self) -> bool:
        """Whether it is closed for all."""
        return self._closed_at is not None

    def __len__(self) -> int:
        return len(self._queue) + len(self._parked)

    def submit(self, request: Waiting) -> None:
        """Let a request through, or hold it until it has waited for `max_hold_s` in all."""
        if self.closed or self._passing or not request.try_place():
            if len(self) >= self._max_held:
                request.refuse(
                    RefusalError(503, "queue_full", f"{len(self)} requests are waiting already; retry later")
                )
                return
            self._queue[request] = self._open_time(time.monotonic()) + self._max_hold_s - request.patience_used
            request.held()

    def discard(self, request: Waiting) -> None:
        """Forget a request whose client has gone."""
        self._queue.pop(request, None)
        self._parked.pop(request, None)

    def set(self, *, closed: bool) -> None:
        """Close or open it for all."""
        now = time.monotonic()
        if closed and self._closed_at is None:
            self._closed_at = now
        elif not closed:
            if self._closed_at is not None:
                self._closed_s += now - self._closed_at
                self._closed_at = None
            self.recheck()

    def recheck(self) -> None:
        """Something changed that may let waiting requests go."""
        if self._passing:
            self._again = True
        elif self._queue and not self.closed:
            self._passing = True
            self._pass_slice()

    def expire(self, now: float) -> None:
        """Refuse those that have waited too long; `now` is `time.monotonic()`."""
        if self.closed:
            return
        now = self._open_time(now)
        late = [r for queue in (self._queue, self._parked) for r, deadline in queue.items() if deadline <= now]
        for request in late:
            self.discard(request)
            why = f"no engine could serve it for {self._max_hold_s:g} s; retry later or raise max_hold_s"
            request.refuse(RefusalError(503, "held_too_long", why))

    def _open_time(self, now: float) -> float:
        """`now` by a clock that stands still while the gate is closed."""
        return (now if self._closed_at is None else self._closed_at) - self._closed_s

    def _pass_slice(self) -> None:
        now = self._open_time(time.monotonic())
        for _ in range(_SLICE):
            if self.closed or not self._queue:
                self._end_pass()
                return
            request, deadline = self._queue.popitem(last=False)
            request.patience_used = self._max_hold_s - (deadline - now)
            if not request.try_place():
                self._parked[request] = deadline
        asyncio.get_running_loop().call_soon(self._pass_slice)

    def _end_pass(self) -> None:
        self._parked.update(self._queue)
        self._queue, self._parked = self._parked, OrderedDict()
        self._passing = False
        if self._again:
            self._again = False
            self.recheck()
