"""Find an engine for each request, or have it wait: membership, placement, breakers and the gate together.

Each request waits in a lane, and each lane has the event that ends its wait; nothing is polled, and no event looks at
more requests than it may let go.

Whether an engine is well is for the owner of the fleet to decide (`fleet/supervise.py`), which takes it out of the set.
Here a request that finds an engine down leaves it out, until a probe finds it up.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

from penstock.rooms import plugged_in
from penstock.router.backend import Backend, wait_until_well
from penstock.router.http import RefusalError, RequestHead
from penstock.router.memory import Engine, Membership, Metrics
from penstock.router.placement import Placement
from penstock.router.policies import Defer
from penstock.router.state import EngineLoad, RouterState
from penstock.settings import RouterConfig, validate

_EXPIRE_S = 0.75
"""Between two looks for sessions that are idle or forgotten."""
_MOST_LOST = 2
"""A request that so many engines broke on gets no other: it may be what ends them."""


class Kind(Enum):
    """What a request waits for."""

    TURN = "turn"
    """The gate for all, and after it has opened those that came before."""
    ROOM = "room"
    """Load must fall: the policy admits no new session now."""
    NOWHERE = "nowhere"
    """No engine is up that may serve it."""


class Lane(NamedTuple):
    """Requests that the same event lets go, in order of arrival."""

    kind: Kind
    key: int = 0
    """Of ROOM, see `Placement.needs`."""


TURN, NOWHERE = Lane(Kind.TURN), Lane(Kind.NOWHERE)
_SLICE = 64
"""Requests let go in one turn of the event loop, so that ten thousand of them do not keep it from accepting."""
_ABSENT = object()


class Waiter:
    """A request that wants an engine, and may wait at the gate for it."""

    buffered = 0
    """Most bytes that are kept of it."""
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
    Nor is time in which the engines are full: they are at work, and load will fall. `place` sends a request on its way,
    or returns the lane where it has to wait.
    """

    def __init__(self, config: RouterConfig, place: Callable[[Waiter], Lane | None]) -> None:
        self._config = config
        self._place = place
        self._closed_at: float | None = None
        self._closed_s = 0.0
        """How long the gate was closed for all before, all times together."""
        self.held_bytes = 0
        """Most bytes that are kept of requests that had to wait or came in pieces, until their answers begin."""
        self._held: set[Waiter] = set()
        self._turns: Queue = OrderedDict()
        self.crowded: dict[Lane, Queue] = {}
        """Lanes of the kind ROOM: only their first is tried, and the next when that one went."""
        self._nowhere: Queue = OrderedDict()
        self._woken: deque[Queue] = deque()
        """Those for which an engine may be up now, to be tried before those that came after."""
        self._passing = self._filling = self._filling_soon = False

    @property
    def closed(self) -> bool:
        return self._closed_at is not None

    def __len__(self) -> int:
        return len(self._held)

    def waits_for_room(self, lane: Lane) -> bool:
        """Whether requests wait in that lane, and it is not their turn: a newcomer joins them."""
        return not self._filling and lane in self.crowded

    def held_by(self) -> dict[str, int]:
        """How many wait for what, by the value of `Kind`."""
        waiting = Counter(request.lane.kind for request in self._held)
        return {kind.value: waiting[kind] for kind in Kind}

    def submit(self, request: Waiter) -> None:
        lane = TURN if self._turns or self._woken or self._closed_at is not None else self._place(request)
        if lane is None:
            return
        if len(self._held) >= self._config.max_held:
            request.refuse(self._full())
            return
        try:
            self.keep(request, request.buffered - request.held_bytes)
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
        """Let a request wait no longer; harmless for one that does not."""
        if request in self._held:
            self._held.remove(request)
            self._leave(request)

    def release(self, request: Waiter) -> None:
        """Count no more what was kept of a request: its answer has begun, or it is over."""
        self.held_bytes -= request.held_bytes
        request.held_bytes = 0

    def _full(self) -> RefusalError:
        what = f"{len(self._held)} requests wait, and {self.held_bytes} bytes are kept"
        return RefusalError(503, "queue_full", f"{what}; retry later, or raise max_held or max_held_bytes")

    def set(self, *, closed: bool) -> None:
        if closed and self._closed_at is None:
            self._closed_at = time.monotonic()
        elif not closed:
            if self._closed_at is not None:
                self._closed_s += time.monotonic() - self._closed_at
                self._closed_at = None
            self.recheck()

    def recheck(self) -> None:
        """The engines have changed: one may serve now what none could before."""
        if self._nowhere:
            self._woken.append(self._nowhere)
            self._nowhere = OrderedDict()
        self._pass()
        self.room()

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
        late = [one for one in self._nowhere if one.open_since - one.patience_used <= began]
        for request in late:
            why = f"no engine{_needs(request.request)} could serve it for {longest_s:g} s; retry later or raise"
            self.discard(request)
            request.refuse(RefusalError(503, "held_too_long", f"{why} max_hold_s"))

    def _enter(self, request: Waiter, lane: Lane) -> None:
        request.lane = lane
        request.since = time.monotonic()
        request.open_since = self._open_time(request.since)
        if lane.kind is Kind.ROOM:
            request.queue = self.crowded.setdefault(lane, OrderedDict())
        else:
            request.queue = self._turns if lane is TURN else self._nowhere
        request.queue[request] = None

    def _leave(self, request: Waiter) -> None:
        """Take it out of its lane, and charge the time it spent there."""
        lane, queue = request.lane, request.queue
        if queue.pop(request, _ABSENT) is _ABSENT:
            return  # it is being tried, and was charged before that
        if not queue and self.crowded.get(lane) is queue:
            del self.crowded[lane]
        now = time.monotonic()
        waited, opened = now - request.since, self._open_time(now) - request.open_since
        at_gates = waited if lane is TURN else waited - opened
        request.gate_seconds += at_gates
        request.hold_seconds += waited - at_gates
        if lane is NOWHERE:
            request.patience_used += opened

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


class Dispatcher:
    """Finds an engine for each request, or the reason to wait.

    `process` is which of `config.workers` processes this is; each knows its own sessions and load.
    """

    def __init__(self, config: RouterConfig, *, process: int = 0) -> None:
        self._config = config
        self.metrics = Metrics()
        self.access_log = config.access_log
        self.membership = Membership()
        self.backends: dict[str, Backend] = {}
        self.placement = Placement(config, process)
        self.gate = Gate(config, self._place)
        # An engine is asked as often by several processes together as by one.
        self._interval_s = config.engine_metrics_interval_s * config.workers
        self._clock: asyncio.Task[None] | None = None
        self._leaving: set[Backend] = set()
        self._expire_at = 0.0

    def announce(self, announced: Membership) -> None:
        """Put engines, gate and policy in force.

        Raises:
            StateError: as `Membership.replaced_by`. ConfigError: a wrong policy. Nothing was changed.
        """
        announced = self.membership.replaced_by(announced)
        if announced.policy != self.membership.policy:
            self.placement.set_policy(validate(RouterConfig, {**self._config.model_dump(), **announced.policy}))
        before, self.membership = self.membership, announced
        if (announced.engines, announced.cut) != (before.engines, before.cut):
            self._set_engines(announced)
        self.gate.set(closed=announced.closed)

    def _set_engines(self, announced: Membership) -> None:
        self.placement.set_engines(announced.engines)
        before, self.backends = self.backends, {}
        for name, engine in self.placement.engines.items():
            known = before.get(name)
            if known is not None and known.engine is engine:
                self.backends[name] = before.pop(name)
                known.announced()
                if not engine.down:
                    known.stop_asking()
            else:
                self.backends[name] = Backend(engine)
        for backend in before.values():
            backend.remove()
            self._leaving.add(backend)
        for backend in self._leaving:
            if backend.name in announced.cut:
                backend.cut()
        self._leaving = {backend for backend in self._leaving if backend.open}
        if self._interval_s and self._clock is None:
            self._clock = asyncio.get_running_loop().create_task(plugged_in("router.kv_usage")(self, self._interval_s))

    def finish_session(self, session_id: str) -> bool:
        """The session has no further turn; False: it was not known."""
        known = self.placement.finish_session(session_id)
        self.gate.room()
        return known

    def find(self, waiter: Waiter) -> Backend | Lane:
        """Return an engine, where the request counts from now on until it has `left`, or what it has to wait for.

        Raises:
            RefusalError: 502, only those that were tried could serve it.
        """
        request, tried = waiter.request, waiter.tried
        placement, session_id = self.placement, request.session_id
        if self.gate.crowded and session_id is not None and placement.sessions.get(session_id) is None:
            lane = Lane(Kind.ROOM, placement.needs(request))  # it opens a session, as others do that wait for room
            if self.gate.waits_for_room(lane):
                return lane
        found = placement.place(request, time.monotonic(), [backend.engine for backend in tried])
        if found is None and waiter.spared is not None:
            still = [backend.engine for backend in tried if backend is not waiter.spared]
            found = placement.place(request, time.monotonic(), still)
        if isinstance(found, Engine):
            backend = self.backends[found.name]
            backend.requests += 1
            return backend
        if found is Defer.WAIT:
            return Lane(Kind.ROOM, placement.needs(request))
        if tried and placement.could_serve(request):
            raise _engines_failed(tried)
        return NOWHERE

    def left(self, request: RequestHead, backend: Backend, now: float) -> None:
        """The request is no longer with that engine: it was answered, failed, or is taken back."""
        self.placement.done(request, backend.engine, now)
        if self.gate.crowded:
            self.gate.room()

    def retry(self, waiter: Waiter, reason: str) -> None:
        """Place again a request that an engine did not take, or broke on; 502 for one that two engines broke on."""
        if len(waiter.tried) >= _MOST_LOST:
            waiter.refuse(_engines_failed(waiter.tried))
            return
        self.metrics.retries[reason] += 1
        self.gate.submit(waiter)

    def _place(self, waiter: Waiter) -> Lane | None:
        try:
            found = self.find(waiter)
        except RefusalError as refusal:
            waiter.refuse(refusal)
            return None
        if isinstance(found, Lane):
            return found
        waiter.placed(found)
        return None

    def backend_refused(self, backend: Backend, *, dead: bool = False) -> None:
        """It takes no requests, or is dead: it is left out until its breaker closes, see `Engine.down`."""
        if backend.removed or backend.engine.down:
            backend.engine.dead |= dead
            return
        backend.openings += 1
        self.placement.mark(backend.engine, down=True, dead=dead)
        backend.ask(self._probe(backend))
        self.gate.recheck()

    async def _probe(self, backend: Backend) -> None:
        await wait_until_well(backend)
        self.placement.mark(backend.engine, down=False)
        self.gate.recheck()

    def sweep(self, now: float) -> None:
        """Close idle connections, forget idle sessions, refuse what waited too long; `now` is `time.monotonic()`."""
        for backend in self.backends.values():
            backend.close_idle(now)
        if now >= self._expire_at:
            self._expire_at = now + _EXPIRE_S
            if self.placement.expire(now):
                self.gate.room()
        self.gate.expire(now)

    def state(self) -> RouterState:
        """Return what `GET /router/engines` answers."""
        gate, placement = self.gate, self.placement
        return RouterState(
            epoch=self.membership.epoch,
            gate_closed=gate.closed,
            held=len(gate),
            held_bytes=gate.held_bytes,
            held_by=gate.held_by(),
            requests=self.metrics.requests,
            sessions=len(placement.sessions),
            moved_sessions=placement.turns["moved"],
            placements=dict(placement.rules),
            policy=placement.config.model_dump(include={"policy", "prefix_length", "overload_threshold"}),
            workers=(os.getpid(),),
            counted_since=self.metrics.since,
            engines=tuple(self._load_of(backend) for backend in self.backends.values()),
        )

    def _load_of(self, backend: Backend) -> EngineLoad:
        entry, view = backend.engine.entry, backend.engine.view
        sessions = backend.engine.sessions
        return EngineLoad(
            **view._asdict(),
            url=entry.url,
            eligible=entry.eligible,
            draining=entry.draining,
            dp_rank=entry.dp_rank,
            drained=entry.draining and not view.outstanding and not sessions,
            down=backend.engine.down,
            breaker_openings=backend.openings,
            dead_answers=backend.dead_answers,
            failure=backend.failure,
            sessions=sessions,
            requests=backend.requests,
        )

    async def close(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            await asyncio.gather(self._clock, return_exceptions=True)
        await asyncio.gather(*[backend.close() for backend in (*self.backends.values(), *self._leaving)])


def _engines_failed(tried: Sequence[Backend]) -> RefusalError:
    names = ", ".join(dict.fromkeys(backend.name for backend in tried))
    return RefusalError(502, "engines_failed", f"every engine tried broke the request: {names}")


def _needs(request: RequestHead) -> str:
    version = request.min_weight_version
    return f" with weight version {version} or newer" if version else ""
