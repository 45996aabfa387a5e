"""Placement policies: their input, their answers, and the default, `bounded-sticky`.

A policy keeps nothing between calls, changes nothing and does no I/O. `placement.Placement` remembers where sessions
live, which engines hold a prefix, and where a group's samples went. It passes them in with the request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from operator import attrgetter
from typing import NamedTuple

from penstock.rooms import plugged_in
from penstock.router.membership import Engine
from penstock.router_settings import RouterConfig


@dataclass(eq=False)
class Hints:
    """The headers of a request that matter to its placement."""

    session_id: str | None = None
    """`X-Session-ID`: the conversation of which this request is a turn."""
    group_id: str | None = None
    """`X-Group-ID`: the group of samples to which this request belongs."""
    min_weight_version: int = 0
    """`X-Weight-Version`: the oldest weights that may answer."""
    prompt_tokens: int = 0
    """`X-Prompt-Tokens`; 0: not given."""
    expected_tokens: int = 0
    """`X-Expected-Tokens`: most tokens that the answer may add, all samples together; 0: not given."""
    prefix_hashes: bytes | None = None
    """`X-Prefix-Hashes`, unparsed."""
    counted_tokens: int = 0
    """Tokens that count as resident on the engine while the request is in flight; the placement sets it."""


class RequestView(NamedTuple):
    """A request as policies see it."""

    session_id: str | None = None
    home: Engine | None = None
    """The engine where this session lives; None if it is new, or that engine may not serve this request."""
    home_tokens: int = 0
    """Tokens of this session's context that are resident there."""
    known: bool = False
    """Whether the session has had a turn, even on a lost engine; a known session never waits."""
    prompt_tokens: int = 0
    expected_tokens: int = 0
    """`X-Expected-Tokens` times the fraction of it that answers usually add."""
    prefixes: Mapping[str, int] = {}
    """Names of engines that hold a prefix of this prompt, with its tokens; some may not be allowed to serve it."""
    group: Mapping[str, int] = {}
    """Placements of the other samples of `X-Group-ID`, by the engine's name."""
    placed: int = 0
    """Requests placed so far by this process, for rotation."""


class Defer(Enum):
    """Answers of a policy other than an engine."""

    PASS = "pass"  # noqa: S105 - no password
    """No opinion: ask the next policy of the list."""
    WAIT = "wait"
    """Hold the request until an engine has room. Only a request that opens a session gets this answer."""


class Policy:
    """Picks one of the engines that may serve a request. One object serves all requests."""

    sticky = False
    """Whether a session stays on its engine while that drains."""
    reads_prefixes = False
    """Whether the policy reads `prefixes` of requests."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config

    def choose(self, engines: Sequence[Engine], request: RequestView) -> Engine | Defer:
        """Return one of `engines`, at least one, which may serve this request; or a `Defer`."""
        raise NotImplementedError


def rendezvous(key: bytes, engines: Sequence[Engine]) -> Engine:
    """Choose by highest random weight (Thaler and Ravishankar 1998)."""
    # If an engine is lost, only its own keys move.
    return max(engines, key=lambda engine: blake2b(key + engine.name.encode(), digest_size=8).digest())


def breaking_tie(engines: Sequence[Engine], session_id: str | None, placed: int) -> Engine:
    """Choose among equals: by rendezvous for a session, else in turn."""
    if len(engines) == 1:
        return engines[0]
    if session_id is not None:
        return rendezvous(session_id.encode(), engines)  # a restarted router chooses the same again
    return engines[placed % len(engines)]


Measure = Callable[[Engine], int]
OUTSTANDING: Measure = attrgetter("outstanding")
RESIDENT_TOKENS: Measure = attrgetter("resident_tokens")


def lowest(engines: Sequence[Engine], measure: Measure) -> Sequence[Engine]:
    """Return the engines, at least one, with the lowest value of `measure`."""
    values = list(map(measure, engines))
    least = min(values)
    if values.count(least) == 1:
        return (engines[values.index(least)],)
    return [engine for engine, value in zip(engines, values, strict=True) if value == least]


_MOVE_COST = 2.0
"""Cost of recomputing one token of context, in tokens of resident context that the session would no longer share."""
_FAR_OVER = 2.0
"""Multiple of the mean of resident tokens above which an engine is far over it."""
_SHARED_SHARE = 2
"""The shortest shared prefix that counts is the prompt's length divided by this."""


class BoundedSticky(Policy):
    """Placement bounded by resident tokens; `docs/explanation/placement.md` has the rules.

    With several processes, each knows its own sessions and load, and has its share of every KV cache and of the slack.
    A session without a home goes by rendezvous hash to an engine within the bound. So all processes send it to the same
    engine unless that is overfull.

    Bounded loads follow Mirrokni, Thorup and Zadimoghaddam (2018), with tokens as balls, since contexts differ by
    orders of magnitude.
    """

    sticky = True
    reads_prefixes = True

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._processes = config.workers
        self._balance_factor = config.balance_factor
        self._slack = config.slack_tokens / config.workers

    def choose(self, engines: Sequence[Engine], request: RequestView) -> Engine | Defer:
        mean = sum(map(RESIDENT_TOKENS, engines)) / len(engines)
        bound = self._balance_factor * mean + self._slack
        home = request.home
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
        idlest = lowest(able, RESIDENT_TOKENS)  # it is within the bound if any is
        if len(idlest) > 1:
            idlest = lowest(idlest, OUTSTANDING)
        return breaking_tie(idlest, request.session_id, request.placed)

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
        target = lowest(lowest(able, RESIDENT_TOKENS), OUTSTANDING)[0]
        gain = home.resident_tokens - (target.resident_tokens + context)
        return target if gain > max(cost, self._slack) else home


class Policies:
    """Policies in order: one without an opinion passes to the next. The last, `requests`, always has one."""

    def __init__(self, config: RouterConfig) -> None:
        names = dict.fromkeys([*config.policy.split(","), "requests"])
        self._policies: list[tuple[str, Policy]] = [(name, plugged_in(f"policy.{name}")(config)) for name in names]
        self.sticky = any(policy.sticky for _, policy in self._policies)
        self.reads_prefixes = any(policy.reads_prefixes for _, policy in self._policies)

    def ask(self, engines: Sequence[Engine], request: RequestView) -> tuple[str, Engine | Defer]:
        for name, policy in self._policies:
            answer = policy.choose(engines, request)
            if answer is not Defer.PASS:
                return name, answer
        raise AssertionError("`requests` has an opinion")
