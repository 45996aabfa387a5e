"""Policies that look at no figures."""

from __future__ import annotations

from penstock.router.policies.base import EngineView, PolicyOptions, ReadsPrefixes, RequestView, Snapshot
from penstock.router.policies.hashing import draw


class Random:
    """Any, with equal probability."""

    sticky = False
    reads_prefixes = ReadsPrefixes.NEVER

    def __init__(self, options: PolicyOptions) -> None:
        self._seed = options.seed

    def choose(self, snapshot: Snapshot, request: RequestView) -> EngineView:  # noqa: ARG002 - the interface
        """See `Policy`."""
        return snapshot.engines[draw(self._seed, snapshot.placed, len(snapshot.engines))]


class RoundRobin:
    """One after another, sessions or not."""

    sticky = False
    reads_prefixes = ReadsPrefixes.NEVER

    def __init__(self, options: PolicyOptions) -> None:
        """Nothing can be set."""

    def choose(self, snapshot: Snapshot, request: RequestView) -> EngineView:  # noqa: ARG002 - the interface
        """See `Policy`."""
        return snapshot.engines[snapshot.placed % len(snapshot.engines)]
