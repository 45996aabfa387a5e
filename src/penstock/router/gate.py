"""What a request may wait for.

Each waits in a lane, and each lane has the event that ends its wait; nothing is polled, and no event looks at more
requests than it may let go.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from penstock.router.backend import Backend
from penstock.router.http import RefusalError, RequestHead, shown
from penstock.settings import RouterConfig


class Kind(Enum):
    """What a request waits for."""

    TURN = "turn"
    """The gate for all, and after it has opened those that came before."""
    ADAPTER = "adapter"
    """The gate of its adapter."""
    ENGINE = "engine"
    """The gate of the engine where its session lives, or of every engine that could serve it."""
    ROOM = "room"
    """Load must fall: the policy admits no new session now."""
    NOWHERE = "nowhere"
    """No engine is up that may serve it."""


class Lane(NamedTuple):
    """Requests that the same event lets go, in order of arrival."""

    kind: Kind
    key: str | tuple[int, str | None] = ""
    """Name of the adapter; for ROOM see `Placement.needs`."""


TURN, ENGINE, NOWHERE = Lane(Kind.TURN), Lane(Kind.ENGINE), Lane(Kind.NOWHERE)
_GATES = frozenset({Kind.TURN, Kind.ADAPTER, Kind.ENGINE})
"""Kinds of which no request gives up: a gate may stay closed as long as it likes."""
_SLICE = 64
"""Requests let go in one turn of the event loop, so that ten thousand of them do not keep it from accepting."""
_ABSENT = object()


class Waiter:
    """A request that wants an engine, and may wait at the gate for it."""

    buffered = 0
    """Most bytes that are kept of it while it waits."""
    spared: Backend | None = None
    """One of `tried` that may only have closed an idle connection: it gets the request again if no other can."""
    hold_seconds = 0.0
    """Waited for an engine or for room so far."""
    gate_seconds = 0.0
    """Waited at a closed gate so far."""
    patience_used = 0.0
    """Part of `hold_seconds` in which no engine was up."""
    lane = TURN
    queue: Queue
    """The requests it waits among: those of its lane, or those of its lane that have been woken."""
    since = open_since = 0.0
    """When it began to wait there; the second by the clock that stands still while the gate is closed for all."""
    held_bytes = 0
    """What of `Gate.held_bytes` is its own."""

    def __init__(self, request: RequestHead) -> None:
        self.request = request
        self.tried: list[Backend] = []
        """Engines that took the request, and then closed the connection without an answer or were dead."""

    def placed(self, backend: Backend) -> None:
        """It has an engine, where it counts until `Dispatcher.left`."""
        raise NotImplementedError

    def refuse(self, refusal: RefusalError) -> None:
        """It cannot wait, or not any longer."""
        raise NotImplementedError


Queue = OrderedDict[Waiter, None]


class Gate:
    """Lets requests through in order of arrival, or holds them.

    Time at a closed gate is no part of `max_hold_s`: a pause may be as long as it likes, and no request fails of it.
    Nor is time in which the engines are full: they are at work, and load will fall.

    Args:
        config: limits.
        place: sends a request on its way, or returns the lane where it has to wait.
    """

    def __init__(self, config: RouterConfig, place: Callable[[Waiter], Lane | None]) -> None:
        self._config = config
        self._place = place
        self._closed_at: float | None = None
        self._closed_s = 0.0
        """How long the gate was closed for all before, all times together."""
        self.held_bytes = 0
        """Most bytes that are kept of the requests that wait, and those kept of requests that are still coming in."""
        self._held: set[Waiter] = set()
        self._turns: Queue = OrderedDict()
        self.crowded: dict[Lane, Queue] = {}
        """Lanes of the kind ROOM: only their first is tried, and the next when that one went."""
        self._lanes: dict[Lane, Queue] = {}
        """All other lanes but TURN: the whole of one is woken."""
        self._woken: deque[Queue] = deque()
        """Lanes whose event has come, to be tried before those that came after."""
        self._passing = self._filling = self._filling_soon = False

    # --- state -------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether it is closed for all."""
        return self._closed_at is not None

    def __len__(self) -> int:
        return len(self._held)

    def waits_for_room(self, key: tuple[int, str | None]) -> bool:
        """Whether requests of that key wait for room, and it is not their turn: a newcomer joins them."""
        return not self._filling and Lane(Kind.ROOM, key) in self.crowded

    def held_by(self) -> dict[str, int]:
        """How many wait for what, by the value of `Kind`."""
        counts = {kind.value: 0 for kind in Kind}
        for request in self._held:
            counts[request.lane.kind.value] += 1
        return counts

    # --- requests ----------------------------------------------------------------------------------------------------

    def submit(self, request: Waiter) -> None:
        """Let a request through, or hold it."""
        if request.held_bytes:
            self._release(request)
        lane = TURN if self._turns or self._woken or self._closed_at is not None else self._place(request)
        if lane is None:
            return
        if len(self._held) >= self._config.max_held:
            request.refuse(self._full())
            return
        try:
            self.keep(request, request.buffered)
        except RefusalError as refusal:
            request.refuse(refusal)
            return
        self._held.add(request)
        self._enter(request, lane)

    def keep(self, request: Waiter, size: int) -> None:
        """Count bytes that are kept of a request; RefusalError: 503, too many are kept already."""
        if self.held_bytes + size > self._config.max_held_bytes:
            raise self._full()
        self.held_bytes += size
        request.held_bytes += size

    def discard(self, request: Waiter) -> None:
        """Forget a request that is over; harmless for one that does not wait."""
        self._release(request)
        if request in self._held:
            self._held.remove(request)
            self._leave(request)

    def _release(self, request: Waiter) -> None:
        self.held_bytes -= request.held_bytes
        request.held_bytes = 0

    def _full(self) -> RefusalError:
        what = f"{len(self._held)} requests wait, and {self.held_bytes} bytes are kept"
        return RefusalError(503, "queue_full", f"{what}; retry later, or raise max_held or max_held_bytes")

    # --- events ------------------------------------------------------------------------------------------------------

    def set(self, *, closed: bool) -> None:
        """Close or open it for all. In force at once."""
        if closed and self._closed_at is None:
            self._closed_at = time.monotonic()
        elif not closed:
            if self._closed_at is not None:
                self._closed_s += time.monotonic() - self._closed_at
                self._closed_at = None
            self.recheck()

    def recheck(self) -> None:
        """The engines have changed: one may serve now what none could before."""
        self.wake(NOWHERE)
        self.wake(ENGINE)
        self._pass()
        self.room()

    def wake(self, lane: Lane) -> None:
        """All in that lane are to be tried, in slices: none is looked at here."""
        queue = self._lanes.pop(lane, None)
        if queue:
            self._woken.append(queue)
            self._pass()

    def room(self) -> None:
        """Load has fallen: those that have waited for room longest are tried, soon, and once for many such events."""
        if self.crowded and not self._filling_soon:
            self._filling_soon = True
            asyncio.get_running_loop().call_soon(self._fill)

    def expire(self, now: float) -> None:
        """Refuse those for which no engine was up for too long; `now` is `time.monotonic()`."""
        if self._closed_at is not None:
            return
        longest_s = self._config.max_hold_s
        began = self._open_time(now) - longest_s
        late = [one for one in self._lanes.get(NOWHERE, ()) if one.open_since - one.patience_used <= began]
        for request in late:
            why = f"no engine{_needs(request.request)} could serve it for {longest_s:g} s; retry later or raise"
            self.discard(request)
            request.refuse(RefusalError(503, "held_too_long", f"{why} max_hold_s"))

    # --- lanes -------------------------------------------------------------------------------------------------------

    def _enter(self, request: Waiter, lane: Lane) -> None:
        request.lane = lane
        request.since = time.monotonic()
        request.open_since = self._open_time(request.since)
        request.queue = self._turns if lane is TURN else self._lanes_of(lane).setdefault(lane, OrderedDict())
        request.queue[request] = None

    def _leave(self, request: Waiter) -> None:
        """Take it out of its lane, and charge the time it spent there."""
        lane, queue = request.lane, request.queue
        if queue.pop(request, _ABSENT) is _ABSENT:
            return  # it is being tried, and was charged before that
        lanes = self._lanes_of(lane)
        if not queue and lanes.get(lane) is queue:
            del lanes[lane]
        now = time.monotonic()
        waited, opened = now - request.since, self._open_time(now) - request.open_since
        at_gates = waited if lane.kind in _GATES else waited - opened
        request.gate_seconds += at_gates
        request.hold_seconds += waited - at_gates
        if lane is NOWHERE:
            request.patience_used += opened

    def _lanes_of(self, lane: Lane) -> dict[Lane, Queue]:
        return self.crowded if lane.kind is Kind.ROOM else self._lanes

    def _try(self, request: Waiter) -> bool:
        """Whether it went; else it waits again."""
        self._leave(request)
        lane = self._place(request)
        if lane is not None and request in self._held:
            self._enter(request, lane)
            return False
        self.discard(request)
        return True

    def _pass(self) -> None:
        if not self._passing and (self._woken or self._turns):
            self._passing = True
            self._pass_slice()

    def _pass_slice(self) -> None:
        for _ in range(_SLICE):
            while self._woken and not self._woken[0]:
                self._woken.popleft()
            queue = self._woken[0] if self._woken else self._turns
            if not queue or self._closed_at is not None:
                self._passing = False
                return
            self._try(next(iter(queue)))
        asyncio.get_running_loop().call_soon(self._pass_slice)

    def _fill(self) -> None:
        """Try the first of each lane, and the next where it went; once for each time that load fell, and no more."""
        self._filling_soon = False
        if self._closed_at is not None:  # opening tries them
            return
        self._filling = True
        lanes = list(self.crowded)
        for lane in lanes:
            for _ in range(max(1, _SLICE // len(lanes))):
                queue = self.crowded.get(lane)
                if queue is None:
                    break
                request = next(iter(queue))
                if not self._try(request) and request.lane == lane:  # no room for it: nor for those behind it
                    request.queue.move_to_end(request, last=False)
                    break
            else:
                self.room()  # for the next of them, in the next turn of the event loop
        self._filling = False

    def _open_time(self, now: float) -> float:
        """`now` by a clock that stands still while the gate is closed for all."""
        return (now if self._closed_at is None else self._closed_at) - self._closed_s


def _needs(request: RequestHead) -> str:
    version, adapter = request.min_weight_version, request.adapter
    needs = ([f"weight version {version} or newer"] if version else []) + (
        [f"adapter {shown(adapter)}"] if adapter is not None else []
    )
    return f" with {' and '.join(needs)}" if needs else ""
