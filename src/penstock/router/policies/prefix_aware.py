"""Where the beginning of the prompt is already."""

from __future__ import annotations

from penstock.router.policies.base import Defer, EngineView, PolicyOptions, ReadsPrefixes, RequestView, Snapshot


class PrefixAware:
    """The engine with the longest resident prefix of at least `prefix_length` tokens, unless it is overloaded.

    Overloaded: more outstanding requests than `overload_threshold` times the mean (the mean taken as one at least, or
    an idle fleet would call any engine with a request overloaded). Then the next longest is asked, and at last there
    is no opinion.
    """

    sticky = False
    reads_prefixes = ReadsPrefixes.ALWAYS

    def __init__(self, options: PolicyOptions) -> None:
        self._prefix_length = options.prefix_length
        self._overload_threshold = options.overload_threshold

    def choose(self, snapshot: Snapshot, request: RequestView) -> EngineView | Defer:
        """See `Policy`."""
        held = {h.engine: h.tokens for h in request.prefix_holders if h.tokens >= self._prefix_length}
        if not held:
            return Defer.PASS
        engines = snapshot.engines
        most = self._overload_threshold * max(1.0, sum([e.outstanding for e in engines]) / len(engines))
        able = [e for e in engines if e.name in held and e.outstanding <= most]
        return max(able, key=lambda e: (held[e.name], -e.outstanding)) if able else Defer.PASS
