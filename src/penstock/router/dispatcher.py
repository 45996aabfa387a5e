"""Finds an engine for each request or makes it wait at the gate: membership, placement, breakers and counts.

The owner of the fleet decides whether an engine is well (`fleet/supervise.py`) and takes a failed one out of the set.
Here, a request that finds an engine down opens its breaker for a moment. The next request after that tries it again.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from typing import cast

from penstock.rooms import plugged_in
from penstock.router.backend import IDLE_S, Backend
from penstock.router.gate import Gate, Wait, Waiter
from penstock.router.http import RefusalError
from penstock.router.membership import NO_MEMBERSHIP, Engine, Membership
from penstock.router.placement import Placement
from penstock.router.policies import Defer
from penstock.router_settings import RouterConfig

_SWEEP_S = 0.25
"""Seconds between two checks of all deadlines."""
_EXPIRE_S = 0.75
"""Seconds between two searches for idle and expired sessions."""
_BREAKER_S = {"refused": 0.5, "dead": 3.0}
"""Seconds without requests for an engine that refused a connection, or that reported a dead core: that one does not
serve again before the fleet, which probes it each second, has taken it out and restarted it."""
_MOST_LOST = 2
"""Engines that may fail under one request before the router gives it up. The request may be the cause."""


class Dispatcher:
    """Finds an engine for each request, or the reason to wait.

    `process` is the index of this process among `config.workers`; each knows its own sessions and load.
    """

    def __init__(self, config: RouterConfig, *, process: int = 0) -> None:
        self._config = config
        self.metrics = Metrics()
        self.access_log = config.access_log
        self.membership = NO_MEMBERSHIP
        self.placement = Placement(config, process, Backend)
        self.backends = cast("dict[str, Backend]", self.placement.engines)
        self.gate = Gate(config, self._place)
        # Several processes together ask an engine as often as one process would.
        self._interval_s = config.engine_metrics_interval_s * config.workers
        self._clock: asyncio.Task[None] | None = None
        self._leaving: set[Backend] = set()
        self._expire_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def set_membership(self, announced: Membership) -> None:
        """Put engines, gate and policy in force.

        Raises:
            StateError: as `Membership.replaced_by`. ConfigError: a wrong policy. Both leave everything unchanged.
        """
        announced = self.membership.replaced_by(announced)
        if announced.policy != self.membership.policy:
            changed = {**self._config.model_dump(), **announced.policy}
            self.placement.set_policy(plugged_in("options.validate")(RouterConfig, changed))
        before, self.membership = self.membership, announced
        if (announced.engines, announced.cut) != (before.engines, before.cut):
            self._set_engines(announced)
        if announced.closed or self.gate.busy:
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

    def submit(self, waiter: Waiter) -> None:
        """Place a request, or let it wait at the gate, which has no part in a request while nothing waits."""
        if self.gate.busy:
            self.gate.submit(waiter)
        elif (wait := self._place(waiter)) is not None:
            self.gate.hold(waiter, wait)

    def _place(self, waiter: Waiter) -> Wait | None:
        """Place the request on an engine, which counts it until `done`, refuse it, or return the event to await."""
        request, placement = waiter.request, self.placement
        if self.gate.busy and self.gate.crowded:
            session_id = request.session_id
            if session_id is not None and placement.memory.sessions.get(session_id) is None:
                return Wait.ROOM  # it opens a session, as the requests that wait for room do
        found = placement.place(request, waiter, time.monotonic(), waiter.excluded)
        if isinstance(found, Backend):
            found.requests += 1
            waiter.placed(found)
            return None
        if found is Defer.WAIT:
            return Wait.ROOM
        if waiter.excluded and placement.able(request, ()):  # only engines that failed under it could serve it
            waiter.refuse(_engines_failed(waiter.excluded))
            return None
        return Wait.NOWHERE

    def done(self, waiter: Waiter, backend: Backend, now: float) -> None:
        """Stop counting a request on its engine: it was answered, failed, or is retried."""
        self.placement.done(waiter.request, waiter, backend, now)
        if self.gate.busy:
            self.gate.room()

    def retry(self, waiter: Waiter, backend: Backend, reason: str, now: float) -> None:
        """Place a request again after an engine failed under it, see `Metrics.retries`; 502 after the second."""
        self.done(waiter, backend, now)
        if reason in _BREAKER_S and not (backend.left or backend.down):
            backend.breaker_openings += 1
            self.placement.mark(backend, down=True)
            asyncio.get_running_loop().call_later(_BREAKER_S[reason], self._close_breaker, backend)
        if reason != "refused":  # it was sent
            waiter.lost_on |= {backend}
            if reason != "stale":
                waiter.excluded += (backend,)
        if len(waiter.lost_on) >= _MOST_LOST:
            waiter.refuse(_engines_failed(waiter.lost_on))
            return
        self.metrics.retries[reason] += 1
        self.submit(waiter)

    def _close_breaker(self, backend: Backend) -> None:
        self.placement.mark(backend, down=False)
        self.gate.recheck()

    def sweep(self) -> None:
        """Close idle connections, expire sessions, refuse late requests; from then on periodically."""
        now = time.monotonic()
        for backend in self.backends.values():
            if backend.idle and backend.idle[0].idle_since <= now - IDLE_S:
                backend.close_idle(now)
        if now >= self._expire_at and self.placement.turns["opened"]:  # there was a session
            self._expire_at = now + _EXPIRE_S
            if self.placement.memory.sessions.expire(now, self._config.session_ttl_s):
                self.gate.room()
        if self.gate.busy:
            self.gate.expire(now)
        self._timer = asyncio.get_running_loop().call_later(_SWEEP_S, self.sweep)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._clock is not None:
            self._clock.cancel()
            await asyncio.gather(self._clock, return_exceptions=True)
        await asyncio.gather(*[backend.close() for backend in (*self.backends.values(), *self._leaving)])


def _engines_failed(failed: Iterable[Engine]) -> RefusalError:
    names = ", ".join(sorted({engine.name for engine in failed}))
    return RefusalError(502, "engines_failed", f"every engine tried broke the request: {names}")


# --- counts -----------------------------------------------------------------------------------------------------------

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0,
    1000.0, 2500.0,
)  # fmt: skip
"""Upper bounds of buckets: from a cached first token to an hour of waiting for a gate."""


class Histogram:
    """Counts of seconds by bucket, and their sum."""

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.sum += seconds


class Metrics:
    """Plain counters, written by one event loop.

    Once nothing is in flight, `requests` is the sum of `answered`, `errors`, `cancelled` and `broken`.
    """

    requests = 0
    """Requests taken in: those with an acceptable head, for an engine."""
    answered = 0
    """Requests that an engine answered in full, whatever the status."""
    cancelled = 0
    """Requests whose client went away first."""
    broken = 0
    """Requests whose answer ended before it was complete."""
    bytes_in = bytes_out = 0
    """Bytes of payload to engines, and of answers to clients with the framing of their bodies."""

    def __init__(self) -> None:
        self.since = time.time()
        self.errors: Counter[str] = Counter()
        """Requests that the router answered itself, by code."""
        self.rejected: Counter[str] = Counter()
        """Calls that never became a request, by code: a bad head, a wrong key, a failed admin call."""
        self.retries: Counter[str] = Counter()
        """Retries by reason. `refused`: the engine took no connection; `hung_up`: it closed the connection without an
        answer; `stale`: the same on a reused connection; `dead`: it reported a dead core."""
        self.first_byte, self.duration = Histogram(), Histogram()
        """Seconds to an answer's first byte, and seconds of requests that an engine answered in full."""
        self.hold, self.gate = Histogram(), Histogram()
        """Waiting seconds of requests that had to wait."""
