"""Placement policies that are chosen by name, instead of the default or before it; see `policies.py`."""

from __future__ import annotations

from penstock.router.policies import (
    OUTSTANDING,
    Defer,
    EngineView,
    Policy,
    ReadsPrefixes,
    RequestView,
    Snapshot,
    breaking_tie,
    draw,
    lowest,
    rendezvous,
)


class Random(Policy):
    """Any, with equal probability."""

    def choose(self, snapshot: Snapshot, request: RequestView) -> EngineView:  # noqa: ARG002 - the interface
        """See `Policy`."""
        return snapshot.engines[draw(self._seed, snapshot.placed, len(snapshot.engines))]


class RoundRobin(Policy):
    """One after another, sessions or not."""

    def choose(self, snapshot: Snapshot, request: RequestView) -> EngineView:  # noqa: ARG002 - the interface
        """See `Policy`."""
        return snapshot.engines[snapshot.placed % len(snapshot.engines)]


class PowerOfTwo(Policy):
    """The one with fewer outstanding requests of two random ones (Mitzenmacher 2001).

    Where figures are late, as between several routers, it does not send everything to the one engine that looked idle.
    """

    def choose(self, snapshot: Snapshot, request: RequestView) -> EngineView:  # noqa: ARG002 - the interface
        """See `Policy`."""
        engines, count = snapshot.engines, len(snapshot.engines)
        if count == 1:
            return engines[0]
        pair = draw(self._seed, snapshot.placed, count * (count - 1))  # which of the ordered pairs of two
        first, second = divmod(pair, count - 1)
        one, other = engines[first], engines[second + (second >= first)]
        return other if other.outstanding < one.outstanding else one


class StickyLeastLoaded(Policy):
    """A session stays where it is; all else goes where the fewest requests are.

    Ties: by rendezvous hash for a session, so that a restarted router finds it again on an idle fleet; by rotation
    for a request without one.
    """

    sticky = True

    def choose(self, snapshot: Snapshot, request: RequestView) -> EngineView:
        """See `Policy`."""
        if request.home is not None:
            return request.home
        return breaking_tie(lowest(snapshot.engines, OUTSTANDING), request.session_id, snapshot.placed)


class KVCache(Policy):
    """Where the smallest share of the KV cache is in use; among equals, where the fewest requests are.

    An engine that has not said is left out; where none has, there is no opinion.
    """

    def choose(self, snapshot: Snapshot, request: RequestView) -> EngineView | Defer:  # noqa: ARG002 - the interface
        """See `Policy`."""
        known = [engine for engine in snapshot.engines if engine.kv_usage >= 0]
        if not known:
            return Defer.PASS
        start = snapshot.placed % len(known)  # equals take turns
        return min(known[start:] + known[:start], key=lambda engine: (engine.kv_usage, engine.outstanding))


class PrefixAware(Policy):
    """The engine with the longest resident prefix of at least `prefix_length` tokens, unless it is overloaded.

    Overloaded: more outstanding requests than `overload_threshold` times the mean (the mean taken as one at least, or
    an idle fleet would call any engine with a request overloaded). Then the next longest is asked, and at last there
    is no opinion.
    """

    reads_prefixes = ReadsPrefixes.ALWAYS

    def choose(self, snapshot: Snapshot, request: RequestView) -> EngineView | Defer:
        """See `Policy`."""
        held = {h.engine: h.tokens for h in request.prefix_holders if h.tokens >= self._config.prefix_length}
        if not held:
            return Defer.PASS
        engines = snapshot.engines
        most = self._config.overload_threshold * max(1.0, sum([e.outstanding for e in engines]) / len(engines))
        able = [e for e in engines if e.name in held and e.outstanding <= most]
        return max(able, key=lambda e: (held[e.name], -e.outstanding)) if able else Defer.PASS


class ConsistentHash(Policy):
    """Rendezvous hash of the session; without one, of the prompt's beginning; without either, a random engine.

    Routers agree without talking to each other, and nothing need be remembered. The price is load: 64 sessions on 8
    engines give the fullest 1.55 times the mean.
    """

    sticky = True
    reads_prefixes = ReadsPrefixes.OPENING

    def choose(self, snapshot: Snapshot, request: RequestView) -> EngineView:
        """See `Policy`."""
        if request.session_id is not None:
            return rendezvous(request.session_id.encode(), snapshot.engines)
        if request.prefix is not None:
            return rendezvous(request.prefix, snapshot.engines)
        return snapshot.engines[draw(self._seed, snapshot.placed, len(snapshot.engines))]
