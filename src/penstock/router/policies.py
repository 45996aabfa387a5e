"""Placement policies: their input, their answers, and the default, `bounded-sticky`.

A policy keeps nothing between calls, changes nothing and does no I/O. `memory.Memory` remembers where sessions live,
which engines hold a prefix, and where a group's samples went. It passes them in with the request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

from penstock.rooms import plugged_in
from penstock.router.membership import Engine
from penstock.router_settings import RouterConfig


@dataclass(frozen=True, eq=False)
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


def idlest_of(engines: Sequence[Engine]) -> Sequence[Engine]:
    """Return the engines, at least one, with the fewest resident tokens, of them those with the fewest requests."""
    idlest = lowest(engines, RESIDENT_TOKENS)
    return lowest(idlest, OUTSTANDING) if len(idlest) > 1 else idlest


class BoundedSticky(Policy):
    """The default: the engine with the fewest resident tokens, within bounds for requests with hints.

    `other_policies.HintedSticky` has the latter. `docs/explanation/placement.md` has the rules.
    """

    sticky = True
    reads_prefixes = True

    @cached_property
    def _hinted(self) -> Policy:
        return plugged_in("router.hinted_sticky")(self._config)

    def choose(self, engines: Sequence[Engine], request: RequestView) -> Engine | Defer:
        if request.session_id is not None or request.group or request.prefixes:
            return self._hinted.choose(engines, request)
        idlest = idlest_of(engines)
        return idlest[request.placed % len(idlest)]


class Policies:
    """Policies in order: one without an opinion passes to the next. The last, `requests`, always has one."""

    def __init__(self, config: RouterConfig) -> None:
        names = dict.fromkeys([*config.policy.split(","), "requests"])
        self._policies: list[tuple[str, Policy]] = [(name, plugged_in(f"policy.{name}")(config)) for name in names]
        self.sticky = any(policy.sticky for _, policy in self._policies)
        self.reads_prefixes = any(policy.reads_prefixes for _, policy in self._policies)

    def ask(self, engines: Sequence[Engine], request: RequestView, chosen_by: dict[str, int]) -> Engine | Defer:
        """Return the first opinion; count an engine in `chosen_by`, under its policy's name."""
        for name, policy in self._policies:
            answer = policy.choose(engines, request)
            if isinstance(answer, Engine):  # six times as fast as to compare with a member of an Enum
                chosen_by[name] += 1
                return answer
            if answer is Defer.WAIT:
                return answer
        raise AssertionError("`requests` has an opinion")
