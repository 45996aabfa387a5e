"""Placement policies that a user selects by name, instead of the default or before it, and the last of every list."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.router.membership import Engine
from penstock.router.policies import OUTSTANDING, Defer, Policy, RequestView, breaking_tie, lowest


class Requests(Policy):
    """Takes the engine with the fewest outstanding requests, equals in turn. Every list of policies ends with it."""

    def choose(self, engines: Sequence[Engine], request: RequestView) -> Engine:
        return breaking_tie(lowest(engines, OUTSTANDING), None, request.placed)


class RoundRobin(Policy):
    """Takes the engines in turn, with or without sessions."""

    def choose(self, engines: Sequence[Engine], request: RequestView) -> Engine:
        return engines[request.placed % len(engines)]


class KVCache(Policy):
    """Takes the engine with the lowest KV cache usage; among equals, the one with the fewest requests.

    It ignores engines that have reported no usage. If none has reported any, it has no opinion.
    """

    def choose(self, engines: Sequence[Engine], request: RequestView) -> Engine | Defer:
        known = [engine for engine in engines if engine.kv_usage >= 0]
        if not known:
            return Defer.PASS
        start = request.placed % len(known)  # equals take turns
        return min(known[start:] + known[:start], key=lambda engine: (engine.kv_usage, engine.outstanding))


class PrefixAware(Policy):
    """Takes the engine with the longest resident prefix of at least `prefix_length` tokens, unless it is overloaded.

    An engine is overloaded above `overload_threshold` times the mean of outstanding requests. The mean counts as at
    least 1, or any request would overload an engine of an idle fleet. The next longest prefix follows; after the last
    one, the policy has no opinion.
    """

    reads_prefixes = True

    def choose(self, engines: Sequence[Engine], request: RequestView) -> Engine | Defer:
        held = {name: tokens for name, tokens in request.prefixes.items() if tokens >= self._config.prefix_length}
        if not held:
            return Defer.PASS
        most = self._config.overload_threshold * max(1.0, sum([e.outstanding for e in engines]) / len(engines))
        able = [e for e in engines if e.name in held and e.outstanding <= most]
        return max(able, key=lambda e: (held[e.name], -e.outstanding)) if able else Defer.PASS
