"""Prometheus text format 0.0.4: families of samples, and histograms that cost little to fill."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Protocol

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


class Ended(Protocol):
    """What is counted of a request that is over."""

    outcome: str
    """Empty: answered by an engine; `cancelled`: its client went away; `broken: ...`: an engine did not complete its
    answer; any other: the code of the error that the router answered."""
    started_at: float
    first_byte_at: float
    """When an engine's answer began, by `time.monotonic()`; 0: it did not."""
    bytes_in: int
    bytes_out: int
    hold_seconds: float
    gate_seconds: float


class Metrics:
    """Plain counters, written by one event loop.

    Once nothing is in flight, `requests` is the sum of `answered`, `errors`, `cancelled` and `broken`.
    """

    __slots__ = (
        "answered",
        "broken",
        "bytes_in",
        "bytes_out",
        "cancelled",
        "duration",
        "errors",
        "first_byte",
        "gate",
        "hold",
        "rejected",
        "requests",
        "retries",
    )

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
        """Second goes by reason. `stale`: an idle connection was closed when the request came, same engine; `refused`:
        the engine took no connection; `hung_up`: it closed the connection without an answer."""
        self.bytes_in = 0
        self.bytes_out = 0
        """Payload towards engines, and answers towards clients, framing of bodies included."""
        self.first_byte = Histogram()
        self.duration = Histogram()
        """Of requests that an engine answered in full."""
        self.hold = Histogram()
        self.gate = Histogram()
        """Of requests that had to wait."""

    def record(self, request: Ended, now: float) -> None:
        """Count a request that is over; `now` is `time.monotonic()`."""
        outcome = request.outcome
        self.bytes_in += request.bytes_in
        self.bytes_out += request.bytes_out
        if request.first_byte_at:
            self.first_byte.observe(request.first_byte_at - request.started_at)
        if not outcome:
            self.answered += 1
            self.duration.observe(now - request.started_at)
        elif outcome == "cancelled":
            self.cancelled += 1
        elif outcome.startswith("broken"):
            self.broken += 1
        else:
            self.errors[outcome] += 1
        if request.hold_seconds:
            self.hold.observe(request.hold_seconds)
        if request.gate_seconds:
            self.gate.observe(request.gate_seconds)

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


_SUMMED = ("held", "held_bytes", "sessions", "requests", "moved_sessions")
_SUMMED_BY_KEY = ("held_by", "placements")
_SAME = ("epoch", "gate_closed", "gates_closed", "policy")
"""What the owner has told each of them; they differ while one of them has not been told yet."""
_ENGINE_SUMMED = (
    "outstanding",
    "outstanding_tokens",
    "resident_tokens",
    "sessions",
    "requests",
    "breaker_openings",
    "dead_answers",
)
_ENGINE_GREATEST = ("down", "gate_closed", "kv_usage", "kv_capacity", "failure")
_GREATEST = {f"{PREFIX}gate_closed"} | {
    f"{PREFIX}engine_{name}"
    for name in ("eligible", "draining", "gate_closed", "down", "kv_cache_usage", "kv_cache_capacity_tokens")
}
"""Metrics that say the same of every process; all others are counts of its own."""


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Answers of `report.state`, at least one, to one. Engines are those of the process that was told last.

    A session counts in each process that had a turn of it. A gate is closed, and an engine down, if it is for one.
    """
    merged = dict(max(states, key=lambda state: state["epoch"]))
    merged["workers"] = [pid for state in states for pid in state["workers"]]
    merged["in_step"] = all(state[name] == states[0][name] for state in states for name in _SAME)
    merged["gate_closed"] = any(state["gate_closed"] for state in states)
    merged["gates_closed"] = sorted({adapter for state in states for adapter in state["gates_closed"]})
    for name in _SUMMED:
        merged[name] = sum(state[name] for state in states)
    for name in _SUMMED_BY_KEY:
        keys = dict.fromkeys(key for state in states for key in state[name])
        merged[name] = {key: sum(state[name].get(key, 0) for state in states) for key in keys}
    of_engine: dict[str, list[Mapping[str, Any]]] = {}
    for engine in (engine for state in states for engine in state["engines"]):
        of_engine.setdefault(engine["name"], []).append(engine)
    merged["engines"] = [_merge_engine(engine, of_engine[engine["name"]]) for engine in merged["engines"]]
    return merged


def _merge_engine(engine: Mapping[str, Any], of: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged = dict(engine)
    merged["drained"] = all(engine["drained"] for engine in of)
    for name in _ENGINE_SUMMED:
        merged[name] = sum(engine[name] for engine in of)
    for name in _ENGINE_GREATEST:
        merged[name] = max(engine[name] for engine in of)
    return merged


def merge_metrics(texts: Sequence[str]) -> str:
    """Prometheus texts of several processes to one: summed, or the greatest of what each knows as a whole."""
    families: dict[str, dict[str, float]] = {}
    family: dict[str, float] = {}
    greatest = False
    for line in (line for text in texts for line in text.splitlines()):
        if line.startswith("# TYPE "):
            continue  # it follows the line of its HELP
        if line.startswith("# HELP "):
            family = families.setdefault(line, {})
            greatest = line.split(" ", 3)[2] in _GREATEST
            continue
        sample, _, value = line.rpartition(" ")
        before = family.get(sample)
        family[sample] = float(value) if before is None else (max if greatest else _add)(before, float(value))
    types = {line.split(" ", 3)[2]: line for text in texts for line in text.splitlines() if line.startswith("# TYPE ")}
    lines: list[str] = []
    for head, samples in families.items():
        lines += [head, types[head.split(" ", 3)[2]]]
        lines += [f"{sample} {value:.12g}" for sample, value in samples.items()]
    return "\n".join(lines) + "\n"


def _add(one: float, other: float) -> float:
    return one + other
