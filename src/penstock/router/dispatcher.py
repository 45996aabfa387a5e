"""Find an engine for each request: membership, placement, breakers and the gate together.

Whether an engine is well is for the owner of the fleet to decide (`fleet/supervise.py`), which takes it out of the set.
Here a request that finds an engine down leaves it out, until a probe finds it up.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Coroutine, Sequence
from typing import Any

from penstock.router import EngineEntry, Membership
from penstock.router.backend import Backend, read_kv_stats, wait_until_well
from penstock.router.gate import ENGINE, NOWHERE, Gate, Kind, Lane, Waiter
from penstock.router.http import RefusalError, RequestHead
from penstock.router.placement import Placement
from penstock.router.policies import Defer
from penstock.settings import RouterConfig, validate

_EXPIRE_S = 0.75
"""Between two looks for idle sessions: before the placement looks by itself, which cannot wake waiting requests."""
_MOST_LOST = 2
"""A request that so many engines broke on gets no other: it may be what ends them."""
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

    def observe(self, value: float) -> None:
        """Count one value: O(log buckets)."""
        self.counts[bisect_left(SECONDS, value)] += 1
        self.sum += value


class Metrics:
    """Plain counters, written by one event loop.

    Once nothing is in flight, `requests` is the sum of `answered`, `errors`, `cancelled` and `broken`.
    """

    requests = 0
    """Requests taken in: those with an acceptable head, for an engine."""
    answered = 0
    """Those that an engine answered in full, whatever the status."""
    cancelled = 0
    """Those whose client went away first."""
    broken = 0
    """Those whose answer ended before it was complete."""
    bytes_in = bytes_out = 0
    """Payload towards engines, and answers towards clients, framing of bodies included."""

    def __init__(self) -> None:
        self.errors: Counter[str] = Counter()
        """Those that the router answered itself, by code."""
        self.rejected: Counter[str] = Counter()
        """What never became a request, by code: a bad head, a wrong key, an admin call that failed."""
        self.retries: Counter[str] = Counter()
        """Second goes by reason. `refused`: the engine took no connection; `hung_up`: it closed the connection without
        an answer; `stale`: the same, on one that had been idle; `dead`: it answered that its core is dead."""
        self.first_byte, self.duration = Histogram(), Histogram()
        """The second: of requests that an engine answered in full."""
        self.hold, self.gate = Histogram(), Histogram()
        """Of requests that had to wait."""


class Dispatcher:
    """Finds an engine for each request, or the reason to wait.

    Args:
        config: limits, and the options of placement.
        process: which of `config.workers` processes this is; each knows its own sessions and load.
    """

    def __init__(self, config: RouterConfig, *, process: int = 0) -> None:
        self.metrics = Metrics()
        self.access_log = config.access_log
        self.membership = Membership()
        self.backends: dict[str, Backend] = {}
        self.placement = Placement(config, process)
        self.gate = Gate(config, self._place)
        self.closed_adapters: set[str] = set()
        """Adapters whose gate is closed."""
        # An engine is asked as often by several processes together as by one.
        self._interval_s = config.engine_metrics_interval_s * config.workers
        self._clock: asyncio.Task[None] | None = None
        self._asking: dict[Backend, asyncio.Task[None]] = {}
        """What is being asked of each engine besides requests: one thing at a time."""
        self._leaving: set[Backend] = set()
        self._expire_at = 0.0

    # --- control -----------------------------------------------------------------------------------------------------

    def set_engines(self, epoch: int, entries: Sequence[EngineEntry], cut: Container[str] = ()) -> None:
        """Take over a full set; it is in force when this returns.

        Args:
            epoch: greater than that of the set in force, or equal for the same set.
            entries: the engines.
            cut: names of engines that have left and are not to end what is in flight there.

        Raises:
            StateError: an epoch that is not newer, with other engines; nothing was changed.
            UserError: a negative epoch, or two engines of one name or URL; nothing was changed.
        """
        self.membership = self.membership.replaced_by(epoch, entries)
        self.placement.set_engines(self.membership.engines)
        before, self.backends = self.backends, {}
        for name, engine in self.placement.engines.items():
            known = before.get(name)
            if known is not None and known.engine is engine:
                self.backends[name] = before.pop(name)
                known.announced()
                if not engine.down:
                    self._stop_asking(known)
            else:
                self.backends[name] = Backend(engine)
        for backend in before.values():
            self._stop_asking(backend)
            backend.remove()
            self._leaving.add(backend)
        for backend in self._leaving:
            if backend.name in cut:
                backend.cut()
        self._leaving = {backend for backend in self._leaving if backend.open}
        self.gate.recheck()
        if self._interval_s and self._clock is None:
            self._clock = asyncio.get_running_loop().create_task(self._tick())

    def set_gate(self, *, closed: bool, adapter: str | None = None, engine: str | None = None) -> None:
        """Close or open a gate: of an adapter, of an engine of the set, or for all. In force when this returns."""
        if adapter is not None:
            (self.closed_adapters.add if closed else self.closed_adapters.discard)(adapter)
            if not closed:
                self.gate.wake(Lane(Kind.ADAPTER, adapter))
        elif engine is None:
            self.gate.set(closed=closed)
        elif engine in self.backends:
            self.placement.gate(engine, closed=closed)
            self.gate.recheck()

    def set_policy(self, changes: dict[str, Any]) -> None:
        """Place with these fields of `RouterConfig` changed from now on; ConfigError: one of them is wrong."""
        self.placement.set_policy(validate(RouterConfig, {**self.placement.config.model_dump(), **changes}))
        self.gate.room()

    def finish_session(self, session_id: str) -> bool:
        """The session has no further turn; False: it was not known."""
        known = self.placement.finish_session(session_id)
        self.gate.room()
        return known

    # --- requests ----------------------------------------------------------------------------------------------------

    def find(self, waiter: Waiter) -> Backend | Lane:
        """Return an engine, where the request counts from now on until it has `left`, or what it has to wait for.

        Raises:
            RefusalError: 502, only those that were tried could serve it.
        """
        request, tried = waiter.request, waiter.tried
        if self.closed_adapters and request.adapter in self.closed_adapters:
            return Lane(Kind.ADAPTER, request.adapter)
        placement = self.placement
        if self.gate.crowded and self._joins_queue(request):
            return Lane(Kind.ROOM, placement.needs(request))
        found = placement.place(request, time.monotonic(), [b.name for b in tried] if tried else ())
        if found is None and tried:
            # What has come back under the name of an engine that died has not broken anything.
            still = [backend.name for backend in tried if not backend.removed and backend is not waiter.spared]
            found = placement.place(request, time.monotonic(), still)
        if isinstance(found, str):
            backend = self.backends[found]
            backend.requests += 1
            return backend
        if found is Defer.WAIT:
            return Lane(Kind.ROOM, placement.needs(request))
        if found is Defer.GATED:
            return ENGINE
        if tried and placement.could_serve(request):
            raise _engines_failed(tried)
        return NOWHERE

    def left(self, request: RequestHead, backend: Backend, now: float, *, ok: bool) -> None:
        """The request is no longer with that engine: it was answered (`ok`), failed, or is taken back."""
        self.placement.done(request, backend.name, now, ok=ok)
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

    def _joins_queue(self, request: RequestHead) -> bool:
        """Whether it opens a session while others like it wait for room, and it is not its turn."""
        session_id = request.session_id
        if session_id is None or not self.gate.waits_for_room(self.placement.needs(request)):
            return False
        return self.placement.sessions.get(session_id) is None

    # --- breakers, and what is asked of engines ----------------------------------------------------------------------

    def backend_refused(self, backend: Backend, *, dead: bool = False) -> None:
        """It takes no requests, or is dead: it is left out until its breaker closes, see `Engine.down`."""
        if backend.removed or backend.engine.down:
            backend.engine.dead |= dead
            return
        backend.openings += 1
        self.placement.mark(backend.name, down=True, dead=dead)
        self._ask(backend, self._probe(backend))
        self.gate.recheck()

    def _ask(self, backend: Backend, work: Coroutine[Any, Any, None]) -> None:
        self._stop_asking(backend)
        task = self._asking[backend] = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda task: self._asking.get(backend) is task and self._asking.pop(backend))

    def _stop_asking(self, backend: Backend) -> None:
        task = self._asking.pop(backend, None)
        if task is not None:
            task.cancel()

    async def _probe(self, backend: Backend) -> None:
        await wait_until_well(backend)
        self.placement.mark(backend.name, down=False)
        self.gate.recheck()

    async def _tick(self) -> None:
        while True:
            for backend in self.backends.values():
                if backend not in self._asking:
                    self._ask(backend, self._read_kv(backend))
            await asyncio.sleep(self._interval_s)  # another process's state: there is no event to wait for

    async def _read_kv(self, backend: Backend) -> None:
        stats = await read_kv_stats(backend)
        if stats is not None:
            self.placement.report_kv(backend.name, kv_usage=stats.usage, kv_capacity=stats.capacity)
            self.gate.room()

    # --- time --------------------------------------------------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """Close idle connections, forget idle sessions, refuse what waited too long; `now` is `time.monotonic()`."""
        for backend in self.backends.values():
            backend.close_idle(now)
        if now >= self._expire_at:
            self._expire_at = now + _EXPIRE_S
            if self.placement.expire(now):
                self.gate.room()
        self.gate.expire(now)

    async def close(self) -> None:
        """Close every connection to an engine."""
        tasks = [*self._asking.values(), *([self._clock] if self._clock else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*[backend.close() for backend in (*self.backends.values(), *self._leaving)])


def _engines_failed(tried: Sequence[Backend]) -> RefusalError:
    names = ", ".join(dict.fromkeys(backend.name for backend in tried))
    return RefusalError(502, "engines_failed", f"every engine tried broke the request: {names}")
