"""The router's memory of the past: its sessions, and its counts."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from dataclasses import dataclass

from penstock.router.membership import Engine


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

    def __len__(self) -> int:
        return len(self._counted) + len(self._idle)

    def get(self, session_id: str) -> Session | None:
        """Return a session, which the caller must not change; None: unknown."""
        return self._counted.get(session_id) or self._idle.get(session_id)

    def record(self, session_id: str, engine: Engine, tokens: int, now: float) -> None:
        """Note that a session lives on `engine` with `tokens` of context; `now`: seconds."""
        record = self._counted.get(session_id)
        if record is not None and record.engine is engine:  # a later turn that stays
            engine.resident_tokens += tokens - record.tokens
            record.tokens = tokens
            record.used = now
            self._counted.move_to_end(session_id)
            return
        self.drop(session_id)
        if len(self) >= self._capacity:
            self.drop(next(iter(self._idle or self._counted)))
        engine.sessions += 1
        engine.resident_tokens += tokens
        self._counted[session_id] = Session(engine, tokens, now)

    def touch(self, session_id: str, now: float) -> None:
        record = self._counted.get(session_id)
        if record is not None:
            record.used = now
            self._counted.move_to_end(session_id)

    def drop(self, session_id: str) -> Session | None:
        """Forget a session; return its record, or None if it was unknown."""
        record = self._counted.pop(session_id, None)
        if record is not None:
            record.engine.resident_tokens -= record.tokens
        else:
            record = self._idle.pop(session_id, None)
        if record is not None:
            record.engine.sessions -= 1
        return record

    def expire(self, *, idle_before: float, gone_before: float) -> int:
        """Stop counting idle sessions, and forget those unused for longer.

        Idle: not used since `idle_before`; forgotten: not since `gone_before`. Returns the number that ceased to count.
        """
        ceased = 0
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
            if record.used >= gone_before:
                break
            self.drop(session_id)
        return ceased


_RECENT = 1024
"""Turns that a mean is made of, at least; older turns count half or less."""
_FIRST_TURNS = 64
"""Turns, none of them a session's second, after which sessions are assumed to have one turn each."""
_IDLE_PAUSES = 3.0
_LEAST_IDLE_S = 3.0


class SessionStats:
    """Mean pause between two turns of a session, and the share of the expected tokens that a turn adds.

    Clients send the most that an answer may add, often ten times what it adds. They do not say when a conversation is
    over. Both values are needed to estimate how much of a KV cache is taken.
    """

    def __init__(self) -> None:
        self.ended = 0
        """Turns that have ended."""
        self._returns = self._added = self._expected = 0
        self._paused_s = 0.0

    def came_back(self, paused_s: float, added: int, expected: int) -> None:
        """Note that a session begins another turn, `paused_s` seconds after its last one.

        Its context is `added` tokens longer, tool output included. An answer adds at most `expected` tokens.
        """
        self._returns += 1
        self._paused_s += paused_s
        if expected:
            self._expected += expected
            self._added += added if 0 < added < expected else expected if added > 0 else 0
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
        return max(_LEAST_IDLE_S, _IDLE_PAUSES * self._paused_s / self._returns) if self._returns else _LEAST_IDLE_S


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
