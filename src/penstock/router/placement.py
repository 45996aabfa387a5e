"""Everything that placing a request needs, without I/O and without a clock of its own.

The router's dispatcher and the discrete-event fleet use it alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Self

from penstock.errors import StateError
from penstock.router.http import Hints
from penstock.router.membership import EngineEntry
from penstock.router.memory import (
    Candidate,
    Candidates,
    Groups,
    LoadTable,
    Prefixes,
    Session,
    SessionStats,
    SessionTable,
    new_tuple,
)
from penstock.router.policies import Defer, EngineView, PolicyOptions, ReadsPrefixes, RequestView, make_policy
from penstock.settings import RouterConfig
from penstock.wire import parse_prefix_hashes

_SWEEP_S = 1.0
"""Between two looks for sessions that are idle or forgotten."""
_NO_TURNS = (0, 0)


@dataclass(frozen=True, slots=True)
class PlacementOptions(PolicyOptions):
    """What can be set about placement."""

    policies: tuple[str, ...] = ("bounded-sticky",)
    """In order: who has no opinion leaves the choice to the next."""
    session_ttl_s: float = 1800.0
    """A session is forgotten when it was not used for so long."""

    @classmethod
    def of(cls, config: RouterConfig, process: int = 0) -> Self:
        """Those of one process of a router."""
        given = config.model_dump()
        named = {field.name: given[field.name] for field in fields(cls) if field.name in given}
        return cls(**named, policies=tuple(config.policy.split(",")), processes=config.workers, seed=process)


@dataclass
class Statistics:
    """Placements so far, counted."""

    stayed: int = 0
    """Later turns on the engine of their session."""
    moved: int = 0
    """Later turns that the policy put elsewhere, though the session's engine could have served them."""
    rehomed: int = 0
    """Later turns, and second tries, of sessions whose engine could not serve them."""
    opened: int = 0
    """First turns."""
    single: int = 0
    """Requests without a session."""
    waited: int = 0
    """Times that a request had to wait for room, `Defer.WAIT`."""
    failed: int = 0
    """Placements that ended without a complete answer."""
    rules: Counter[str] = field(default_factory=Counter[str])
    """Placements by the policy of the list that chose; `draining`: the session's engine takes nothing else."""

    @property
    def placed(self) -> int:
        """Placements."""
        return self.stayed + self.moved + self.rehomed + self.opened + self.single


class Placement:
    """Puts requests on engines: who may serve them, what the policy says, and what has to be remembered for it.

    Args:
        options: the policies and their options.
    """

    def __init__(self, options: PlacementOptions | None = None) -> None:
        self.options = options or PlacementOptions()
        self.sessions = SessionTable()
        self.loads = LoadTable()
        self.statistics = Statistics()
        self._policy = make_policy(self.options.policies, self.options)
        self._reads_prefixes = self._policy.reads_prefixes
        self._candidates = Candidates(self.sessions, self.loads)
        self._engines = self._candidates.engines
        self._prefixes = Prefixes()
        self._groups = Groups()
        self._placed = self.options.seed
        self._in_flight: dict[str, dict[str, tuple[int, int]]] = {}
        """Turns in flight of each session on each engine, and what they are expected to add there together."""
        self._session_stats = SessionStats()
        self._added_share = self._session_stats.added_share
        self._sweep_at = 0.0

    def set_policy(self, options: PlacementOptions) -> None:
        """Place by other policies from now on; what is known of sessions, loads and prefixes stays."""
        self._policy = make_policy(options.policies, options)
        self._reads_prefixes = self._policy.reads_prefixes
        self.options = options

    # --- engines -----------------------------------------------------------------------------------------------------

    def set_engines(self, entries: Sequence[EngineEntry]) -> None:
        """Take over a full set. Sessions of an engine that left have no home; its requests may still be `done`."""
        left, updated = self._candidates.set(entries)
        for name in left:
            self.sessions.forget_engine(name)
        for name in (*left, *updated):  # new weights: what was cached is of no use to anybody
            self._prefixes.forget_engine(name)
        self._candidates.all_changed()

    def mark(self, name: str, *, down: bool) -> None:
        """Note whether an engine takes connections; an announcement makes it up again."""
        self._engine(name).down = down
        self._candidates.arrange()

    def gate(self, name: str, *, closed: bool) -> None:
        """Close or open the gate of one engine: nothing new goes there, and its sessions wait for it (`GATED`)."""
        self._engine(name).gated = closed
        self._candidates.arrange()

    def report_kv(self, name: str, *, kv_usage: float, kv_capacity: int) -> None:
        """What an engine says of its KV cache.

        Args:
            name: of the engine.
            kv_usage: share in use, 0 to 1; negative: not known.
            kv_capacity: tokens it holds; 0: not known.
        """
        engine = self._engine(name)
        known, engine.kv_usage, engine.kv_capacity = engine.kv_capacity, kv_usage, kv_capacity
        if kv_capacity != known:
            self._candidates.arrange()
        _, engine.kv_reported_at, _ = self.loads.of(name)
        self._candidates.changed(name)

    @property
    def most_tokens(self) -> int:
        """Most tokens that a request's headers can claim: more than one sequence can have fits on no engine."""
        return self._candidates.most_tokens

    def needs(self, request: Hints) -> tuple[int, str | None]:
        """What tells a request that waits for room from others: see `Candidates.needs`."""
        return self._candidates.needs(request.min_weight_version, request.adapter)

    def views(self) -> Mapping[str, EngineView]:
        """Every engine of the set, as policies see it."""
        self._candidates.refresh()
        return {name: engine.view for name, engine in self._engines.items()}

    def sessions_on(self, name: str) -> int:
        """Sessions that live on an engine; what a drain waits for."""
        return self.sessions.counts(name)[0]

    # --- requests ----------------------------------------------------------------------------------------------------

    def place(self, request: Hints, now: float, tried: Collection[str] = ()) -> str | Defer | None:
        """Choose an engine; its load and residency are accounted at once, until `done`.

        Args:
            request: what its headers say.
            now: seconds, by a clock that never goes back.
            tried: engines that had this request and broke it.

        Returns:
            The engine's name; `Defer.WAIT` until load falls, `Defer.GATED` until a gate opens; None where no engine
            may serve it, see `could_serve`.
        """
        if now >= self._sweep_at:
            self.expire(now)
        session_id = request.session_id
        record = None if session_id is None else self.sessions.get(session_id)
        home = None if record is None else self._home(record.engine, request, tried)
        if home is not None and home.place < 0:
            return Defer.GATED if home.gated else self._record(request, now, tried, record, home, home.name, "draining")
        version, adapter = request.min_weight_version, request.adapter
        snapshot = self._candidates.snapshot(version, adapter, tried, self._placed)
        if snapshot is None:
            return Defer.GATED if self._candidates.gated(version, adapter, tried) else None
        boundaries = ()
        if self._reads_prefixes is ReadsPrefixes.ALWAYS or (home is None and self._reads_prefixes):
            boundaries = parse_prefix_hashes(request.prefix_hashes or b"")
        group_id = None if home is not None else request.group_id
        view = self._view(request, boundaries, group_id, record, home)
        rule, answer = self._policy.ask(snapshot, view)
        if isinstance(answer, Defer):
            self.statistics.waited += 1
            return answer
        if boundaries:
            least = self.options.prefix_length
            self._prefixes.note(answer.name, [boundary for boundary in boundaries if boundary[0] >= least])
        if group_id is not None:
            self._groups.note(group_id, answer.name)
        return self._record(request, now, tried, record, home, answer.name, rule)

    def choose(self, request: Hints, now: float) -> str | None:
        """Place a request without a session that is sent past the router; None: it would have to wait.

        The choice counts as any other, so the next one follows from it. The load does not: its end would not be known.
        """
        name = self.place(request, now)
        if not isinstance(name, str):
            return None
        self.done(request, name, now, ok=True)
        return name

    def could_serve(self, request: Hints) -> bool:
        """Whether an engine may serve the request if those it was tried on are asked again; where `place` says None."""
        return self._candidates.snapshot(request.min_weight_version, request.adapter, (), 0) is not None

    def done(self, request: Hints, name: str, now: float, *, ok: bool) -> None:
        """The request is no longer on the engine that `place` answered, once for each such answer.

        Args:
            request: as it was placed.
            name: of the engine, which may have left since.
            now: seconds.
            ok: it was answered in full; else it failed or was taken back.
        """
        session_id = request.session_id
        tokens = request.prompt_tokens + request.expected_tokens
        if session_id is None:
            self.loads.add(name, -1, -tokens, -(tokens or 1))
        else:
            in_flight = self._in_flight[session_id]
            turns, expected = in_flight.pop(name)
            own = expected // turns
            if turns > 1:
                in_flight[name] = (turns - 1, expected - own)
            elif not in_flight:
                del self._in_flight[session_id]
            self.loads.add(name, -1, -tokens, -own)
            self.sessions.touch(session_id, now)
            self._session_stats.ended += 1
        self._candidates.changed(name)
        if not ok:
            self.statistics.failed += 1

    def finish_session(self, session_id: str) -> bool:
        """Forget a session: nothing of it is needed any more. False: it was not known."""
        record = self.sessions.get(session_id)
        if record is not None and record.engine is not None:
            self._candidates.changed(record.engine)
        return self.sessions.drop(session_id)

    def expire(self, now: float) -> int:
        """Forget sessions not used for `session_ttl_s`; those idle for long stay, but count as resident no longer.

        How long is learnt: three times the mean pause between two turns (`SessionStats`). So contexts of sessions that
        nobody told us are finished do not keep new ones waiting, and a pause for a tool does not make a session look
        gone. `place` calls this too.

        Returns:
            How many sessions ceased to count; more than none: waiting requests may find room.
        """
        self._sweep_at = now + _SWEEP_S
        for session_id in self._in_flight:
            self.sessions.touch(session_id, now)
        ttl = self.options.session_ttl_s
        idle = min(ttl, self._session_stats.idle_s)
        self._added_share = self._session_stats.added_share
        ceased = self.sessions.expire(idle_before=now - idle, gone_before=now - ttl)
        if ceased:
            self._candidates.all_changed()
        return ceased

    # --- parts of it -------------------------------------------------------------------------------------------------

    def _view(
        self,
        request: Hints,
        boundaries: Sequence[tuple[int, bytes]],
        group_id: str | None,
        record: Session | None,
        home: Candidate | None,
    ) -> RequestView:
        """The request as policies see it."""
        return new_tuple(
            RequestView,
            (
                request.session_id,
                None if home is None else home.view,
                0 if record is None else record.tokens,
                record is not None,
                request.prompt_tokens,
                int(request.expected_tokens * self._added_share),
                self._prefixes.holders(boundaries) if boundaries else (),
                self._prefix(boundaries) if boundaries else None,
                () if group_id is None else self._groups.placed(group_id),
            ),
        )

    def _engine(self, name: str) -> Candidate:
        engine = self._engines.get(name)
        if engine is None:
            known = ", ".join(self._engines) or "none"
            raise StateError(f"there is no engine {name!r}; known: {known}")
        return engine

    def _home(self, name: str | None, request: Hints, tried: Collection[str]) -> Candidate | None:
        """A session's engine, if it may serve this request now or when its gate opens."""
        home = None if name is None else self._engines.get(name)
        if home is None or home.weight_version < request.min_weight_version or name in tried:
            return None
        adapter = request.adapter
        if adapter is not None and home.adapters is not None and adapter not in home.adapters:
            return None
        if home.place < 0 and not (home.serves and self._policy.sticky):
            return None
        return home

    def _prefix(self, boundaries: Sequence[tuple[int, bytes]]) -> bytes:
        """Hash of the longest beginning that has at most `prefix_length` tokens, or of the shortest there is."""
        most = self.options.prefix_length
        return max((b for b in boundaries if b[0] <= most), default=boundaries[0])[1]

    def _record(
        self,
        request: Hints,
        now: float,
        tried: Collection[str],
        record: Session | None,
        home: Candidate | None,
        name: str,
        rule: str,
    ) -> str:
        """Account for a placement."""
        session_id = request.session_id
        tokens = request.prompt_tokens + request.expected_tokens
        if session_id is None:
            # What nobody has said counts as one token, so that requests and sessions are at least counted.
            self.loads.add(name, 1, tokens, tokens or 1)
        else:
            context = request.prompt_tokens
            in_flight = self._in_flight.get(session_id)
            if record is not None:
                context = context or record.tokens
                if not in_flight and not tried:
                    self._session_stats.came_back(now - record.used, context - record.tokens, request.expected_tokens)
                if record.engine is not None and record.engine != name:
                    self._candidates.changed(record.engine)
            self.sessions.record(session_id, name, context or 1, now)
            own = int(request.expected_tokens * self._added_share)
            self.loads.add(name, 1, tokens, own)
            turns, expected = (in_flight or {}).get(name, _NO_TURNS)
            self._in_flight.setdefault(session_id, {})[name] = (turns + 1, expected + own)
        self._candidates.changed(name)
        self._placed += 1
        statistics = self.statistics
        statistics.rules[rule] += 1
        if home is not None:
            if home.name == name:
                statistics.stayed += 1
            else:
                statistics.moved += 1
        elif record is not None:
            statistics.rehomed += 1
        elif session_id is not None:
            statistics.opened += 1
        else:
            statistics.single += 1
        return name
