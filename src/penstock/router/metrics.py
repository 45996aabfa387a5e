"""Prometheus text format 0.0.4: families of samples, and histograms that cost little to fill."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0,
    1000.0, 2500.0,
)  # fmt: skip
"""Upper bounds of buckets: from a cached first token to an hour of waiting for a gate."""


class Sample(NamedTuple):
    """One line: `name + suffix {labels} value`."""

    labels: Mapping[str, str]
    value: float
    suffix: str = ""


class Family(NamedTuple):
    """One metric with all its samples."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    what: str
    """One sentence."""
    samples: Sequence[Sample]


class Histogram:
    """Counts of values by bucket, and their sum."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value: O(log buckets)."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self) -> list[Sample]:
        """Cumulative counts up to each bound, the sum and the count."""
        running = list(accumulate(self._counts))
        bounds = [f"{bound:g}" for bound in self._bounds]
        buckets = [Sample({"le": le}, n, "_bucket") for le, n in zip([*bounds, "+Inf"], running, strict=True)]
        return [*buckets, Sample({}, self._sum, "_sum"), Sample({}, running[-1], "_count")]


def render(families: Iterable[Family]) -> str:
    """The text that a Prometheus server scrapes."""
    lines: list[str] = []
    for family in families:
        lines.append(f"# HELP {family.name} {family.what}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        for labels, value, suffix in family.samples:
            text = ",".join(f'{name}="{_escaped(label)}"' for name, label in labels.items())
            lines.append(f"{family.name}{suffix}{f'{{{text}}}' if text else ''} {value:.12g}")
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


PREFIX = "penstock_router_"
"""Of every name."""


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

    def families(self) -> list[Family]:
        """These counters for Prometheus; each process has its own, and a fleet's are their sums."""

        def total(name: str, what: str, value: float) -> Family:
            return Family(f"{PREFIX}{name}_total", "counter", what, [Sample({}, value)])

        def by(label: str, name: str, what: str, values: Counter[str]) -> Family:
            samples = [Sample({label: key}, n) for key, n in sorted(values.items())]
            return Family(f"{PREFIX}{name}_total", "counter", what, samples)

        def histogram(name: str, what: str, values: Histogram) -> Family:
            return Family(f"{PREFIX}{name}_seconds", "histogram", what, values.samples())

        return [
            total("requests", "Requests taken in.", self.requests),
            total("answered", "Requests that an engine answered in full.", self.answered),
            by("code", "errors", "Requests that the router answered itself.", self.errors),
            total("cancelled", "Requests whose client went away.", self.cancelled),
            total("broken", "Answers that an engine did not complete.", self.broken),
            by("code", "rejected", "Calls that never became a request to an engine.", self.rejected),
            by("reason", "retries", "Requests sent once more before their first byte.", self.retries),
            total("request_bytes", "Bytes of request bodies.", self.bytes_in),
            total("response_bytes", "Bytes of response bodies.", self.bytes_out),
            histogram("first_byte", "From a request's head to the first byte of an engine's answer.", self.first_byte),
            histogram("request", "From a request's head to the end of its answer.", self.duration),
            histogram("hold", "Time that requests waited for an engine or for room on one.", self.hold),
            histogram("gate", "Time that requests waited at a closed gate.", self.gate),
        ]
