"""Placement policies that are chosen by name, instead of the default or before it; see `policies.py`."""

from __future__ import annotations

from penstock.router.policies import Defer, EngineView, Policy, RequestView, Snapshot


class RoundRobin(Policy):
    """One after another, sessions or not."""

    def choose(self, snapshot: Snapshot, request: RequestView) -> EngineView:  # noqa: ARG002 - the interface
        return snapshot.engines[snapshot.placed % len(snapshot.engines)]


class KVCache(Policy):
    """Where the smallest share of the KV cache is in use; among equals, where the fewest requests are.

    An engine that has not said is left out; where none has, there is no opinion.
    """

    def choose(self, snapshot: Snapshot, request: RequestView) -> EngineView | Defer:  # noqa: ARG002 - the interface
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

    reads_prefixes = True

    def choose(self, snapshot: Snapshot, request: RequestView) -> EngineView | Defer:
        held = {h.engine: h.tokens for h in request.prefix_holders if h.tokens >= self._config.prefix_length}
        if not held:
            return Defer.PASS
        engines = snapshot.engines
        most = self._config.overload_threshold * max(1.0, sum([e.outstanding for e in engines]) / len(engines))
        able = [e for e in engines if e.name in held and e.outstanding <= most]
        return max(able, key=lambda e: (held[e.name], -e.outstanding)) if able else Defer.PASS
