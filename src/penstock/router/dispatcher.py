"""Finds an engine for each request or makes it wait: membership, placement, breakers and the gate.

The owner of the fleet decides whether an engine is well (`fleet/supervise.py`) and takes a failed one out of the set.
Here, a request that finds an engine down opens its breaker for a moment. The next request after that tries it again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from enum import Enum
from typing import cast

from penstock.rooms import plugged_in
from penstock.router.backend import Backend
from penstock.router.http import RefusalError, RequestHead
from penstock.router.memory import Engine, Membership, Metrics
from penstock.router.placement import Placement
from penstock.router.policies import Defer
from penstock.router.state import EngineLoad, RouterState
from penstock.settings import RouterConfig, validate

_EXPIRE_S = 0.75
"""Seconds between two searches for idle and expired sessions."""
_DOWN_S, _DEAD_S = 0.5, 3.0
"""Seconds without requests for an engine that refused a connection, and for one that reported a dead core: that one
does not serve again before the fleet, which probes it each second, has taken it out and restarted it."""
_MOST_LOST = 2
"""Engines that may fail under one request before the router gives it up. The request may be the cause."""
_SLICE = 64
"""Most requests placed in one turn of the event loop, so that ten thousand of them do not delay new connections."""


_FIGURES = (
    "name", "weight_version", "down", "outstanding", "requests", "outstanding_tokens", "resident_tokens", "sessions",
    "kv_usage", "kv_capacity", "breaker_openings", "dead_answers", "failure",
)  # fmt: skip
"""Attributes of `Backend` that its state shows."""


class Wait(Enum):
    """The event that a request waits for."""

    TURN = "turn"
    """The gate is closed, or earlier requests are still being placed."""
    ROOM = "room"
    """The policy admits no new session until load falls."""
    NOWHERE = "nowhere"
    """No engine that may serve it is up."""


class Waiter:
    """A request that needs an engine and may wait at the gate."""

    buffered = 0
    """Upper bound of the bytes that are kept of it."""
    held_bytes = 0
    """Its share of `Gate.held_bytes`."""
    hold_seconds = 0.0
    """Seconds waited for an engine or for room so far."""
    gate_seconds = 0.0
    """Seconds waited for its turn at the gate so far."""
    lost_on: frozenset[Engine] = frozenset()
    """Engines that took it and then closed the connection without an answer, or were dead."""
    tried: tuple[Engine, ...] = ()
    """Engines of `lost_on` that do not get it again. The others may only have closed an idle connection."""
    wait: Wait | None = None
    since = 0.0
    """`time.monotonic()` at which this wait began."""
    nowhere_since = 0.0
    """`time.monotonic()` since which no engine has taken it; 0: it has not waited for one."""

    def __init__(self, request: RequestHead) -> None:
        self.request = request

    def placed(self, backend: Backend) -> None:
        """Take the chosen engine, where the request counts until `Dispatcher.left`."""
        raise NotImplementedError

    def refuse(self, refusal: RefusalError) -> None:
        """Refuse the request: it cannot wait, or not any longer."""
        raise NotImplementedError


class Gate:
    """Lets requests through in order of arrival, or holds them, without polling.

    No request fails because of a pause, however long: `max_hold_s` does not count it. A request does not fail either
    while the engines are full, since load will fall. `place` sends a request to an engine, or returns the event that it
    must wait for.
    """

    def __init__(self, config: RouterConfig, place: Callable[[Waiter], Wait | None]) -> None:
        self._config = config
        self._place = place
        self.closed = False
        self._closed_at = 0.0
        self.held_bytes = 0
        """Upper bound of the bytes kept of requests that had to wait or came in pieces, until their answers begin."""
        self._queues: dict[Wait, OrderedDict[Waiter, None]] = {wait: OrderedDict() for wait in Wait}
        self._turns = self._queues[Wait.TURN]
        self._room = self._queues[Wait.ROOM]
        """When load falls, only the first is tried; the next is tried once that one is placed."""
        self._passing = self._filling = self._filling_soon = False

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    def crowded(self) -> bool:
        """Whether a new session must queue behind requests that wait for room."""
        return bool(self._room) and not self._filling

    def held_by(self) -> dict[str, int]:
        """Count the waiting requests by the value of `Wait`."""
        return {wait.value: len(queue) for wait, queue in self._queues.items()}

    def submit(self, request: Waiter) -> None:
        wait = Wait.TURN if self._turns or self.closed else self._place(request)
        if wait is None:
            return
        try:
            if len(self) >= self._config.max_held:
                raise self._full()
            self.keep(request, request.buffered - request.held_bytes)
        except RefusalError as refusal:
            request.refuse(refusal)
        else:
            self._enter(request, wait)

    def keep(self, request: Waiter, size: int) -> None:
        """Count bytes that are kept of a request. RefusalError: 503, too many are kept."""
        if self.held_bytes + size > self._config.max_held_bytes:
            raise self._full()
        self.held_bytes += size
        request.held_bytes += size

    def release(self, request: Waiter) -> None:
        """Stop counting a request's bytes: its answer has begun, or it is over."""
        self.held_bytes -= request.held_bytes
        request.held_bytes = 0

    def _full(self) -> RefusalError:
        what = f"{len(self)} requests wait, and {self.held_bytes} bytes are kept"
        return RefusalError(503, "queue_full", f"{what}; retry later, or raise max_held or max_held_bytes")

    def set(self, *, closed: bool) -> None:
        now = time.monotonic()
        if closed and not self.closed:
            self._closed_at = now
        elif self.closed and not closed:
            for queue in self._queues.values():
                for request in queue:
                    if request.nowhere_since:
                        request.nowhere_since += now - max(self._closed_at, request.nowhere_since)
        self.closed = closed
        if not closed:
            self.recheck()

    def recheck(self) -> None:
        """Try waiting requests again after a change of engines, those without one first."""
        for request in reversed(list(self._queues[Wait.NOWHERE])):
            self.discard(request)
            self._enter(request, Wait.TURN)
            self._turns.move_to_end(request, last=False)
        if not self._passing and self._turns:
            self._passing = True
            self._pass()
        self.room()

    def room(self) -> None:
        """Soon try requests that wait for room, since load fell; calls share one try."""
        if self._room and not self._filling_soon:
            self._filling_soon = True
            asyncio.get_running_loop().call_soon(self._fill)

    def expire(self, now: float) -> None:
        """Refuse requests that had no engine for too long; `now` is `time.monotonic()`."""
        longest_s = self._config.max_hold_s
        if self.closed:
            return
        late = [one for one in self._queues[Wait.NOWHERE] if one.nowhere_since <= now - longest_s]
        for request in late:
            version = request.request.min_weight_version
            needs = f" with weight version {version} or newer" if version else ""
            why = f"no engine{needs} could serve it for {longest_s:g} s; retry later or raise max_hold_s"
            self.discard(request)
            request.refuse(RefusalError(503, "held_too_long", why))

    def discard(self, request: Waiter) -> None:
        """Take a request out of its queue and add up its waiting time, if it waits."""
        if request.wait is None:
            return
        del self._queues[request.wait][request]
        waited = time.monotonic() - request.since
        if request.wait is Wait.TURN:
            request.gate_seconds += waited
        else:
            request.hold_seconds += waited
        request.wait = None

    def _enter(self, request: Waiter, wait: Wait) -> None:
        request.wait, request.since = wait, time.monotonic()
        if wait is Wait.ROOM:
            request.nowhere_since = 0.0
        elif wait is Wait.NOWHERE:
            request.nowhere_since = request.nowhere_since or request.since
        self._queues[wait][request] = None

    def _try(self, request: Waiter) -> None:
        """Place the request, or queue it again."""
        self.discard(request)
        wait = self._place(request)
        if wait is not None:
            self._enter(request, wait)

    def _pass(self) -> None:
        for _ in range(_SLICE):
            if not self._turns or self.closed:
                self._passing = False
                return
            self._try(next(iter(self._turns)))
        asyncio.get_running_loop().call_soon(self._pass)

    def _fill(self) -> None:
        """Place requests that wait for room, in order, until one has to wait on."""
        self._filling_soon = False
        if self.closed:  # opening tries them
            return
        self._filling = True
        for _ in range(_SLICE):
            if not self._room:
                break
            request = next(iter(self._room))
            self._try(request)
            if request.wait is Wait.ROOM:  # no room for it, so none for those behind it
                self._room.move_to_end(request, last=False)
                break
        else:
            self.room()  # the rest of them follow in the next turn of the event loop
        self._filling = False


class Dispatcher:
    """Finds an engine for each request, or the reason to wait.

    `process` is the index of this process among `config.workers`; each knows its own sessions and load.
    """

    def __init__(self, config: RouterConfig, *, process: int = 0) -> None:
        self._config = config
        self.metrics = Metrics()
        self.access_log = config.access_log
        self.membership = Membership()
        self.placement = Placement(config, process, Backend)
        self.backends = cast("dict[str, Backend]", self.placement.engines)
        self.gate = Gate(config, self._place)
        # Several processes together ask an engine as often as one process would.
        self._interval_s = config.engine_metrics_interval_s * config.workers
        self._clock: asyncio.Task[None] | None = None
        self._leaving: set[Backend] = set()
        self._expire_at = 0.0

    def announce(self, announced: Membership) -> None:
        """Put engines, gate and policy in force.

        Raises:
            StateError: as `Membership.replaced_by`. ConfigError: a wrong policy. Both leave everything unchanged.
        """
        announced = self.membership.replaced_by(announced)
        if announced.policy != self.membership.policy:
            self.placement.set_policy(validate(RouterConfig, {**self._config.model_dump(), **announced.policy}))
        before, self.membership = self.membership, announced
        if (announced.engines, announced.cut) != (before.engines, before.cut):
            self._set_engines(announced)
        self.gate.set(closed=announced.closed)

    def _set_engines(self, announced: Membership) -> None:
        for backend in cast("list[Backend]", self.placement.set_engines(announced.engines)):
            backend.close_idle(float("inf"))
            backend.give_up_connecting(ConnectionAbortedError("the engine has left the fleet"))
            self._leaving.add(backend)
        for backend in self._leaving:
            if backend.name in announced.cut:
                backend.cut()
        self._leaving = {backend for backend in self._leaving if backend.open}
        if self._interval_s and self._clock is None:
            self._clock = asyncio.get_running_loop().create_task(plugged_in("router.kv_usage")(self, self._interval_s))

    def finish_session(self, session_id: str) -> bool:
        """Forget a session that has no further turn; return False if it was not known."""
        known = self.placement.finish_session(session_id)
        self.gate.room()
        return known

    def _place(self, waiter: Waiter) -> Wait | None:
        """Place the request on an engine, which counts it until `left`, or return the event to await.

        It is refused with 502 if only engines that already failed under it could serve it.
        """
        request, placement, session_id = waiter.request, self.placement, waiter.request.session_id
        if self.gate.crowded and session_id is not None and placement.sessions.get(session_id) is None:
            return Wait.ROOM  # it opens a session, as the requests that wait for room do
        found = placement.place(request, time.monotonic(), waiter.tried)
        if isinstance(found, Backend):
            found.requests += 1
            waiter.placed(found)
            return None
        if found is Defer.WAIT:
            return Wait.ROOM
        if waiter.tried and placement.could_serve(request):
            waiter.refuse(_engines_failed(waiter.tried))
            return None
        return Wait.NOWHERE

    def left(self, request: RequestHead, backend: Backend, now: float) -> None:
        """Stop counting a request on its engine: it was answered, failed, or is retried."""
        self.placement.done(request, backend, now)
        self.gate.room()

    def retry(self, waiter: Waiter, reason: str) -> None:
        """Place a request again after an engine failed under it; 502 after the second."""
        if len(waiter.lost_on) >= _MOST_LOST:
            waiter.refuse(_engines_failed(waiter.lost_on))
            return
        self.metrics.retries[reason] += 1
        self.gate.submit(waiter)

    def backend_refused(self, backend: Backend, *, dead: bool = False) -> None:
        """Open the breaker of an engine that refused a connection or is dead."""
        if backend.left or backend.down:
            return
        backend.breaker_openings += 1
        self.placement.mark(backend, down=True)
        self.gate.room()
        asyncio.get_running_loop().call_later(_DEAD_S if dead else _DOWN_S, self._close_breaker, backend)

    def _close_breaker(self, backend: Backend) -> None:
        self.placement.mark(backend, down=False)
        self.gate.recheck()

    def sweep(self, now: float) -> None:
        """Close idle connections, expire sessions, refuse late requests."""
        for backend in self.backends.values():
            backend.close_idle(now)
        if now >= self._expire_at:
            self._expire_at = now + _EXPIRE_S
            if self.placement.expire(now):
                self.gate.room()
        self.gate.expire(now)

    def state(self) -> RouterState:
        """Return the answer to `GET /router/engines`."""
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
        drained = backend.entry.draining and not backend.outstanding and not backend.sessions
        return EngineLoad(
            **{name: getattr(backend.entry, name) for name in ("url", "eligible", "draining", "dp_rank")},
            **{name: getattr(backend, name) for name in _FIGURES},
            drained=drained,
        )

    async def close(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            await asyncio.gather(self._clock, return_exceptions=True)
        await asyncio.gather(*[backend.close() for backend in (*self.backends.values(), *self._leaving)])


def _engines_failed(tried: Iterable[Engine]) -> RefusalError:
    names = ", ".join(sorted({engine.name for engine in tried}))
    return RefusalError(502, "engines_failed", f"every engine tried broke the request: {names}")
