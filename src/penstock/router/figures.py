"""What the router counts and knows as Prometheus text (format 0.0.4), and what several processes say as one answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from penstock.router.admin import state
from penstock.router.dispatcher import SECONDS, Dispatcher, Histogram, Metrics

PREFIX = "penstock_router_"
"""Of every name."""


def text(dispatcher: Dispatcher) -> str:
    """Return every figure of one router process, as a Prometheus server scrapes it."""
    return render(families(dispatcher))


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


def families(dispatcher: Dispatcher) -> list[Family]:
    """Every figure for Prometheus."""
    gate, placement = dispatcher.gate, dispatcher.placement
    engines = state(dispatcher)["engines"]

    def gauge(name: str, what: str, value: float) -> Family:
        return Family(PREFIX + name, "gauge", what, [Sample({}, value)])

    def of_engines(name: str, what: str, key: str) -> Family:
        kind = "counter" if name.endswith("_total") else "gauge"
        samples = [Sample({"engine": engine["name"]}, float(engine[key])) for engine in engines]
        return Family(f"{PREFIX}engine_{name}", kind, what, samples)

    def counts(name: str, what: str, label: str, values: Mapping[str, int]) -> Family:
        return Family(f"{PREFIX}{name}_total", "counter", what, [Sample({label: k}, n) for k, n in values.items()])

    held = [Sample({"for": kind}, count) for kind, count in gate.held_by().items()]
    return [
        *_counted(dispatcher.metrics),
        Family(f"{PREFIX}held", "gauge", "Requests waiting now, by what they wait for.", held),
        gauge("held_bytes", "Most bytes that are kept of requests that wait or are still coming in.", gate.held_bytes),
        gauge("gate_closed", "1 while the gate for all is closed.", gate.closed),
        gauge("sessions", "Sessions known.", len(placement.sessions)),
        counts("placements", "Requests placed, by the policy that chose the engine.", "rule", placement.rules),
        counts("turns", "Requests placed, by what became of their session.", "session", placement.turns),
        of_engines("outstanding", "Requests sent and not answered in full.", "outstanding"),
        of_engines("outstanding_tokens", "Prompt and expected tokens of those.", "outstanding_tokens"),
        of_engines("resident_tokens", "Context that lives there.", "resident_tokens"),
        of_engines("sessions", "Sessions that live there.", "sessions"),
        of_engines("kv_cache_usage", "Share of its KV cache in use; -1: not known.", "kv_usage"),
        of_engines("kv_cache_capacity_tokens", "Tokens that its KV cache holds; 0: not known.", "kv_capacity"),
        of_engines("requests_total", "Requests sent.", "requests"),
        of_engines("eligible", "1 if the fleet announces it as eligible.", "eligible"),
        of_engines("draining", "1 while it is to leave.", "draining"),
        of_engines("gate_closed", "1 while its own gate is closed.", "gate_closed"),
        of_engines("down", "1 while the breaker is open.", "down"),
        of_engines("breaker_openings_total", "How often the breaker opened.", "breaker_openings"),
        of_engines("dead_answers_total", "Answers that said that its core is dead.", "dead_answers"),
    ]


def _counted(metrics: Metrics) -> list[Family]:
    """The counters; each process has its own, and a fleet's are their sums."""

    def total(name: str, what: str, value: float) -> Family:
        return Family(f"{PREFIX}{name}_total", "counter", what, [Sample({}, value)])

    def by(label: str, name: str, what: str, values: Counter[str]) -> Family:
        samples = [Sample({label: key}, n) for key, n in sorted(values.items())]
        return Family(f"{PREFIX}{name}_total", "counter", what, samples)

    def histogram(name: str, what: str, values: Histogram) -> Family:
        return Family(f"{PREFIX}{name}_seconds", "histogram", what, buckets(values))

    return [
        total("requests", "Requests taken in.", metrics.requests),
        total("answered", "Requests that an engine answered in full.", metrics.answered),
        by("code", "errors", "Requests that the router answered itself.", metrics.errors),
        total("cancelled", "Requests whose client went away.", metrics.cancelled),
        total("broken", "Answers that an engine did not complete.", metrics.broken),
        by("code", "rejected", "Calls that never became a request to an engine.", metrics.rejected),
        by("reason", "retries", "Requests sent once more before their first byte.", metrics.retries),
        total("request_bytes", "Bytes of request bodies.", metrics.bytes_in),
        total("response_bytes", "Bytes of response bodies.", metrics.bytes_out),
        histogram("first_byte", "From a request's head to the first byte of an engine's answer.", metrics.first_byte),
        histogram("request", "From a request's head to the end of its answer.", metrics.duration),
        histogram("hold", "Time that requests waited for an engine or for room on one.", metrics.hold),
        histogram("gate", "Time that requests waited at a closed gate.", metrics.gate),
    ]


def buckets(histogram: Histogram) -> list[Sample]:
    """Cumulative counts up to each bound, the sum and the count."""
    running = list(accumulate(histogram.counts))
    bounds = [f"{bound:g}" for bound in SECONDS]
    buckets = [Sample({"le": le}, n, "_bucket") for le, n in zip([*bounds, "+Inf"], running, strict=True)]
    return [*buckets, Sample({}, histogram.sum, "_sum"), Sample({}, running[-1], "_count")]


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


# --- several processes as one ----------------------------------------------------------------------------------------

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
    for engine in (engine for each in states for engine in each["engines"]):
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
