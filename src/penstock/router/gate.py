"""What a request may wait for.

Each waits in a lane, and each lane has the event that ends its wait; nothing is polled, and no event looks at more
requests than it may let go.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Collection
from enum import Enum
from typing import NamedTuple

from penstock.router.http import RefusalError


class Kind(Enum):
    """What a request waits for."""

    TURN = "turn"
    """The gate for all, and after it has opened those that came before."""
    ADAPTER = "adapter"
    """The gate of its adapter."""
    ENGINE = "engine"
    """The gate of the engine where its session lives; with an empty key, of every engine that could serve it."""
    ROOM = "room"
    """Load must fall: the policy admits no new session now."""
    NOWHERE = "nowhere"
    """No engine is up that may serve it."""


class Lane(NamedTuple):
    """Requests that the same event lets go, in order of arrival."""

    kind: Kind
    key: str | tuple[int, str | None] = ""
    """Name of the adapter or engine; for ROOM see `Candidates.needs`."""


TURN = Lane(Kind.TURN)
NOWHERE = Lane(Kind.NOWHERE)
ANY_ENGINE = Lane(Kind.ENGINE)
"""Every engine that could serve the request has its gate closed."""
GATES = frozenset({Kind.TURN, Kind.ADAPTER, Kind.ENGINE})
"""Kinds of which no request gives up: a gate may stay closed as long as it likes."""


_SLICE = 64
"""Requests let go in one turn of the event loop, so that ten thousand of them do not keep it from accepting."""
_NEVER = float("inf")
_ABSENT = object()


class Waiter:
    """A request that may wait at the gate, which keeps all that stands here."""

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

    def try_place(self) -> Lane | None:
        """Send it on its way, or return the lane where it has to wait."""
        raise NotImplementedError

    def kept_bytes(self) -> int:
        """Most bytes that are kept of it while it waits."""
        raise NotImplementedError

    def needs(self) -> str:
        """What it asks of an engine, to be read behind "no engine"; empty where any will do."""
        raise NotImplementedError

    def refuse(self, refusal: RefusalError) -> None:
        """It cannot wait, or not any longer."""
        raise NotImplementedError


Queue = OrderedDict[Waiter, None]


class Gate:
    """Lets requests through in order of arrival, or holds them.

    Args:
        max_held: most requests that may wait; one beyond is refused with 503.
        max_held_bytes: most bytes that may be kept of all that wait or are still coming in; likewise.
        max_hold_s: seconds for which a request waits while no engine is up that may serve it; then 503. Time at a
            closed gate does not count: a pause may be as long as it likes, and no request fails of it. Nor does time in
            which the engines are full: they are at work, and load will fall.
    """

    def __init__(self, *, max_held: int, max_held_bytes: int, max_hold_s: float) -> None:
        self._max_held = max_held
        self._max_held_bytes = max_held_bytes
        self._max_hold_s = max_hold_s
        self._closed_at: float | None = None
        self._closed_s = 0.0
        """How long the gate was closed for all before, all times together."""
        self.adapters: set[str] = set()
        """Adapters whose gate is closed."""
        self.engines: set[str] = set()
        """Engines whose gate is closed."""
        self.held_bytes = 0
        """Most bytes that are kept of the requests that wait, and those kept of requests that are still coming in."""
        self._filling = False
        """Requests that have waited for room are tried just now."""
        self._held: set[Waiter] = set()
        self._turns: Queue = OrderedDict()
        self.crowded: dict[Lane, Queue] = {}
        """Lanes of the kind ROOM: only their first is tried, and the next when that one went."""
        self._lanes: dict[Lane, Queue] = {}
        """All other lanes but TURN: the whole of one is woken."""
        self._woken: deque[Queue] = deque()
        """Lanes whose event has come, to be tried before those that came after."""
        self._passing = False
        self._round: deque[Lane] = deque()
        """Lanes that the present round over `crowded` has still to try."""
        self._round_due = False
        """Load has fallen since that round began."""
        self._filling_soon = False
        self._first_late = _NEVER
        """No request in NOWHERE is late before this time, by the clock that stands still."""

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
        if self._turns or self._woken or self._closed_at is not None:
            lane = TURN
        else:
            lane = request.try_place()
            if lane is None:
                return
        size = request.kept_bytes()
        if len(self._held) >= self._max_held or self.held_bytes + size > self._max_held_bytes:
            request.refuse(self._full())
            return
        self._held.add(request)
        request.held_bytes = size
        self.held_bytes += size
        self._enter(request, lane)

    def keep(self, size: int) -> None:
        """Count bytes of a request that is still coming in; RefusalError: 503, too many are kept already."""
        if self.held_bytes + size > self._max_held_bytes:
            raise self._full()
        self.held_bytes += size

    def release(self, size: int) -> None:
        """Bytes that `keep` counted are gone, or part of a request that is complete."""
        self.held_bytes -= size

    def discard(self, request: Waiter) -> None:
        """Forget a request whose client has gone, or that is refused; harmless for one that does not wait."""
        if request in self._held:
            self._held.remove(request)
            self.held_bytes -= request.held_bytes
            self._leave(request)

    def _full(self) -> RefusalError:
        what = f"{len(self._held)} requests wait, and {self.held_bytes} bytes are kept"
        return RefusalError(503, "queue_full", f"{what}; retry later, or raise max_held or max_held_bytes")

    # --- events ------------------------------------------------------------------------------------------------------

    def set(self, *, closed: bool, adapter: str | None = None, engine: str | None = None) -> None:
        """Close or open the gate of an adapter, of an engine, or (neither is named) for all. In force at once."""
        for name, names, kind in ((adapter, self.adapters, Kind.ADAPTER), (engine, self.engines, Kind.ENGINE)):
            if name is not None:
                (names.add if closed else names.discard)(name)
                if not closed:
                    self.wake(Lane(kind, name))
        if adapter is not None or engine is not None:
            if not closed:
                self.recheck()
        elif closed and self._closed_at is None:
            self._closed_at = time.monotonic()
        elif not closed:
            if self._closed_at is not None:
                self._closed_s += time.monotonic() - self._closed_at
                self._closed_at = None
            self.recheck()

    def keep_engines(self, names: Collection[str]) -> None:
        """The set of engines is another: gates of those that have left are gone with them."""
        for gone in self.engines.difference(names):
            self.set(closed=False, engine=gone)

    def recheck(self) -> None:
        """The engines have changed: one may serve now what none could before."""
        self.wake(NOWHERE)
        self.wake(ANY_ENGINE)
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
        if self.crowded:
            self._round_due = True
            if not self._filling_soon:
                self._filling_soon = True
                asyncio.get_running_loop().call_soon(self._fill)

    def expire(self, now: float) -> None:
        """Refuse those for which no engine was up for too long; `now` is `time.monotonic()`."""
        now = self._open_time(now)
        if self._closed_at is not None or now < self._first_late:
            return
        deadlines = {request: self._deadline(request) for request in self._lanes.get(NOWHERE, ())}
        self._first_late = min((deadline for deadline in deadlines.values() if deadline > now), default=_NEVER)
        for request, deadline in deadlines.items():
            if deadline <= now:
                needs, hold = request.needs(), f"{self._max_hold_s:g} s"
                why = f"no engine{needs} could serve it for {hold}; retry later or raise max_hold_s"
                self.discard(request)
                request.refuse(RefusalError(503, "held_too_long", why))

    # --- lanes -------------------------------------------------------------------------------------------------------

    def _enter(self, request: Waiter, lane: Lane) -> None:
        request.lane = lane
        request.since = time.monotonic()
        request.open_since = self._open_time(request.since)
        if lane is TURN:
            request.queue = self._turns
        else:
            request.queue = self._lanes_of(lane).setdefault(lane, OrderedDict())
        request.queue[request] = None
        if lane is NOWHERE:
            self._first_late = min(self._first_late, self._deadline(request))

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
        at_gates = waited if lane.kind in GATES else waited - opened
        request.gate_seconds += at_gates
        request.hold_seconds += waited - at_gates
        if lane is NOWHERE:
            request.patience_used += opened

    def _lanes_of(self, lane: Lane) -> dict[Lane, Queue]:
        return self.crowded if lane.kind is Kind.ROOM else self._lanes

    def _try(self, request: Waiter) -> None:
        self._leave(request)
        lane = request.try_place()
        if lane is None:
            self.discard(request)
        elif request in self._held:
            self._enter(request, lane)

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
        if self._closed_at is not None:  # opening begins a round
            self._round.clear()
            return
        if not self._round:
            self._round_due = False
            self._round.extend(self.crowded)
        self._filling = True
        for _ in range(_SLICE):
            while self._round and self._round[0] not in self.crowded:
                self._round.popleft()
            if not self._round:
                break
            lane = self._round[0]
            request = next(iter(self.crowded[lane]))
            self._try(request)
            if request in self._held and request.lane == lane:  # no room for it: nor for those behind it
                request.queue.move_to_end(request, last=False)
                self._round.popleft()
        self._filling = False
        if self._round or self._round_due:
            self._filling_soon = True
            asyncio.get_running_loop().call_soon(self._fill)

    # --- clocks ------------------------------------------------------------------------------------------------------

    def _open_time(self, now: float) -> float:
        """`now` by a clock that stands still while the gate is closed for all."""
        return (now if self._closed_at is None else self._closed_at) - self._closed_s

    def _deadline(self, request: Waiter) -> float:
        return request.open_since + self._max_hold_s - request.patience_used
