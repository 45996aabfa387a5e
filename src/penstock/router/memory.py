"""The router's memory of the past: its sessions, and its counts."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from dataclasses import dataclass

from penstock.router.membership import Engine
from penstock.router.policies import Hints


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


SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0,
    1000.0, 2500.0,
)  # fmt: skip
"""Upper bounds of buckets: from a cached first token to an hour of waiting for a gate."""


class Histogram:
    """Counts of seconds by bucket, and their sum; `exchange.observe` counts one."""

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.sum = 0.0


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
