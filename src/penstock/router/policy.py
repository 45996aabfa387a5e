"""Which engine serves a request: pure functions of a frozen snapshot and of what the request's headers say.

Two layers: `candidates` leaves the engines that may serve the request at all, a policy picks one of them. Policies
keep nothing between calls and do no I/O; the home of a session is looked up by the caller and comes with the request.
The values are named tuples and not dataclasses: they are made for every request, in a quarter of the time.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from penstock.errors import ConfigError


class EngineView(NamedTuple):
    """What a policy sees of an engine."""

    name: str
    eligible: bool = True
    """Announced as eligible by the fleet, and not known to be down."""
    weight_version: int = 0
    outstanding: int = 0
    """Requests sent and not answered in full."""


class RequestInfo(NamedTuple):
    """What a policy sees of a request."""

    session_id: str | None = None
    """Header text of `X-Session-ID`; an integer id and its decimal text are one session."""
    min_weight_version: int = 0
    home: str | None = None
    """Engine that served this session last."""
    tried: frozenset[str] = frozenset()
    """Engines that took this request and broke it."""


class Snapshot(NamedTuple):
    """The engines at one moment."""

    engines: tuple[EngineView, ...]
    placed: int = 0
    """Requests placed so far; what rotates."""


class Policy(Protocol):
    """Picks one of the engines that may serve a request."""

    def choose(self, snapshot: Snapshot, request: RequestInfo) -> EngineView:
        """Choose among `snapshot.engines`, of which there is at least one and each may serve the request."""
        ...


def candidates(engines: Sequence[EngineView], request: RequestInfo) -> tuple[EngineView, ...]:
    """Engines that may serve the request, those it was already tried on included."""
    wanted = request.min_weight_version
    return tuple([e for e in engines if e.eligible and e.weight_version >= wanted])


def rendezvous(session_id: str, engines: Sequence[EngineView]) -> EngineView:
    """Highest random weight hashing (Thaler and Ravishankar 1998): losing an engine moves only its own sessions.

    blake2b, since Python's own hash is salted anew in every process.
    """
    key = hashlib.blake2b(session_id.encode()).digest()

    def weight(engine: EngineView) -> bytes:
        return hashlib.blake2b(engine.name.encode(), key=key, digest_size=8).digest()

    return max(engines, key=weight)


def least_outstanding(engines: Sequence[EngineView]) -> list[EngineView]:
    """The engines with the fewest outstanding requests."""
    fewest = min([e.outstanding for e in engines])
    return [e for e in engines if e.outstanding == fewest]


class StickyLeastLoaded:
    """A session stays where it is; a new one, and a request without one, goes where the fewest requests are.

    Ties: by rendezvous hash for a session, so that a restarted router finds it again on an idle fleet; by rotation
    for a request without one.
    """

    def choose(self, snapshot: Snapshot, request: RequestInfo) -> EngineView:
        """See `Policy`."""
        if request.home is not None:
            for engine in snapshot.engines:
                if engine.name == request.home:
                    return engine
        idlest = least_outstanding(snapshot.engines)
        if len(idlest) == 1:
            return idlest[0]
        if request.session_id is not None:
            return rendezvous(request.session_id, idlest)
        return idlest[snapshot.placed % len(idlest)]


class RoundRobin:
    """One after another, sessions or not."""

    def choose(self, snapshot: Snapshot, request: RequestInfo) -> EngineView:  # noqa: ARG002 - the interface
        """See `Policy`."""
        return snapshot.engines[snapshot.placed % len(snapshot.engines)]


class Random:
    """Any, with equal probability. `seed` makes a run repeatable."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def choose(self, snapshot: Snapshot, request: RequestInfo) -> EngineView:  # noqa: ARG002 - the interface
        """See `Policy`."""
        return self._random.choice(snapshot.engines)


POLICIES: Mapping[str, Callable[[], Policy]] = {
    "bounded-sticky": StickyLeastLoaded,
    "sticky-least-loaded": StickyLeastLoaded,
    "round-robin": RoundRobin,
    "random": Random,
}


def make_policy(name: str) -> Policy:
    """The policy of that name.

    Raises:
        ConfigError: for a name that is not in `POLICIES`.
    """
    if name not in POLICIES:
        raise ConfigError(f"unknown routing policy {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name]()
