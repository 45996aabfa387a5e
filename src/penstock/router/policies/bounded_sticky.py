"""Sessions stay, new ones go where the least context lives: the default."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.router.policies.base import (
    OUTSTANDING,
    RESIDENT_TOKENS,
    Defer,
    EngineView,
    PolicyOptions,
    ReadsPrefixes,
    RequestView,
    Snapshot,
    breaking_tie,
    lowest,
    rendezvous,
)

_MOVE_COST = 2.0
"""What computing one token of context anew weighs against one token less of resident context around the session."""
_FAR_OVER = 2.0
"""Times the mean of resident tokens."""
_SHARED_SHARE = 2
"""A shared prefix counts where it is at least one part in so many of the prompt."""


class BoundedSticky:
    """Placement bounded by resident tokens.

    - A new session, or a request without one, goes to the engine with the least resident tokens, then the fewest
      requests, among those whose resident tokens are at most `balance_factor` times the mean and `slack_tokens`.
      Of these the samples of one group take the engines with the fewest of their group, as long as that costs no more
      than `slack_tokens` of balance; and where some hold a prefix of `prefix_length` tokens and half the prompt, only
      they count.
    - A later turn stays, unless its engine is over that bound and more, and moving clearly beats staying.
    - A new session waits while no engine has room for it: while resident and expected tokens would exceed
      `kv_admission` of the KV cache. An engine where nothing is resident always has room, so nothing waits for ever.

    Where several processes place, each knows its own sessions and load, and has its part of every KV cache and of the
    slack. A session without a home goes by rendezvous hash to an engine within the bound, so that all processes send it
    to the same one unless that is overfull.

    Bounded loads are those of Mirrokni, Thorup and Zadimoghaddam (2018), with tokens for balls: contexts of sessions
    differ by orders of magnitude.
    """

    sticky = True
    reads_prefixes = ReadsPrefixes.OPENING

    def __init__(self, options: PolicyOptions) -> None:
        self._prefix_length = options.prefix_length
        self._processes = options.processes
        self._kv_admission = options.kv_admission
        self._balance_factor = options.balance_factor
        self._slack = options.slack_tokens / options.processes

    def choose(self, snapshot: Snapshot, request: RequestView) -> EngineView | Defer:
        """See `Policy`."""
        bound = self._balance_factor * snapshot.resident_tokens / len(snapshot.engines) + self._slack
        home = request.home
        if home is not None:
            return home if home.resident_tokens <= bound else self._stay_or_move(home, snapshot, request)
        able: Sequence[EngineView] = snapshot.engines
        if request.session_id is not None and not request.known:
            able = [engine for engine in able if self._has_room(engine, request)]
            if not able:
                return Defer.WAIT
        if self._processes > 1 and request.session_id is not None:
            within = [engine for engine in able if engine.resident_tokens <= bound]
            return rendezvous(request.session_id.encode(), within or able)
        if request.group or request.prefix_holders:
            able = self._preferred([engine for engine in able if engine.resident_tokens <= bound] or able, request)
        idlest = lowest(able, RESIDENT_TOKENS)  # it is within the bound if any is
        if len(idlest) > 1:
            idlest = lowest(idlest, OUTSTANDING)
        return breaking_tie(idlest, request.session_id, snapshot.placed)

    def _has_room(self, engine: EngineView, request: RequestView) -> bool:
        if not engine.kv_capacity or not engine.resident_tokens:
            return True
        context = engine.resident_tokens + request.prompt_tokens + request.expected_tokens
        return context <= self._kv_admission * engine.kv_capacity / self._processes

    def _preferred(self, engines: Sequence[EngineView], request: RequestView) -> Sequence[EngineView]:
        """Of the group's samples the fewest, and of these engines those that hold the prompt's beginning."""
        if request.group:
            placed = dict(request.group)
            near = min(map(RESIDENT_TOKENS, engines)) + self._slack
            engines = [engine for engine in engines if engine.resident_tokens <= near]
            engines = lowest(engines, lambda engine: placed.get(engine.name, 0))
        least = max(self._prefix_length, request.prompt_tokens / _SHARED_SHARE)
        holders = {holder.engine for holder in request.prefix_holders if holder.tokens >= least}
        return [engine for engine in engines if engine.name in holders] or engines

    def _stay_or_move(self, home: EngineView, snapshot: Snapshot, request: RequestView) -> EngineView:
        """Home, or the least loaded engine where moving there clearly beats staying.

        The gain of moving is that so many resident tokens less share the engine with the session; the cost is that its
        context is computed anew, which others there wait for too. Where home holds more than its cache can, that
        context has likely been evicted, and has to be computed wherever the session goes; elsewhere only an engine far
        over the mean is left, since migration that follows every difference of load costs more than it brings (verl
        #6533).
        """
        context = max(request.home_tokens, request.prompt_tokens)
        if home.kv_capacity and home.resident_tokens > home.kv_capacity / self._processes:
            able = [engine for engine in snapshot.engines if engine is not home and self._has_room(engine, request)]
            cost = 0.0
        elif home.resident_tokens * len(snapshot.engines) > _FAR_OVER * snapshot.resident_tokens:
            able = [engine for engine in snapshot.engines if engine is not home]
            cost = _MOVE_COST * context
        else:
            return home
        if not able:
            return home
        target = lowest(lowest(able, RESIDENT_TOKENS), OUTSTANDING)[0]
        gain = home.resident_tokens - (target.resident_tokens + context)
        return target if gain > max(cost, self._slack) else home
