"""Prometheus text (format 0.0.4) of what the router counts and knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

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
