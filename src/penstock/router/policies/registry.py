"""Policies by name, and lists of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from penstock.errors import ConfigError
from penstock.router.policies.base import Defer, EngineView, Policy, PolicyOptions, RequestView, Snapshot
from penstock.router.policies.bounded_sticky import BoundedSticky
from penstock.router.policies.simple import (
    ConsistentHash,
    KVCache,
    PowerOfTwo,
    PrefixAware,
    Random,
    Requests,
    RoundRobin,
    StickyLeastLoaded,
)

POLICIES: Mapping[str, Callable[[PolicyOptions], Policy]] = {
    "random": Random,
    "round-robin": RoundRobin,
    "requests": Requests,
    "kv-cache": KVCache,
    "prefix-aware": PrefixAware,
    "power-of-two": PowerOfTwo,
    "consistent-hash": ConsistentHash,
    "sticky-least-loaded": StickyLeastLoaded,
    "bounded-sticky": BoundedSticky,
}
_PASS = Defer.PASS
LAST_RESORT = "requests"
"""Asked when all others have passed."""


class Hierarchy:
    """Policies in order: who passes leaves the choice to the next one. The last never passes.

    Args:
        policies: by their names.
    """

    def __init__(self, policies: Mapping[str, Policy]) -> None:
        (self._first_name, self._first), *self._others = policies.items()
        self.sticky = any(policy.sticky for policy in policies.values())
        self.reads_prefixes = max(policy.reads_prefixes for policy in policies.values())

    def ask(self, snapshot: Snapshot, request: RequestView) -> tuple[str, EngineView | Defer]:
        """The answer, and the name of the policy that gave it."""
        answer = self._first.choose(snapshot, request)
        if answer is not _PASS:
            return self._first_name, answer
        for name, policy in self._others:
            answer = policy.choose(snapshot, request)
            if answer is not _PASS:
                return name, answer
        return "", _PASS

    def choose(self, snapshot: Snapshot, request: RequestView) -> EngineView | Defer:
        """See `Policy`."""
        return self.ask(snapshot, request)[1]


def make_policy(names: Sequence[str], options: PolicyOptions | None = None) -> Hierarchy:
    """The policies of those names, in that order, with `requests` as the last resort.

    Raises:
        ConfigError: no name, one that is not in `POLICIES`, or one that occurs twice.
    """
    if not names:
        raise ConfigError(f"no routing policy given; known: {', '.join(POLICIES)}")
    for place, name in enumerate(names):
        if name not in POLICIES:
            raise ConfigError(f"unknown routing policy {name!r}; known: {', '.join(POLICIES)}")
        if name in names[:place]:
            raise ConfigError(f"routing policy {name!r} is named twice; its second answer would be its first")
    chosen = options or PolicyOptions()
    return Hierarchy({name: POLICIES[name](chosen) for name in dict.fromkeys((*names, LAST_RESORT))})
