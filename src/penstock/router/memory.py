"""What the router remembers: sessions, loads, groups of samples, prefixes, how long sessions pause, and its counts."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.router.policies import PrefixHolder


@dataclass(slots=True)
class Session:
    """What is known of one session."""

    engine: str | None
    """Where it lives; None: that engine has left, and its context with it."""
    tokens: int
    """Of its context, as its last request said."""
    used: float
    """When a turn of it last began or ended, in seconds by the caller's clock."""


class SessionTable:
    """Sessions and their homes. Where it is full, the least recently used session is forgotten.

    A session that was not used for a while keeps its home but counts no more: see `expire`.

    Args:
        capacity: most sessions remembered; one that is forgotten is placed anew at its next turn.
    """

    def __init__(self, capacity: int = 262_144) -> None:
        self._capacity = capacity
        self._counted: OrderedDict[str, Session] = OrderedDict()
        self._idle: OrderedDict[str, Session] = OrderedDict()
        """Those that count no more. In both the least recently used comes first."""
        self._counts: dict[str, list[int]] = {}
        """Sessions and counted tokens of each engine."""

    def __len__(self) -> int:
        return len(self._counted) + len(self._idle)

    def get(self, session_id: str) -> Session | None:
        """What is known of it; None: nothing. Not to be changed by the caller."""
        return self._counted.get(session_id) or self._idle.get(session_id)

    def record(self, session_id: str, engine: str, tokens: int, now: float) -> None:
        """Note that it lives on `engine` with a context of `tokens`; `now` in seconds."""
        record = self._counted.get(session_id)
        if record is not None and record.engine == engine:  # a later turn that stays
            self._counts[engine][1] += tokens - record.tokens
            record.tokens = tokens
            record.used = now
            self._counted.move_to_end(session_id)
            return
        self.drop(session_id)
        if len(self) >= self._capacity:
            self.drop(next(iter(self._idle or self._counted)))
        counts = self._counts.setdefault(engine, [0, 0])
        counts[0] += 1
        counts[1] += tokens
        self._counted[session_id] = Session(engine, tokens, now)

    def touch(self, session_id: str, now: float) -> None:
        """It is in use."""
        record = self._counted.get(session_id)
        if record is not None:
            record.used = now
            self._counted.move_to_end(session_id)

    def drop(self, session_id: str) -> Session | None:
        """Forget it; returns what was known."""
        record = self._counted.pop(session_id, None)
        if record is not None:
            self._discount(record)
        else:
            record = self._idle.pop(session_id, None)
        if record is not None and record.engine is not None:
            self._counts[record.engine][0] -= 1
        return record

    def forget_engine(self, engine: str) -> None:
        """An engine has left: its sessions have no home, but are known. Takes time with the number of all sessions."""
        for sessions in (self._counted, self._idle):
            for record in sessions.values():
                if record.engine == engine:
                    record.engine, record.tokens = None, 0
        self._counts.pop(engine, None)

    def expire(self, *, idle_before: float, gone_before: float) -> int:
        """Time passes.

        Args:
            idle_before: sessions not used since count as resident no longer.
            gone_before: sessions not used since are forgotten.

        Returns:
            How many ceased to count.
        """
        ceased = 0
        while self._counted:
            session_id, record = next(iter(self._counted.items()))
            if record.used >= idle_before:
                break
            del self._counted[session_id]
            self._discount(record)
            self._idle[session_id] = record
            ceased += 1
        while self._idle:
            session_id, record = next(iter(self._idle.items()))
            if record.used >= gone_before:
                break
            self.drop(session_id)
        return ceased

    def counts(self, engine: str) -> tuple[int, int]:
        """Sessions that live there, and tokens of those that count."""
        counts = self._counts.get(engine)
        return (0, 0) if counts is None else (counts[0], counts[1])

    def _discount(self, record: Session) -> None:
        if record.engine is not None:
            self._counts[record.engine][1] -= record.tokens


class Load:
    """What is in flight on one engine, added up as requests come and go."""

    requests = tokens = resident = 0
    """The second: their prompt and expected tokens. The third: those of them that no session's context has yet (all of
    a request without a session, else what it may add)."""

    def add(self, requests: int, tokens: int, resident: int) -> None:
        """Change it by so much; what was added is taken back in the end."""
        self.requests += requests
        self.tokens += tokens
        self.resident += resident


class Groups:
    """Group id to engines with the number of its samples; where it is full, the least recently used is forgotten."""

    def __init__(self, capacity: int = 16_384) -> None:
        self._capacity = capacity
        self._placed: OrderedDict[str, dict[str, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._placed)

    def placed(self, group_id: str) -> tuple[tuple[str, int], ...]:
        """Engines and how many of the group's samples each got."""
        return tuple(self._placed.get(group_id, {}).items())

    def note(self, group_id: str, engine: str) -> None:
        """One more of its samples goes to `engine`."""
        engines = self._placed.get(group_id)
        if engines is None:
            if len(self._placed) >= self._capacity:
                self._placed.popitem(last=False)
            engines = self._placed[group_id] = {}
        else:
            self._placed.move_to_end(group_id)
        engines[engine] = engines.get(engine, 0) + 1


class _Cache:
    """The cache of an engine from when it is empty until it is emptied again."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.emptied = False


class Prefixes:
    """Hashes of beginnings to engines; where it is full, the least recently used hash is forgotten.

    What an engine has seen, it may have evicted since: this is a guess at its cache, on the side of too much.

    Args:
        capacity: most hashes remembered; a prompt has up to 32.
    """

    def __init__(self, capacity: int = 131_072) -> None:
        self._capacity = capacity
        self._holders: OrderedDict[bytes, dict[_Cache, None]] = OrderedDict()
        self._caches: dict[str, _Cache] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def note(self, engine: str, boundaries: Sequence[tuple[int, bytes]]) -> None:
        """`engine` gets a prompt with these boundaries."""
        cache = self._caches.get(engine)
        if cache is None:
            cache = self._caches[engine] = _Cache(engine)
        holders = self._holders
        for _, digest in boundaries:
            caches = holders.setdefault(digest, {})
            if cache not in caches:
                if len(caches) > len(self._caches):  # most of them have been emptied
                    caches = holders[digest] = {one: None for one in caches if not one.emptied}
                caches[cache] = None
            holders.move_to_end(digest)
        while len(holders) > self._capacity:
            holders.popitem(last=False)

    def holders(self, boundaries: Sequence[tuple[int, bytes]]) -> tuple[PrefixHolder, ...]:
        """Engines that have seen one of these boundaries, each with its longest; the longest first."""
        found: dict[str, PrefixHolder] = {}
        for tokens, digest in reversed(boundaries):
            for cache in self._holders.get(digest, ()):
                if not cache.emptied and cache.engine not in found:
                    found[cache.engine] = PrefixHolder(cache.engine, tokens)
            if len(found) == len(self._caches):
                break
        return tuple(found.values())

    def forget_engine(self, engine: str) -> None:
        """Its cache was emptied, or it has left."""
        cache = self._caches.pop(engine, None)
        if cache is not None:
            cache.emptied = True


_RECENT = 1024
"""So many turns at least make a mean; those before them count half and less."""
_FIRST_TURNS = 64
"""After so many turns without a second one of any session, sessions are taken to have one turn."""
_IDLE_PAUSES = 3.0
_LEAST_IDLE_S = 3.0


class SessionStats:
    """How long sessions pause between two turns, and how much of what a turn may add it does add.

    Clients say the most that an answer may add, often ten times what it adds, and do not say when a conversation is
    over. Both are needed to know how much of a KV cache is taken.
    """

    def __init__(self) -> None:
        self.ended = 0
        """Turns that have ended."""
        self._returns = self._added = self._expected = 0
        self._paused_s = 0.0

    def came_back(self, paused_s: float, added: int, expected: int) -> None:
        """A session begins another turn.

        Args:
            paused_s: seconds since its last one.
            added: tokens that its context is longer; tool output counts too, which the next turn brings along.
            expected: most that an answer of it may add.
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
        """Part of the expected tokens that a turn adds, 0 to 1.

        All, as long as that is not known. Nothing, where sessions do not come back: none of them then loses by it if
        engines are fuller than they can hold, and each engine's own queue serves.
        """
        if self._expected:
            return self._added / self._expected
        return 1.0 if self._returns or self.ended < _FIRST_TURNS else 0.0

    @property
    def idle_s(self) -> float:
        """A session that has paused for so long will rather not come back."""
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
