"""Puts requests on engines: membership, placement, breakers and the gate together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.config import RouterConfig
from penstock.router.backend import Engine, Probes
from penstock.router.exchange import Exchange
from penstock.router.gate import ANY_ENGINE, NOWHERE, Gate, Kind, Lane
from penstock.router.http import RefusalError
from penstock.router.membership import EngineEntry, Membership
from penstock.router.metrics import Metrics
from penstock.router.placement import Placement, PlacementOptions
from penstock.router.policies.base import Defer
from penstock.router.watch import EngineWatch, KVFigures

if TYPE_CHECKING:
    from penstock.router.shared_port import SharedPort

_EXPIRE_S = 0.75
"""Between two looks for idle sessions: before the placement looks by itself, which knows nobody to tell."""
_MOST_LOST = 2
"""A request that has lost so many engines gets no other: it may be what ends them."""


class Dispatcher:
    """Finds an engine for each request, or the reason to wait.

    Args:
        config: limits, and the options of placement.
        metrics: where retries are counted.
        process: which of `config.workers` processes this is; each knows its own sessions and load.
    """

    def __init__(self, config: RouterConfig, metrics: Metrics, *, process: int = 0) -> None:
        self.metrics = metrics
        self.membership = Membership()
        self.engines: dict[str, Engine] = {}
        self.placement = Placement(PlacementOptions.of(config, process))
        self.gate = Gate(max_held=config.max_held, max_held_bytes=config.max_held_bytes, max_hold_s=config.max_hold_s)
        self._probes = Probes(self._engine_up)
        self._watch = EngineWatch(
            config.engine_metrics_interval_s * config.workers,  # an engine is asked as often as by one process
            lambda: list(self.engines.values()),
            self._engine_said,
            self.engine_refused,
        )
        self._leaving: set[Engine] = set()
        self._expire_at = 0.0
        self.on_end: Callable[[Exchange], None] | None = None
        """Called with every exchange when it is over, for the access log."""
        self.keys: tuple[str | None, str | None] = None, None
        """What the router asks of clients, and for admin calls."""
        self.shared_port: SharedPort | None = None
        """What answers admin calls on a port that several processes serve."""

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
        before, self.engines = self.engines, {}
        stayed: set[str] = set()
        for entry in self.membership.engines:
            known = before.get(entry.name)
            if known is not None and known.entry.place == entry.place:
                del before[entry.name]
                stayed.add(entry.name)
                known.announce(entry)
                self._probes.stop(known)
                self.engines[entry.name] = known
            else:
                self.engines[entry.name] = Engine(entry)
        self.placement.set_engines(self.membership.engines)
        self.gate.keep_engines(stayed)
        for engine in before.values():
            self._probes.stop(engine)
            engine.remove()
            self._leaving.add(engine)
        for engine in self._leaving:
            if engine.name in cut:
                engine.cut()
        self._leaving = {engine for engine in self._leaving if engine.outstanding}
        for name in list(self.gate.engines):  # its sessions may have to leave it now
            self.gate.wake(Lane(Kind.ENGINE, name))
        self.gate.recheck()
        self._watch.start()

    def set_gate(self, *, closed: bool, adapter: str | None = None, engine: str | None = None) -> None:
        """Close or open a gate: of an adapter, of an engine of the set, or for all. In force when this returns."""
        if engine is not None and engine in self.engines:
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

    def try_place(self, exchange: Exchange) -> Lane | None:
        """Send the request to an engine, or say what it has to wait for."""
        request = exchange.request
        most = self.placement.most_tokens
        if request.prompt_tokens > most or request.expected_tokens > most:
            # Headers are hints: a false one must not fill an engine for all others.
            request.prompt_tokens = min(request.prompt_tokens, most)
            request.expected_tokens = min(request.expected_tokens, most)
        gate = self.gate
        if gate.adapters and request.adapter in gate.adapters:
            return Lane(Kind.ADAPTER, request.adapter)
        if gate.crowded and self._joins_queue(exchange):
            return Lane(Kind.ROOM, (request.min_weight_version, request.adapter))
        name = self.placement.place(request, time.monotonic(), [engine.name for engine in exchange.tried])
        if name is None and exchange.tried:
            # What has come back under the name of an engine that died has not broken anything.
            still = [engine.name for engine in exchange.tried if not engine.removed]
            name = self.placement.place(request, time.monotonic(), still)
        if not isinstance(name, str):
            return self._lane(exchange, name)
        engine = self.engines[name]
        engine.outstanding += 1
        engine.requests += 1
        exchange.place(engine)
        return None

    def left(self, exchange: Exchange, engine: Engine, now: float, *, ok: bool) -> None:
        """The request is no longer with that engine: it was answered (`ok`), failed, or is taken back."""
        engine.outstanding -= 1
        self.placement.done(exchange.request, engine.name, now, ok=ok)
        if self.gate.crowded:
            self.gate.room()

    def replace(self, exchange: Exchange, reason: str) -> None:
        """Place a request that an engine did not take, or broke on; 502 for one that has lost two engines."""
        if len(exchange.tried) >= _MOST_LOST:
            self._refuse_tried(exchange)
            return
        self.metrics.retries[reason] += 1
        self.gate.submit(exchange)

    # --- breakers ----------------------------------------------------------------------------------------------------

    def engine_refused(self, engine: Engine) -> None:
        """It refused a connection or failed a health check: left out until a probe succeeds or it is announced."""
        if engine.removed or engine.down:
            return
        engine.mark(down=True)
        self.placement.mark(engine.name, down=True)
        self._probes.start(engine)
        self.gate.wake(Lane(Kind.ENGINE, engine.name))

    def engine_died(self, engine: Engine, cause: str) -> None:
        """An answer of it says that its core is dead."""
        engine.dead_answers += 1
        engine.failure = cause
        self.engine_refused(engine)

    def _engine_up(self, engine: Engine) -> None:
        engine.mark(down=False)
        self.placement.mark(engine.name, down=False)
        self.gate.recheck()

    def _engine_said(self, engine: Engine, figures: KVFigures) -> None:
        self.placement.figures(engine.name, kv_usage=figures.usage, kv_capacity=figures.capacity)
        self.gate.room()

    # --- time --------------------------------------------------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """Close idle connections, forget idle sessions, refuse who waited too long; `now` is `time.monotonic()`."""
        for engine in self.engines.values():
            engine.close_idle(now)
        if now >= self._expire_at:
            self._expire_at = now + _EXPIRE_S
            if self.placement.expire(now):
                self.gate.room()
        self.gate.expire(now)

    async def close(self) -> None:
        """Close every connection to an engine."""
        await asyncio.gather(self._watch.close(), self._probes.close())
        await asyncio.gather(*[engine.close() for engine in (*self.engines.values(), *self._leaving)])

    # --- parts of it -------------------------------------------------------------------------------------------------

    def _joins_queue(self, exchange: Exchange) -> bool:
        """Whether it opens a session while others like it wait for room, and it is not its turn."""
        request = exchange.request
        session_id = request.session_id
        if session_id is None or not self.gate.waits_for_room((request.min_weight_version, request.adapter)):
            return False
        return self.placement.sessions.get(session_id) is None

    def _lane(self, exchange: Exchange, answer: Defer | None) -> Lane | None:
        """What a request waits for that was not placed; None: it is refused."""
        request = exchange.request
        if answer is Defer.WAIT:
            return Lane(Kind.ROOM, (request.min_weight_version, request.adapter))
        if answer is Defer.GATED:
            record = None if request.session_id is None else self.placement.sessions.get(request.session_id)
            home = None if record is None else record.engine
            return ANY_ENGINE if home not in self.gate.engines else Lane(Kind.ENGINE, home)
        if exchange.tried and self.placement.could_serve(request):
            self._refuse_tried(exchange)
            return None
        return NOWHERE

    @staticmethod
    def _refuse_tried(exchange: Exchange) -> None:
        names = ", ".join(dict.fromkeys(engine.name for engine in exchange.tried))
        exchange.refuse(RefusalError(502, "engines_failed", f"every engine tried broke the request: {names}"))
