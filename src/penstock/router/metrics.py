"""What the router counts: plain counters, and histograms that cost little to fill."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0,
    1000.0, 2500.0,
)  # fmt: skip
"""Upper bounds of buckets: from a cached first token to an hour of waiting for a gate."""


class Histogram:
    """Counts of values by bucket, and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value: O(log buckets)."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Metrics:
    """Plain counters, written by one event loop.

    Once nothing is in flight, `requests` is the sum of `answered`, `errors`, `cancelled` and `broken`.
    """

    def __init__(self) -> None:
        self.requests = 0
        """Requests taken in: those with an acceptable head, for an engine."""
        self.answered = 0
        """Those that an engine answered in full, whatever the status."""
        self.errors: Counter[str] = Counter()
        """Those that the router answered itself, by code."""
        self.cancelled = 0
        """Those whose client went away first."""
        self.broken = 0
        """Those whose answer ended before it was complete."""
        self.rejected: Counter[str] = Counter()
        """What never became a request, by code: a bad head, a wrong key, an admin call that failed."""
        self.retries: Counter[str] = Counter()
        """Second goes by reason. `refused`: the engine took no connection; `hung_up`: it closed the connection without
        an answer; `stale`: the same, on one that had been idle; `dead`: it answered that its core is dead."""
        self.bytes_in = 0
        self.bytes_out = 0
        """Payload towards engines, and answers towards clients, framing of bodies included."""
        self.first_byte = Histogram()
        self.duration = Histogram()
        """Of requests that an engine answered in full."""
        self.hold = Histogram()
        self.gate = Histogram()
        """Of requests that had to wait."""
