"""By what engines say of their KV cache."""

from __future__ import annotations

from penstock.router.policies.base import Defer, EngineView, PolicyOptions, ReadsPrefixes, RequestView, Snapshot


class KVCache:
    """Where the smallest share of the KV cache is in use; among equals, where the fewest requests are.

    An engine that has not said is left out; where none has, there is no opinion.
    """

    sticky = False
    reads_prefixes = ReadsPrefixes.NEVER

    def __init__(self, options: PolicyOptions) -> None:
        """Nothing can be set."""

    def choose(self, snapshot: Snapshot, request: RequestView) -> EngineView | Defer:  # noqa: ARG002 - the interface
        """See `Policy`."""
        known = [engine for engine in snapshot.engines if engine.kv_usage >= 0]
        if not known:
            return Defer.PASS
        start = snapshot.placed % len(known)  # equals take turns
        return min(known[start:] + known[:start], key=lambda engine: (engine.kv_usage, engine.outstanding))
