"""The default policy for requests with hints, policies that a user selects by name, and the last of every list."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from penstock.router.membership import Engine
from penstock.router.policies import OUTSTANDING, RESIDENT_TOKENS, Defer, Policy, RequestView, idlest_of, lowest
from penstock.router_settings import RouterConfig


def rendezvous(key: bytes, engines: Sequence[Engine]) -> Engine:
    """Choose by highest random weight (Thaler and Ravishankar 1998)."""
    # If an engine is lost, only its own keys move.
    return max(engines, key=lambda engine: blake2b(key + engine.name.encode(), digest_size=8).digest())


_MOVE_COST = 2.0
"""Cost of recomputing one token of context, in tokens of resident context that the session would no longer share."""
_FAR_OVER = 2.0
"""Multiple of the mean of resident tokens above which an engine is far over it."""
_SHARED_SHARE = 2
"""The shortest shared prefix that counts is the prompt's length divided by this."""


class HintedSticky(Policy):
    """`BoundedSticky` for requests with a session, a group or a prefix: placement bounded by resident tokens.

    With several processes, each knows its own sessions and load, and has its share of every KV cache and of the slack.
    A session without a home goes by rendezvous hash to an engine within the bound. So all processes send it to the same
    engine unless that is overfull.

    Bounded loads follow Mirrokni, Thorup and Zadimoghaddam (2018), with tokens as balls, since contexts differ by
    orders of magnitude.
    """

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._processes = config.workers
        self._balance_factor = config.balance_factor
        self._slack = config.slack_tokens / config.workers

    def choose(self, engines: Sequence[Engine], request: RequestView) -> Engine | Defer:
        home = request.home
        if home is not None and home.resident_tokens <= self._slack:  # the bound is no lower
            return home
        mean = sum(map(RESIDENT_TOKENS, engines)) / len(engines)
        bound = self._balance_factor * mean + self._slack
        if home is not None:
            return home if home.resident_tokens <= bound else self._stay_or_move(home, engines, mean, request)
        able = engines
        if request.session_id is not None and not request.known:
            able = [engine for engine in able if self._has_room(engine, request)]
            if not able:
                return Defer.WAIT
        if self._processes > 1 and request.session_id is not None:
            within = [engine for engine in able if engine.resident_tokens <= bound]
            return rendezvous(request.session_id.encode(), within or able)
        if request.group or request.prefixes:
            able = self._preferred([engine for engine in able if engine.resident_tokens <= bound] or able, request)
        idlest = idlest_of(able)  # within the bound if any is
        if len(idlest) > 1 and request.session_id is not None:
            return rendezvous(request.session_id.encode(), idlest)  # a restarted router chooses the same again
        return idlest[request.placed % len(idlest)]

    def _has_room(self, engine: Engine, request: RequestView) -> bool:
        if not engine.kv_capacity or not engine.resident_tokens:
            return True
        context = engine.resident_tokens + request.prompt_tokens + request.expected_tokens
        return context <= self._config.kv_admission * engine.kv_capacity / self._processes

    def _preferred(self, engines: Sequence[Engine], request: RequestView) -> Sequence[Engine]:
        """Return engines with the fewest samples of the group, then those with a prefix."""
        if request.group:
            near = min(map(RESIDENT_TOKENS, engines)) + self._slack
            engines = [engine for engine in engines if engine.resident_tokens <= near]
            engines = lowest(engines, lambda engine: request.group.get(engine.name, 0))
        least = max(self._config.prefix_length, request.prompt_tokens / _SHARED_SHARE)
        return [engine for engine in engines if request.prefixes.get(engine.name, 0) >= least] or engines

    def _stay_or_move(self, home: Engine, engines: Sequence[Engine], mean: float, request: RequestView) -> Engine:
        """Return home, or the least loaded engine if moving there clearly beats staying.

        Moving costs recomputing the context, which an overfull cache has likely evicted anyway. Otherwise a session
        leaves only an engine far over the mean: moving after every difference costs more than it gains (verl #6533).
        """
        context = max(request.home_tokens, request.prompt_tokens)
        if home.kv_capacity and home.resident_tokens > home.kv_capacity / self._processes:
            able, cost = [engine for engine in engines if engine is not home and self._has_room(engine, request)], 0.0
        elif home.resident_tokens > _FAR_OVER * mean:
            able, cost = [engine for engine in engines if engine is not home], _MOVE_COST * context
        else:
            return home
        if not able:
            return home
        target = idlest_of(able)[0]
        gain = home.resident_tokens - (target.resident_tokens + context)
        return target if gain > max(cost, self._slack) else home


class Requests(Policy):
    """Takes the engine with the fewest outstanding requests, equals in turn. Every list of policies ends with it."""

    def choose(self, engines: Sequence[Engine], request: RequestView) -> Engine:
        idlest = lowest(engines, OUTSTANDING)
        return idlest[request.placed % len(idlest)]


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
