"""The memory of placement for requests with hints: their sessions, their groups and the beginnings of their prompts."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from penstock.prefix_hash import parse_prefix_hashes
from penstock.router.membership import Engine
from penstock.router.placement import Placement, Share
from penstock.router.policies import Defer, Hints, RequestView

MOST_GROUPS = 16_384
"""Most groups that are remembered; one more replaces the least recently used."""
_NO_SAMPLES: Counter[str] = Counter()


class Memory:
    """Chooses the engine of a request with hints by what happened to earlier ones."""

    def __init__(self, placement: Placement) -> None:
        self.sessions = SessionTable()
        self._placement = placement
        self._prefixes = Prefixes()
        self._groups: OrderedDict[str, Counter[str]] = OrderedDict()
        """Samples of each group by engine."""

    def choose(self, request: Hints, share: Share, now: float, excluded: Collection[Engine]) -> Engine | Defer | None:
        """Choose an engine; set the resident tokens of a turn of a session. Answers as `Placement.place`."""
        placement, session_id = self._placement, request.session_id
        record = None if session_id is None else self.sessions.get(session_id)
        home = None if record is None else self._home(record.engine, request, excluded)
        if home is not None and home.entry.draining:
            engine: Engine | Defer = home
            placement.rules["draining"] += 1
        else:
            engines = placement.able(request, excluded)
            if not engines:
                return None
            engine = self._ask(engines, request, record, home)
            if not isinstance(engine, Engine):
                return engine
        if session_id is None:
            turn = "single"
        else:
            turn = (
                "opened" if record is None else "rehomed" if home is None else "stayed" if home is engine else "moved"
            )
            added = self.sessions.begin_turn(session_id, request, record, engine, now, again=bool(excluded))
            share.resident_tokens = added
        placement.turns[turn] += 1
        return engine

    def _home(self, home: Engine, request: Hints, excluded: Collection[Engine]) -> Engine | None:
        if home in excluded or home.weight_version < request.min_weight_version:
            return None
        return home if home.serves and (self._placement.policy.sticky or not home.entry.draining) else None

    def _ask(
        self, engines: Sequence[Engine], request: Hints, record: Session | None, home: Engine | None
    ) -> Engine | Defer:
        """Ask the policies; note the engine as one that has the prompt and a sample of the group."""
        placement, boundaries = self._placement, ()
        if request.prefix_hashes and placement.policy.reads_prefixes:
            boundaries = parse_prefix_hashes(request.prefix_hashes)
        group_id = None if home is not None else request.group_id
        seen = RequestView(
            request.session_id,
            home,
            0 if record is None else record.tokens,
            record is not None,
            request.prompt_tokens,
            int(request.expected_tokens * self.sessions.added_share),
            self._prefixes.holders(boundaries, len(placement.engines)) if boundaries else {},
            self._groups.get(group_id or "", _NO_SAMPLES),
            placement.placed,
        )
        engine = placement.policy.ask(engines, seen, placement.rules)
        if isinstance(engine, Engine):
            if boundaries:
                self._prefixes.note(engine, boundaries, placement.config.prefix_length)
            if group_id is not None:
                self._groups.setdefault(group_id, Counter())[engine.name] += 1
                self._groups.move_to_end(group_id)
                if len(self._groups) > MOST_GROUPS:
                    self._groups.popitem(last=False)
        return engine


# --- sessions ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Session:
    """One session that the router knows."""

    engine: Engine
    """The engine where it lives. If that engine has left, the context is lost."""
    tokens: int
    """Tokens of its context, according to its last request."""
    used: float
    """Time at which its last turn began or ended, in seconds by the caller's clock."""


class SessionTable:
    """Sessions and their homes. If it is full, it forgets the least recently used session.

    A session that was idle for a while keeps its home but no longer counts: see `expire`.
    """

    def __init__(self, capacity: int = 262_144) -> None:
        self._capacity = capacity
        self._counted: OrderedDict[str, Session] = OrderedDict()
        self._idle: OrderedDict[str, Session] = OrderedDict()
        """Sessions that no longer count. Both tables have the least recently used session first."""
        self._in_flight: dict[str, int] = {}
        """Turns in flight of each session."""
        self._stats = SessionStats()
        self.added_share = self._stats.added_share

    def __len__(self) -> int:
        return len(self._counted) + len(self._idle)

    def get(self, session_id: str) -> Session | None:
        """Return a session, which the caller must not change; None: unknown."""
        return self._counted.get(session_id) or self._idle.get(session_id)

    def begin_turn(
        self, session_id: str, request: Hints, record: Session | None, engine: Engine, now: float, *, again: bool
    ) -> int:
        """Note a turn of a session on `engine`, where it lives from now on; return the tokens that its answer will add.

        `record` is what `get` returned; `again`: an engine has failed under this turn; `now`: seconds.
        """
        context = request.prompt_tokens
        if record is not None:
            context = context or record.tokens
            if session_id not in self._in_flight and not again:
                self._stats.came_back(now - record.used, context - record.tokens, request.expected_tokens)
        self._in_flight[session_id] = self._in_flight.get(session_id, 0) + 1
        self._record(session_id, engine, context or 1, now)
        return int(request.expected_tokens * self.added_share)

    def end_turn(self, session_id: str, now: float) -> None:
        in_flight = self._in_flight.pop(session_id) - 1
        if in_flight:
            self._in_flight[session_id] = in_flight
        self._touch(session_id, now)
        self._stats.ended += 1

    def _record(self, session_id: str, engine: Engine, tokens: int, now: float) -> None:
        record = self._counted.get(session_id)
        if record is not None and record.engine is engine:  # a later turn that stays
            engine.resident_tokens += tokens - record.tokens
            record.tokens, record.used = tokens, now
            self._counted.move_to_end(session_id)
            return
        self.drop(session_id)
        if len(self) >= self._capacity:
            self.drop(next(iter(self._idle or self._counted)))
        engine.sessions += 1
        engine.resident_tokens += tokens
        self._counted[session_id] = Session(engine, tokens, now)

    def _touch(self, session_id: str, now: float) -> None:
        record = self._counted.get(session_id)
        if record is not None:
            record.used = now
            self._counted.move_to_end(session_id)

    def drop(self, session_id: str) -> bool:
        """Forget a session, which has ended; return False if it was not known."""
        record = self._counted.pop(session_id, None)
        if record is not None:
            record.engine.resident_tokens -= record.tokens
        else:
            record = self._idle.pop(session_id, None)
        if record is not None:
            record.engine.sessions -= 1
        return record is not None

    def expire(self, now: float, ttl: float) -> int:
        """Forget sessions unused for `ttl` seconds; stop counting idle ones as resident.

        The idle limit is three times the mean pause between two turns. Sessions that ended without `drop` therefore do
        not keep new ones waiting. A pause for a tool does not make a session look gone.

        Returns:
            The number of sessions that ceased to count; above 0, waiting requests may find room.
        """
        for session_id in self._in_flight:
            self._touch(session_id, now)
        self.added_share = self._stats.added_share
        idle_before, ceased = now - min(ttl, self._stats.idle_s), 0
        while self._counted:
            session_id, record = next(iter(self._counted.items()))
            if record.used >= idle_before:
                break
            del self._counted[session_id]
            record.engine.resident_tokens -= record.tokens
            self._idle[session_id] = record
            ceased += 1
        while self._idle:
            session_id, record = next(iter(self._idle.items()))
            if record.used >= now - ttl:
                break
            self.drop(session_id)
        return ceased


_RECENT = 1024
"""Turns that a mean is made of, at least; older turns count half or less."""
_FIRST_TURNS = 64
"""Turns, none of them a session's second, after which sessions are assumed to have one turn each."""
_IDLE_PAUSES, _LEAST_IDLE_S = 3.0, 3.0


class SessionStats:
    """Mean pause between two turns of a session, and the share of the expected tokens that a turn adds.

    Clients send the most that an answer may add, often ten times what it adds. They do not say when a conversation is
    over. Both values are needed to estimate how much of a KV cache is taken.
    """

    ended = 0
    """Turns that have ended."""
    _returns = _added = _expected = 0
    _paused_s = 0.0

    def came_back(self, paused_s: float, added: int, expected: int) -> None:
        """Note that a session begins another turn, `paused_s` seconds after its last one.

        Its context is `added` tokens longer, tool output included. An answer adds at most `expected` tokens.
        """
        self._returns += 1
        self._paused_s += paused_s
        self._expected += expected
        self._added += min(max(added, 0), expected)
        if self._returns >= 2 * _RECENT:
            self._returns //= 2
            self._paused_s /= 2
            self._expected //= 2
            self._added //= 2

    @property
    def added_share(self) -> float:
        """Fraction of the expected tokens that a turn adds, 0 to 1.

        It is 1 as long as it is unknown, and 0 where sessions do not come back. No session then loses by overfull
        engines, and each engine's own queue holds the surplus.
        """
        if self._expected:
            return self._added / self._expected
        return 1.0 if self._returns or self.ended < _FIRST_TURNS else 0.0

    @property
    def idle_s(self) -> float:
        """Seconds of pause after which a session will probably not come back."""
        return max(_LEAST_IDLE_S, _IDLE_PAUSES * self._paused_s / max(1, self._returns))


# --- beginnings of prompts --------------------------------------------------------------------------------------------


class Prefixes:
    """Maps prefix hashes to engines; a full map forgets the least recently used hash.

    An engine may have evicted a prefix since it saw it, so this overestimates its cache. A prompt has up to 32 hashes.
    """

    def __init__(self, capacity: int = 131_072) -> None:
        self._capacity = capacity
        self._holders: OrderedDict[bytes, dict[Engine, int]] = OrderedDict()
        """Engines that have seen a prefix, each with its `Engine.fillings` at that time."""

    def __len__(self) -> int:
        return len(self._holders)

    def note(self, engine: Engine, boundaries: Sequence[tuple[int, bytes]], least: int = 0) -> None:
        """Note that `engine` gets a prompt with these prefixes of `least` or more tokens."""
        holders = self._holders
        for tokens, digest in boundaries:
            if tokens < least:
                continue
            fillings = holders.setdefault(digest, {})
            if engine not in fillings:
                fillings = holders[digest] = {one: filling for one, filling in fillings.items() if _has(one, filling)}
            fillings[engine] = engine.fillings
            holders.move_to_end(digest)
        while len(holders) > self._capacity:
            holders.popitem(last=False)

    def holders(self, boundaries: Sequence[tuple[int, bytes]], most: int) -> dict[str, int]:
        """Return the names of up to `most` engines that have seen one of these prefixes, with the longest's tokens."""
        found: dict[str, int] = {}
        for tokens, digest in reversed(boundaries):
            for engine, filling in self._holders.get(digest, {}).items():
                if engine.name not in found and _has(engine, filling):
                    found[engine.name] = tokens
            if len(found) == most:
                break
        return found


def _has(engine: Engine, filling: int) -> bool:
    return not engine.left and engine.fillings == filling
