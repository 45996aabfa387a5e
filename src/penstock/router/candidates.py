"""Which engines may serve a request, before any policy is asked, and what the policy sees of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import Any, cast

from penstock.router.membership import EngineEntry
from penstock.router.memory import LoadTable, SessionTable
from penstock.router.policies import EngineView, Snapshot

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
