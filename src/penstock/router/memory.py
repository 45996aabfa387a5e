"""What placement knows: sessions, loads, groups of samples, prefixes, and which engines may serve a request."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

from penstock.router.membership import EngineEntry
from penstock.router.policies import EngineView, PrefixHolder, Snapshot


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

    def drop(self, session_id: str) -> bool:
        """Forget it; False: it was not known."""
        record = self._counted.pop(session_id, None)
        if record is not None:
            self._discount(record)
        else:
            record = self._idle.pop(session_id, None)
            if record is None:
                return False
        if record.engine is not None:
            self._counts[record.engine][0] -= 1
        return True

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


_NOTHING = (0, 0, 0)


class LoadTable:
    """The load of each engine, added up as requests come and go.

    A load is three numbers: requests in flight, their prompt and expected tokens, and of those tokens the ones that no
    session's context has yet (all of a request without a session, else what it may add).
    """

    def __init__(self) -> None:
        self._loads: dict[str, tuple[int, int, int]] = {}

    def add(self, engine: str, requests: int, tokens: int, resident: int) -> None:
        """Change the load of one engine by so much; what was added is taken back in the end."""
        r, t, c = self._loads.get(engine, _NOTHING)
        if r + requests:
            self._loads[engine] = (r + requests, t + tokens, c + resident)
        else:  # nothing in flight: engines that left leave nothing behind
            self._loads.pop(engine, None)

    def of(self, engine: str) -> tuple[int, int, int]:
        """The load of one engine; zeros for one never heard of."""
        return self._loads.get(engine, _NOTHING)


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


class Prefixes:
    """Hashes of beginnings to engines; where it is full, the least recently used hash is forgotten.

    What an engine has seen, it may have evicted since: this is a guess at its cache, on the side of too much.

    Args:
        capacity: most hashes remembered; a prompt has up to 32.
    """

    def __init__(self, capacity: int = 131_072) -> None:
        self._capacity = capacity
        self._holders: OrderedDict[bytes, dict[int, None]] = OrderedDict()
        self._lives: dict[str, int] = {}
        self._names: dict[int, str] = {}
        """A cache's life to its engine: a new number when it is emptied, so that its old entries count no more."""
        self._born = 0

    def __len__(self) -> int:
        return len(self._holders)

    def note(self, engine: str, boundaries: Sequence[tuple[int, bytes]]) -> None:
        """`engine` gets a prompt with these boundaries."""
        life = self._lives.get(engine)
        if life is None:
            self._born = life = self._born + 1
            self._lives[engine] = life
            self._names[life] = engine
        holders = self._holders
        for _, digest in boundaries:
            lives = holders.get(digest)
            if lives is None:
                holders[digest] = {life: None}
            else:
                if life not in lives:
                    if len(lives) > len(self._names):  # most of them are of emptied caches
                        lives = holders[digest] = {one: None for one in lives if one in self._names}
                    lives[life] = None
                holders.move_to_end(digest)
        while len(holders) > self._capacity:
            holders.popitem(last=False)

    def holders(self, boundaries: Sequence[tuple[int, bytes]]) -> tuple[PrefixHolder, ...]:
        """Engines that have seen one of these boundaries, each with its longest; the longest first."""
        found: dict[str, PrefixHolder] = {}
        for tokens, digest in reversed(boundaries):
            for life in self._holders.get(digest, ()):
                name = self._names.get(life)
                if name is not None and name not in found:
                    found[name] = PrefixHolder(name, tokens)
            if len(found) == len(self._names):
                break
        return tuple(found.values())

    def forget_engine(self, engine: str) -> None:
        """Its cache was emptied, or it has left."""
        life = self._lives.pop(engine, None)
        if life is not None:
            del self._names[life]


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


# --- Which engines may serve a request, and what a policy sees of them -----------------------------------------------


new_tuple = cast("Any", tuple).__new__
"""Of a named tuple, at half the price of calling its class."""

MOST_TOKENS = 1 << 20
"""Most that a request's headers can claim where nobody says what an engine holds: the longest contexts of today."""


class Candidate:
    """One engine as it was announced, and what has become of it since."""

    def __init__(self, entry: EngineEntry) -> None:
        self.name = entry.name
        self.down = False
        self.gated = False
        self.kv_usage = -1.0
        self.kv_capacity = 0
        self.kv_reported_at = 0
        """Tokens in flight there when it reported its KV usage."""
        self.place = -1
        """Its place among the engines that take new requests; -1: it is none of them."""
        self.view = EngineView(entry.name)
        self.announce(entry)

    def announce(self, entry: EngineEntry) -> None:
        """Take over what the fleet says of it now."""
        self.entry = entry
        self.weight_version = entry.weight_version
        self.adapters = None if entry.adapters is None else frozenset(entry.adapters)

    @property
    def serves(self) -> bool:
        """Whether requests may go there, those of its own sessions at least."""
        return self.entry.eligible and not self.down

    @property
    def most_tokens(self) -> int:
        """Most tokens that one sequence can have there."""
        known = (self.entry.max_model_len, self.kv_capacity)
        return min([tokens for tokens in known if tokens], default=MOST_TOKENS)

    def has(self, min_weight_version: int, adapter: str | None) -> bool:
        """Whether it has what a request asks for."""
        return self.weight_version >= min_weight_version and (
            adapter is None or self.adapters is None or adapter in self.adapters
        )


class Candidates:
    """The engines of the set, with views for policies that are made anew only where something changed."""

    def __init__(self, sessions: SessionTable, loads: LoadTable) -> None:
        self._load, self._session_counts = loads.of, sessions.counts
        self.engines: dict[str, Candidate] = {}
        """By name; the same object for good."""
        self._open: list[Candidate] = []
        """Those that take new requests."""
        self._views: list[EngineView] = []
        """Of `_open`, in its order; those of `_changed` are out of date."""
        self._changed: set[Candidate] = set()
        self._engines: tuple[EngineView, ...] = ()
        """`_views` as they were last brought up to date."""
        self._resident = 0
        """Resident tokens of all of them together."""
        self._least_version = 0
        self._versions: list[int] = []
        """Weight versions of `_open`, each once, the oldest first."""
        self._adapters_differ = False
        self._adapters: set[str] = set()
        """Names that an engine of `_open` lists."""
        self.most_tokens = MOST_TOKENS
        """Most tokens that one sequence can have on any engine of the set."""

    def set(self, entries: Sequence[EngineEntry]) -> tuple[list[str], list[str]]:
        """Take over a full set.

        An engine with another URL or rank than before is another engine, even under its old name.

        Returns:
            Names of engines that left, and of those whose weights have changed.
        """
        before = dict(self.engines)
        self.engines.clear()
        updated: list[str] = []
        for entry in entries:
            known = before.get(entry.name)
            if known is not None and known.entry.place == entry.place:
                del before[entry.name]
                if known.entry.weight_version != entry.weight_version:
                    updated.append(entry.name)
                known.down = False  # the fleet, which announces it, knows better
                known.announce(entry)
                self.engines[entry.name] = known
            else:
                self.engines[entry.name] = Candidate(entry)
        self.arrange()
        return list(before), updated

    def arrange(self) -> None:
        """Something changed in which engines take new requests."""
        self._open = []
        for engine in self.engines.values():
            takes_new = engine.serves and not engine.entry.draining and not engine.gated
            engine.place = len(self._open) if takes_new else -1
            if takes_new:
                self._open.append(engine)
        self.most_tokens = max([engine.most_tokens for engine in self.engines.values()], default=MOST_TOKENS)
        self._views = [engine.view for engine in self._open]
        self._versions = sorted({engine.weight_version for engine in self._open})
        self._least_version = self._versions[0] if self._versions else 0
        listed = [engine.adapters for engine in self._open if engine.adapters is not None]
        self._adapters_differ, self._adapters = bool(listed), set().union(*listed)
        self._engines = tuple(self._views)
        self._resident = sum([view.resident_tokens for view in self._views])
        self._changed = set(self.engines.values())  # and none that has left

    def changed(self, name: str) -> None:
        """Figures of an engine have changed."""
        engine = self.engines.get(name)
        if engine is not None:
            self._changed.add(engine)

    def all_changed(self) -> None:
        """Figures of every engine may have changed."""
        self._changed.update(self.engines.values())

    def refresh(self) -> None:
        """Bring every view up to date."""
        if not self._changed:
            return
        views, load, session_counts = self._views, self._load, self._session_counts
        for engine in self._changed:
            name = engine.name
            requests, tokens, resident = load(name)
            resident += session_counts(name)[1]
            usage, capacity = engine.kv_usage, engine.kv_capacity
            if tokens > engine.kv_reported_at and capacity and usage >= 0:
                usage += (tokens - engine.kv_reported_at) / capacity
            place = engine.place
            if place >= 0:
                self._resident += resident - engine.view.resident_tokens
            version = engine.weight_version
            view = engine.view = new_tuple(EngineView, (name, version, requests, tokens, resident, usage, capacity))
            if place >= 0:
                views[place] = view
        self._changed.clear()
        self._engines = tuple(views)

    def snapshot(
        self, min_weight_version: int, adapter: str | None, tried: Collection[str], placed: int
    ) -> Snapshot | None:
        """The engines that may serve a new request; None: there is none."""
        self.refresh()
        if min_weight_version > self._least_version or tried or (adapter is not None and self._adapters_differ):
            able = [e.view for e in self._open if e.has(min_weight_version, adapter) and e.name not in tried]
            return Snapshot.of(able, placed) if able else None
        return new_tuple(Snapshot, (self._engines, placed, self._resident)) if self._engines else None

    def needs(self, min_weight_version: int, adapter: str | None) -> tuple[int, str | None]:
        """What a request asks for, as far as engines differ in it: those with equal needs can go to the same engines.

        So there are no more of them than versions times adapters that engines have, whatever names clients invent.
        """
        place = bisect_left(self._versions, min_weight_version)
        version = 0 if not place else self._versions[place] if place < len(self._versions) else -1
        if adapter not in self._adapters:  # engines that list none may serve it
            adapter = "" if adapter is not None and self._adapters_differ else None
        return version, adapter

    def gated(self, min_weight_version: int, adapter: str | None, tried: Collection[str]) -> bool:
        """Whether an engine could serve a new request if its gate were open."""
        return any(
            e.gated and e.serves and not e.entry.draining and e.has(min_weight_version, adapter) and e.name not in tried
            for e in self.engines.values()
        )
