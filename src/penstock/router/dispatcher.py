"""Find an engine for each request, or have it wait: membership, placement, breakers and the gate together.

The owner of the fleet decides whether an engine is well (`fleet/supervise.py`), and takes it out of the set. Here a
request that finds an engine down leaves it out for a moment; the next request after that tries it again.
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
"""Between two looks for sessions that are idle or forgotten."""
_DOWN_S = 0.5
"""How long an engine gets no request after it refused one, or said that its core is dead."""
_MOST_LOST = 2
"""A request that so many engines broke on gets no other: it may be what ends them."""
_SLICE = 64
"""Requests let go in one turn of the event loop, so that ten thousand of them do not keep it from accepting."""


class Wait(Enum):
    """The event that a request waits for."""

    TURN = "turn"
    """The gate, and after it has opened those that came before."""
    ROOM = "room"
    """Load must fall: the policy admits no new session now."""
    NOWHERE = "nowhere"
    """No engine is up that may serve it."""


class Waiter:
    """A request that wants an engine, and may wait at the gate for it."""

    buffered = 0
    """Most bytes that are kept of it."""
    held_bytes = 0
    """Its own part of `Gate.held_bytes`."""
    hold_seconds = 0.0
    """Waited for an engine or for room so far."""
    gate_seconds = 0.0
    """Waited for its turn at the gate so far."""
    lost_on: frozenset[Engine] = frozenset()
    """Engines that took it, and then closed the connection without an answer or were dead."""
    tried: tuple[Engine, ...] = ()
    """The part of them that gets it no more; the others may only have closed an idle connection."""
    wait: Wait | None = None
    since = 0.0
    """When it began to wait for that."""
    nowhere_since = 0.0
    """Since when no engine has taken it; 0: not yet."""

    def __init__(self, request: RequestHead) -> None:
        self.request = request

    def placed(self, backend: Backend) -> None:
        """It has an engine, where it counts until `Dispatcher.left`."""
        raise NotImplementedError

    def refuse(self, refusal: RefusalError) -> None:
        """It cannot wait, or not any longer."""
        raise NotImplementedError


class Gate:
    """Lets requests through in order of arrival, or holds them; nothing is polled.

    No request fails because of a pause, however long: `max_hold_s` starts again when the gate opens. Nor does a request
    fail while the engines are full: they are at work, and load will fall. `place` sends a request on its way, or
    returns what it has to wait for.
    """

    def __init__(self, config: RouterConfig, place: Callable[[Waiter], Wait | None]) -> None:
        self._config = config
        self._place = place
        self.closed = False
        self._opened_at = 0.0
        self.held_bytes = 0
        """Most bytes that are kept of requests that had to wait or came in pieces, until their answers begin."""
        self._queues: dict[Wait, OrderedDict[Waiter, None]] = {wait: OrderedDict() for wait in Wait}
        self._turns = self._queues[Wait.TURN]
        self._room = self._queues[Wait.ROOM]
        """Only the first is tried when load falls, and the next when that one went."""
        self._passing = self._filling = self._filling_soon = False

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    def crowded(self) -> bool:
        """Whether requests wait for room, and it is not their turn: a new session joins them."""
        return bool(self._room) and not self._filling

    def held_by(self) -> dict[str, int]:
        """How many wait for what, by the value of `Wait`."""
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
        """Count bytes that are kept of a request; RefusalError: 503, too many are kept already."""
        if self.held_bytes + size > self._config.max_held_bytes:
            raise self._full()
        self.held_bytes += size
        request.held_bytes += size

    def release(self, request: Waiter) -> None:
        """Count no more what was kept of a request: its answer has begun, or it is over."""
        self.held_bytes -= request.held_bytes
        request.held_bytes = 0

    def _full(self) -> RefusalError:
        what = f"{len(self)} requests wait, and {self.held_bytes} bytes are kept"
        return RefusalError(503, "queue_full", f"{what}; retry later, or raise max_held or max_held_bytes")

    def set(self, *, closed: bool) -> None:
        if self.closed and not closed:
            self._opened_at = time.monotonic()
        self.closed = closed
        if not closed:
            self.recheck()

    def recheck(self) -> None:
        """The engines have changed: those that none could serve are tried again, before those that came after."""
        for request in reversed(list(self._queues[Wait.NOWHERE])):
            self.discard(request)
            self._enter(request, Wait.TURN)
            self._turns.move_to_end(request, last=False)
        if not self._passing and self._turns:
            self._passing = True
            self._pass()
        self.room()

    def room(self) -> None:
        """Load has fallen: those that have waited for room longest are tried, soon, and once for many such events."""
        if self._room and not self._filling_soon:
            self._filling_soon = True
            asyncio.get_running_loop().call_soon(self._fill)

    def expire(self, now: float) -> None:
        """Refuse those for which no engine was up for too long; `now` is `time.monotonic()`."""
        longest_s = self._config.max_hold_s
        if self.closed or now - self._opened_at < longest_s:
            return
        late = [one for one in self._queues[Wait.NOWHERE] if one.nowhere_since <= now - longest_s]
        for request in late:
            version = request.request.min_weight_version
            needs = f" with weight version {version} or newer" if version else ""
            why = f"no engine{needs} could serve it for {longest_s:g} s; retry later or raise max_hold_s"
            self.discard(request)
            request.refuse(RefusalError(503, "held_too_long", why))

    def discard(self, request: Waiter) -> None:
        """Let a request wait no longer, and charge the time; harmless for one that does not wait."""
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
        """Place the request, or have it wait again."""
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
        """Try the first that waits for room, and the next where it went."""
        self._filling_soon = False
        if self.closed:  # opening tries them
            return
        self._filling = True
        for _ in range(_SLICE):
            if not self._room:
                break
            request = next(iter(self._room))
            self._try(request)
            if request.wait is Wait.ROOM:  # no room for it: nor for those behind it
                self._room.move_to_end(request, last=False)
                break
        else:
            self.room()  # for the next of them, in the next turn of the event loop
        self._filling = False


class Dispatcher:
    """Finds an engine for each request, or the reason to wait.

    `process` is which of `config.workers` processes this is; each knows its own sessions and load.
    """

    def __init__(self, config: RouterConfig, *, process: int = 0) -> None:
        self._config = config
        self.metrics = Metrics()
        self.access_log = config.access_log
        self.membership = Membership()
        self.placement = Placement(config, process, Backend)
        self.backends = cast("dict[str, Backend]", self.placement.engines)
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
        for backend in cast("list[Backend]", self.placement.set_engines(announced.engines)):
            backend.close_idle(float("inf"))
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

    def find(self, waiter: Waiter) -> Backend | Wait:
        """Return an engine, where the request counts from now on until it has `left`, or what it has to wait for.

        Raises:
            RefusalError: 502, only those that were tried could serve it.
        """
        request, placement, session_id = waiter.request, self.placement, waiter.request.session_id
        if self.gate.crowded and session_id is not None and placement.sessions.get(session_id) is None:
            return Wait.ROOM  # it opens a session, as others do that wait for room
        found = placement.place(request, time.monotonic(), waiter.tried)
        if isinstance(found, Backend):
            found.sent += 1
            return found
        if found is Defer.WAIT:
            return Wait.ROOM
        if waiter.tried and placement.could_serve(request):
            raise _engines_failed(waiter.tried)
        return Wait.NOWHERE

    def left(self, request: RequestHead, backend: Backend, now: float) -> None:
        """The request is no longer with that engine: it was answered, failed, or is taken back."""
        self.placement.done(request, backend, now)
        self.gate.room()

    def retry(self, waiter: Waiter, reason: str) -> None:
        """Place again a request that an engine did not take, or broke on; 502 for one that two engines broke on."""
        if len(waiter.lost_on) >= _MOST_LOST:
            waiter.refuse(_engines_failed(waiter.lost_on))
            return
        self.metrics.retries[reason] += 1
        self.gate.submit(waiter)

    def _place(self, waiter: Waiter) -> Wait | None:
        try:
            found = self.find(waiter)
        except RefusalError as refusal:
            waiter.refuse(refusal)
            return None
        if isinstance(found, Wait):
            return found
        waiter.placed(found)
        return None

    def backend_refused(self, backend: Backend) -> None:
        """It takes no requests, or is dead: it is left out for a moment."""
        if backend.left or backend.down:
            return
        backend.openings += 1
        self.placement.mark(backend, down=True)
        self.gate.room()
        asyncio.get_running_loop().call_later(_DOWN_S, self._close_breaker, backend)

    def _close_breaker(self, backend: Backend) -> None:
        self.placement.mark(backend, down=False)
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
        entry, view = backend.entry, backend.view
        return EngineLoad(
            **view._asdict(),
            url=entry.url,
            eligible=entry.eligible,
            draining=entry.draining,
            dp_rank=entry.dp_rank,
            drained=entry.draining and not view.outstanding and not backend.sessions,
            down=backend.down,
            breaker_openings=backend.openings,
            dead_answers=backend.dead_answers,
            failure=backend.failure,
            sessions=backend.sessions,
            requests=backend.sent,
        )

    async def close(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            await asyncio.gather(self._clock, return_exceptions=True)
        await asyncio.gather(*[backend.close() for backend in (*self.backends.values(), *self._leaving)])


def _engines_failed(tried: Iterable[Engine]) -> RefusalError:
    names = ", ".join(sorted({engine.name for engine in tried}))
    return RefusalError(502, "engines_failed", f"every engine tried broke the request: {names}")
