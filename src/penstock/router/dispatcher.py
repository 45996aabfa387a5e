"""Puts requests on engines: membership, placement and the gate together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from penstock.config import RouterConfig
from penstock.router.engine import Engine
from penstock.router.exchange import Exchange
from penstock.router.gate import Gate
from penstock.router.lane import NOWHERE, Lane
from penstock.router.membership import EngineEntry, Membership
from penstock.router.metrics import Metrics
from penstock.router.policy import EngineView, RequestInfo, Snapshot, candidates, make_policy
from penstock.router.probe import Probes
from penstock.router.refusal import RefusalError
from penstock.router.sessions import Sessions

if TYPE_CHECKING:
    from penstock.router.admin_calls import Answer

_NONE: frozenset[str] = frozenset()


class Dispatcher:
    """Chooses an engine for each request, and keeps what that needs."""

    def __init__(self, config: RouterConfig, metrics: Metrics) -> None:
        self.metrics = metrics
        self.membership = Membership()
        self.engines: dict[str, Engine] = {}
        self.sessions = Sessions()
        self.gate = Gate(max_held=config.max_held, max_held_bytes=1 << 32, max_hold_s=config.max_hold_s)
        self._policy = make_policy(config.policy)
        self._placed = 0
        self._probes = Probes(self._engine_up, self.engine_refused)
        self._leaving: set[Engine] = set()
        self.on_end: Callable[[Exchange], None] | None = None
        """Called with every exchange when it is over, for the access log."""
        self.relay: Callable[[str, str, bytes], Awaitable[Answer]] | None = None
        """Who does admin calls (method, path, body) where this is one process of several; None: this process."""

    def set_engines(self, epoch: int, entries: Sequence[EngineEntry]) -> None:
        """Take over a full set. Raises StateError or UserError and changes nothing where it does not fit."""
        self.membership = self.membership.replaced_by(epoch, entries)
        before, self.engines = self.engines, {}
        for entry in self.membership.engines:
            known = before.get(entry.name)
            if known is not None and known.entry.url == entry.url:
                del before[entry.name]
                known.announce(entry)
                self._probes.stop(known)
                self.engines[entry.name] = known
            else:
                self.engines[entry.name] = Engine(entry)
        for engine in before.values():
            self._probes.stop(engine)
            engine.remove()
            self._leaving.add(engine)
        self._leaving = {engine for engine in self._leaving if engine.outstanding}
        self.gate.recheck()

    def set_gate(self, *, closed: bool, adapter: str | None = None, engine: str | None = None) -> None:
        """Close or open a gate: of an adapter, of an engine, or for all. In force when this returns."""
        self.gate.set(closed=closed, adapter=adapter, engine=engine)

    def finish_session(self, session_id: str) -> bool:
        """The session has no further turn; False: it was not known."""
        return self.sessions.home(session_id) is not None

    def try_place(self, exchange: Exchange) -> Lane | None:
        """Send the request to an engine, or say what it has to wait for."""
        request = exchange.request
        session_id = request.session_id
        home = None if session_id is None else self.sessions.home(session_id)
        info = RequestInfo(
            session_id, request.min_weight_version, home, frozenset(exchange.tried) if exchange.tried else _NONE
        )
        views = [
            EngineView(e.name, e.entry.eligible and not e.down, e.entry.weight_version, e.outstanding)
            for e in self.engines.values()
        ]
        able = candidates(views, info)
        if not able:
            return NOWHERE
        if exchange.tried:
            able = tuple([view for view in able if view.name not in info.tried])
            if not able:
                exchange.refuse(
                    RefusalError(
                        502, "engines_failed", f"every engine tried broke the request: {', '.join(exchange.tried)}"
                    )
                )
                return None
        chosen = self._policy.choose(Snapshot(able, self._placed), info)
        self._placed += 1
        if session_id is not None:
            self.sessions.settle(session_id, chosen.name)
        engine = self.engines[chosen.name]
        engine.requests += 1
        engine.outstanding += 1
        exchange.place(engine)
        return None

    def left(self, exchange: Exchange, engine: Engine, now: float, *, ok: bool) -> None:  # noqa: ARG002
        """The request is no longer with that engine: it was answered, failed, or is taken back."""
        engine.outstanding -= 1

    def replace(self, exchange: Exchange, reason: str) -> None:
        """Place a request that an engine did not take."""
        self.metrics.retries[reason] += 1
        self.gate.submit(exchange)

    def engine_refused(self, engine: Engine) -> None:
        """A connection was refused: leave the engine out until a probe succeeds or a membership is announced."""
        if not engine.removed and not engine.down:
            engine.mark(down=True)
            self._probes.start(engine)

    def sweep(self, now: float) -> None:
        """Close idle connections and refuse requests that have waited too long; `now` is `time.monotonic()`."""
        for engine in self.engines.values():
            engine.close_idle(now)
        self.gate.expire(now)

    async def close(self) -> None:
        """Close every connection to an engine."""
        await self._probes.close()
        await asyncio.gather(*[engine.close() for engine in (*self.engines.values(), *self._leaving)])

    def _engine_up(self, engine: Engine) -> None:
        engine.mark(down=False)
        self.gate.recheck()
