"""Policies by how many requests each engine has."""

from __future__ import annotations

from penstock.router.policies.base import EngineView, PolicyOptions, ReadsPrefixes, RequestView, Snapshot
from penstock.router.policies.hashing import breaking_tie, draw
from penstock.router.policies.lowest import OUTSTANDING, lowest


class Requests:
    """Where the fewest requests are outstanding; ties in rotation. What every list of policies ends with."""

    sticky = False
    reads_prefixes = ReadsPrefixes.NEVER

    def __init__(self, options: PolicyOptions) -> None:
        """Nothing can be set."""

    def choose(self, snapshot: Snapshot, request: RequestView) -> EngineView:  # noqa: ARG002 - the interface
        """See `Policy`."""
        return breaking_tie(lowest(snapshot.engines, OUTSTANDING), None, snapshot.placed)


class PowerOfTwo:
    """The one with fewer outstanding requests of two random ones (Mitzenmacher 2001).

    Where figures are late, as between several routers, it does not send everything to the one engine that looked idle.
    """

    sticky = False
    reads_prefixes = ReadsPrefixes.NEVER

    def __init__(self, options: PolicyOptions) -> None:
        self._seed = options.seed

    def choose(self, snapshot: Snapshot, request: RequestView) -> EngineView:  # noqa: ARG002 - the interface
        """See `Policy`."""
        engines, count = snapshot.engines, len(snapshot.engines)
        if count == 1:
            return engines[0]
        pair = draw(self._seed, snapshot.placed, count * (count - 1))  # which of the ordered pairs of two
        first, second = divmod(pair, count - 1)
        one, other = engines[first], engines[second + (second >= first)]
        return other if other.outstanding < one.outstanding else one


class StickyLeastLoaded:
    """A session stays where it is; all else goes where the fewest requests are.

    Ties: by rendezvous hash for a session, so that a restarted router finds it again on an idle fleet; by rotation
    for a request without one.
    """

    sticky = True
    reads_prefixes = ReadsPrefixes.NEVER

    def __init__(self, options: PolicyOptions) -> None:
        """Nothing can be set."""

    def choose(self, snapshot: Snapshot, request: RequestView) -> EngineView:
        """See `Policy`."""
        if request.home is not None:
            return request.home
        return breaking_tie(lowest(snapshot.engines, OUTSTANDING), request.session_id, snapshot.placed)
