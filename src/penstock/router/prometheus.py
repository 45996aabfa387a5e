"""Prometheus text format 0.0.4: families of samples, and histograms that cost little to fill."""

from __future__ import annotations

from bisect import bisect_left
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
