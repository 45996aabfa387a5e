"""Find an engine for each request: membership, placement, breakers and the gate together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.router.backend import Backend, BackendWatch, KVStats
from penstock.router.gate import ANY_ENGINE, NOWHERE, Gate, Kind, Lane, Waiter
from penstock.router.head import RequestHead
from penstock.router.http import RefusalError
from penstock.router.membership import EngineEntry, Membership
from penstock.router.metrics import Metrics
from penstock.router.placement import Placement, PlacementOptions
from penstock.router.policies import Defer
from penstock.settings import RouterConfig

_EXPIRE_S = 0.75
"""Between two looks for idle sessions: before the placement looks by itself, which cannot wake waiting requests."""
_MOST_LOST = 2
"""A request that so many engines broke on gets no other: it may be what ends them."""


class Dispatcher:
    """Finds an engine for each request, or the reason to wait.

    Args:
        config: limits, and the options of placement.
        metrics: where retries are counted.
        process: which of `config.workers` processes this is; each knows its own sessions and load.
    """

    def __init__(self, config: RouterConfig, metrics: Metrics, *, process: int = 0) -> None:
        self.metrics = metrics
        self.access_log = config.access_log
        self.membership = Membership()
        self.backends: dict[str, Backend] = {}
        self.placement = Placement(PlacementOptions.of(config, process))
        self.gate = Gate(max_held=config.max_held, max_held_bytes=config.max_held_bytes, max_hold_s=config.max_hold_s)
        # An engine is asked as often by several processes together as by one.
        interval_s = config.engine_metrics_interval_s * config.workers
        self._watch = BackendWatch(interval_s, self.backends.values, up=self._backend_up, kv_reported=self._kv_reported)
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
        before = dict(self.backends)
        self.backends.clear()
        stayed: set[str] = set()
        for entry in self.membership.engines:
            known = before.get(entry.name)
            if known is not None and known.entry.place == entry.place:
                del before[entry.name]
                stayed.add(entry.name)
                known.announce(entry)
                if not known.down:
                    self._watch.stop(known)
                self.backends[entry.name] = known
            else:
                self.backends[entry.name] = Backend(entry)
        self.placement.set_engines(self.membership.engines)
        for backend in self.backends.values():
            if backend.down:
                self.placement.mark(backend.name, down=True)
        self.gate.keep_engines(stayed)
        for backend in before.values():
            self._watch.stop(backend)
            backend.remove()
            self._leaving.add(backend)
        for backend in self._leaving:
            if backend.name in cut:
                backend.cut()
        self._leaving = {backend for backend in self._leaving if backend.outstanding}
        for name in list(self.gate.engines):  # its sessions may have to leave it now
            self.gate.wake(Lane(Kind.ENGINE, name))
        self.gate.recheck()
        self._watch.start()

    def set_gate(self, *, closed: bool, adapter: str | None = None, engine: str | None = None) -> None:
        """Close or open a gate: of an adapter, of an engine of the set, or for all. In force when this returns."""
        if engine is not None and engine in self.backends:
            self.placement.gate(engine, closed=closed)
        self.gate.set(closed=closed, adapter=adapter, engine=engine)

    def set_policy(self, policies: tuple[str, ...], options: Mapping[str, Any]) -> None:
        """Place by these policies from now on, with these of `PolicyOptions` changed; ConfigError: there is no such."""
        self.placement.set_policy(replace(self.placement.options, policies=policies, **options))
        self.gate.room()

    def finish_session(self, session_id: str) -> bool:
        """The session has no further turn; False: it was not known."""
        known = self.placement.finish_session(session_id)
        self.gate.room()
        return known

    # --- requests ----------------------------------------------------------------------------------------------------

    def find(self, request: RequestHead, tried: Sequence[Backend], spared: Backend | None = None) -> Backend | Lane:
        """Return an engine, where the request counts from now on until it has `left`, or what it has to wait for.

        Args:
            request: its head.
            tried: engines that had it and broke it.
            spared: one of them that gets it again if no other can.

        Raises:
            RefusalError: 502, only those that were tried could serve it.
        """
        most = self.placement.most_tokens
        if request.prompt_tokens + request.expected_tokens > most:
            # Headers are hints: a false one must not fill an engine for all others.
            request.prompt_tokens = min(request.prompt_tokens, most)
            request.expected_tokens = min(request.expected_tokens, most - request.prompt_tokens)
        gate = self.gate
        if gate.adapters and request.adapter in gate.adapters:
            return Lane(Kind.ADAPTER, request.adapter)
        if gate.crowded and self._joins_queue(request):
            return Lane(Kind.ROOM, self.placement.needs(request))
        name = self.placement.place(request, time.monotonic(), [b.name for b in tried] if tried else ())
        if name is None and tried:
            # What has come back under the name of an engine that died has not broken anything.
            still = [backend.name for backend in tried if not backend.removed and backend is not spared]
            name = self.placement.place(request, time.monotonic(), still)
        if not isinstance(name, str):
            return self._lane(request, tried, name)
        backend = self.backends[name]
        backend.outstanding += 1
        backend.requests += 1
        return backend

    def left(self, request: RequestHead, backend: Backend, now: float, *, ok: bool) -> None:
        """The request is no longer with that engine: it was answered (`ok`), failed, or is taken back."""
        backend.outstanding -= 1
        self.placement.done(request, backend.name, now, ok=ok)
        if self.gate.crowded:
            self.gate.room()

    def retry(self, waiter: Waiter, tried: Sequence[Backend], reason: str) -> None:
        """Place again a request that an engine did not take, or broke on; 502 for one that two engines broke on."""
        if len(tried) >= _MOST_LOST:
            waiter.refuse(_engines_failed(tried))
            return
        self.metrics.retries[reason] += 1
        self.gate.submit(waiter)

    # --- breakers ----------------------------------------------------------------------------------------------------

    def backend_refused(self, backend: Backend) -> None:
        """It takes no requests: it is left out until its breaker closes, see `Backend.down`."""
        if backend.removed or backend.down:
            return
        backend.mark(down=True)
        self.placement.mark(backend.name, down=True)
        self._watch.probe(backend)
        self.gate.wake(Lane(Kind.ENGINE, backend.name))

    def backend_died(self, backend: Backend, cause: str) -> None:
        """An answer of it says that its core is dead."""
        backend.dead = True
        backend.dead_answers += 1
        backend.failure = cause
        self.backend_refused(backend)

    def _backend_up(self, backend: Backend) -> None:
        backend.mark(down=False)
        self.placement.mark(backend.name, down=False)
        self.gate.recheck()

    def _kv_reported(self, backend: Backend, stats: KVStats) -> None:
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
        await self._watch.close()
        await asyncio.gather(*[backend.close() for backend in (*self.backends.values(), *self._leaving)])

    # --- parts of it -------------------------------------------------------------------------------------------------

    def _joins_queue(self, request: RequestHead) -> bool:
        """Whether it opens a session while others like it wait for room, and it is not its turn."""
        session_id = request.session_id
        if session_id is None or not self.gate.waits_for_room(self.placement.needs(request)):
            return False
        return self.placement.sessions.get(session_id) is None

    def _lane(self, request: RequestHead, tried: Sequence[Backend], answer: Defer | None) -> Lane:
        """What a request waits for that was not placed; RefusalError: it need not wait."""
        if answer is Defer.WAIT:
            return Lane(Kind.ROOM, self.placement.needs(request))
        if answer is Defer.GATED:
            session = None if request.session_id is None else self.placement.sessions.get(request.session_id)
            home = None if session is None else session.engine
            return ANY_ENGINE if home not in self.gate.engines else Lane(Kind.ENGINE, home)
        if tried and self.placement.could_serve(request):
            raise _engines_failed(tried)
        return NOWHERE


def _engines_failed(tried: Sequence[Backend]) -> RefusalError:
    names = ", ".join(dict.fromkeys(backend.name for backend in tried))
    return RefusalError(502, "engines_failed", f"every engine tried broke the request: {names}")
