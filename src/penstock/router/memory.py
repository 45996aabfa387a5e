"""The router's memory: the membership that the fleet announced, engines, sessions and counts."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, ConfigDict, Field

from penstock.errors import StateError, UserError

# --- the fleet's announcement: always the full set with an epoch, never a delta --------------------------------------


def _check_url(url: str) -> str:
    parts = urlsplit(url)
    extra = parts.path.rstrip("/") or parts.query or parts.fragment or parts.username or parts.password
    (parts.hostname or "").encode("idna")  # as the resolver will do; an error there would come too late to be reported
    if parts.scheme != "http" or not parts.hostname or not parts.port or extra:
        raise ValueError("it must be of the form http://host:port")
    return url


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """One engine as the fleet announces it; the router checks it when it reads the announcement."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(pattern=r"^[!-~]{1,128}$")]
    url: Annotated[str, AfterValidator(_check_url)]
    weight_version: Annotated[int, Field(ge=0)] = 0
    eligible: bool = True
    """Whether requests may go there; False while it loads weights or is dead."""
    draining: bool = False
    """The engine is to leave: it gets only later turns of its sessions, until they finish or their TTL passes."""
    dp_rank: Annotated[int, Field(ge=0)] | None = None
    """Data-parallel rank of the server at `url`; a header of every request names it. If it is None, the server is one
    engine and distributes requests among its ranks itself."""
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of one sequence; None: unknown."""
    api_key: Annotated[str, Field(pattern=r"^[!-~]{1,1024}$")] | None = field(default=None, repr=False)
    """Key that the router sends as `Authorization: Bearer`; None: no key. `GET /router/engines` never shows it."""

    @property
    def place(self) -> tuple[str, int | None]:
        """URL and rank. Another place is another engine, even under the same name."""
        return self.url, self.dp_rank

    def address(self) -> tuple[str, int]:
        """Return host and port of `url`."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 0


@dataclass(frozen=True, slots=True)
class Membership:
    """A full set of engines, the gate and the policy. A greater epoch replaces it."""

    epoch: int = -1
    """-1: no membership was announced yet."""
    engines: tuple[EngineEntry, ...] = ()
    closed: bool = False
    """Whether the gate is closed: requests wait until a later epoch opens it."""
    policy: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of `RouterConfig` that override those with which the router was started."""
    cut: tuple[str, ...] = ()
    """Engines that have left and whose requests in flight are broken off, to go on elsewhere. Requests on other engines
    that have left may finish."""

    def __post_init__(self) -> None:
        for what, values in (
            ("name", [e.name for e in self.engines]),
            ("url and rank", [e.place for e in self.engines]),
        ):
            twice = [value for value, count in Counter(values).items() if count > 1]
            if twice:
                raise UserError(f"two engines have the {what} {twice[0]!r}; give each its own")

    def replaced_by(self, announced: Membership) -> Membership:
        """Return the membership in force after `announced`; this one if nothing changes.

        Raises:
            StateError: an older or equal epoch with other contents, so that a late message cannot undo a newer one.
        """
        if announced.epoch > self.epoch:
            return announced
        if replace(announced, epoch=self.epoch) != self:
            what = f"epoch {announced.epoch} is not newer than {self.epoch} and differs from it"
            raise StateError(f"{what}; nothing was changed")
        return self


# --- engines, sessions --------------------------------------------------------------------------------------


class Engine:
    """One engine as it was announced, with its load and its present state. Policies read it and change nothing."""

    down = False
    """Whether the breaker is open: a connection was refused, or an answer reported a dead core."""
    left = False
    """Whether it has left the set; its sessions then have no home."""
    outstanding = 0
    """Requests sent and not answered in full."""
    outstanding_tokens = 0
    """Prompt and expected tokens of those requests."""
    resident_tokens = 0
    """Tokens of context that live there: of sessions that count, and those that requests in flight add (all tokens of a
    request without a session)."""
    sessions = 0
    """Sessions that live there."""
    kv_capacity = 0
    """Tokens that its KV cache holds; 0: unknown."""
    fillings = 0
    """Times that its cache was emptied."""
    _kv_reported = -1.0
    _kv_reported_at = 0
    """Tokens in flight when it reported its KV usage."""

    def __init__(self, entry: EngineEntry) -> None:
        self.name = entry.name
        self.announce(entry)

    def announce(self, entry: EngineEntry) -> None:
        self.entry = entry
        self.weight_version = entry.weight_version

    @property
    def serves(self) -> bool:
        """Whether requests may go there, at least those of its own sessions."""
        return self.entry.eligible and not self.down and not self.left

    @property
    def takes_new(self) -> bool:
        """Whether any request may go there."""
        return self.serves and not self.entry.draining

    @property
    def kv_usage(self) -> float:
        """Fraction of its KV cache in use: the last report and tokens placed since, so it may exceed 1; -1: unknown."""
        placed = self.outstanding_tokens - self._kv_reported_at
        if placed > 0 and self.kv_capacity and self._kv_reported >= 0:
            return self._kv_reported + placed / self.kv_capacity
        return self._kv_reported

    def report_kv(self, usage: float, capacity: int) -> None:
        self._kv_reported, self.kv_capacity, self._kv_reported_at = usage, capacity, self.outstanding_tokens

    def add(self, requests: int, tokens: int, resident: int) -> None:
        """Add to the load in flight; negative values take a finished request out again."""
        self.outstanding += requests
        self.outstanding_tokens += tokens
        self.resident_tokens += resident


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
