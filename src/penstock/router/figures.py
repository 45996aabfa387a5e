"""Metrics of one router process as Prometheus text (format 0.0.4), and its access log."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from itertools import accumulate

import orjson
from prometheus_client import generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.router.dispatcher import SECONDS, Dispatcher, Histogram, Metrics
from penstock.router.exchange import Exchange
from penstock.router.other_calls import state_of

PREFIX = "penstock_router_"
"""Prefix of every metric's name."""
_OF_ENGINES = (
    ("outstanding", "gauge", "Requests sent and not answered in full.", "outstanding"),
    ("outstanding_tokens", "gauge", "Prompt and expected tokens of those.", "outstanding_tokens"),
    ("resident_tokens", "gauge", "Context that lives there.", "resident_tokens"),
    ("sessions", "gauge", "Sessions that live there.", "sessions"),
    ("kv_cache_usage", "gauge", "Share of its KV cache in use; -1: not known.", "kv_usage"),
    ("kv_cache_capacity_tokens", "gauge", "Tokens that its KV cache holds; 0: not known.", "kv_capacity"),
    ("requests", "counter", "Requests sent.", "requests"),
    ("eligible", "gauge", "1 if the fleet announces it as eligible.", "eligible"),
    ("draining", "gauge", "1 while it is to leave.", "draining"),
    ("down", "gauge", "1 while the breaker is open.", "down"),
    ("breaker_openings", "counter", "How often the breaker opened.", "breaker_openings"),
    ("dead_answers", "counter", "Answers that said that its core is dead.", "dead_answers"),
)
"""Name, kind, description, and the attribute of `EngineLoad`."""


class _Figures(Collector):
    """A collector of given metrics for `generate_latest`."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def text(dispatcher: Dispatcher) -> str:
    """Return every metric of one router process, as a Prometheus server scrapes it."""
    engines = state_of(dispatcher).engines
    of_engines = [
        _metric(f"engine_{name}", kind, what, {engine.name: getattr(engine, key) for engine in engines}, "engine")
        for name, kind, what, key in _OF_ENGINES
    ]
    metrics = [*_counted(dispatcher.metrics), *_known(dispatcher), *of_engines]
    return generate_latest(_Figures(metrics)).decode()


def _metric(name: str, kind: str, what: str, values: Mapping[str, float], label: str = "") -> Metric:
    """Make a metric with one value, or one for each value of `label`."""
    metric = Metric(PREFIX + name, what, kind)
    for key, value in values.items():
        metric.add_sample(metric.name + "_total" * (kind == "counter"), {label: key} if label else {}, value)
    return metric


def _known(dispatcher: Dispatcher) -> list[Metric]:
    gate, placement = dispatcher.gate, dispatcher.placement

    def gauge(name: str, what: str, value: float) -> Metric:
        return _metric(name, "gauge", what, {"": value})

    return [
        _metric("held", "gauge", "Requests waiting now, by what they wait for.", gate.held_by(), "for"),
        gauge("held_bytes", "Bytes that are kept of requests that had to wait or came in pieces.", gate.held_bytes),
        gauge("gate_closed", "1 while the gate for all is closed.", gate.closed),
        gauge("sessions", "Sessions known.", len(placement.memory.sessions)),
        _metric("placements", "counter", "Requests placed, by the policy that chose.", placement.rules, "rule"),
        _metric("turns", "counter", "Requests placed, by what became of their session.", placement.turns, "session"),
    ]


def _counted(metrics: Metrics) -> list[Metric]:
    """Return this process's counters; a fleet's are the sums over its processes."""

    def total(name: str, what: str, value: float) -> Metric:
        return _metric(name, "counter", what, {"": value})

    return [
        total("requests", "Requests taken in.", metrics.requests),
        total("answered", "Requests that an engine answered in full.", metrics.answered),
        _metric("errors", "counter", "Requests that the router answered itself.", metrics.errors, "code"),
        total("cancelled", "Requests whose client went away.", metrics.cancelled),
        total("broken", "Answers that an engine did not complete.", metrics.broken),
        _metric("rejected", "counter", "Calls that never became a request to an engine.", metrics.rejected, "code"),
        _metric("retries", "counter", "Requests sent once more before their first byte.", metrics.retries, "reason"),
        total("request_bytes", "Bytes of request bodies.", metrics.bytes_in),
        total("response_bytes", "Bytes of response bodies.", metrics.bytes_out),
        histogram("first_byte", "From a request's head to the first byte of an engine's answer.", metrics.first_byte),
        histogram("request", "From a request's head to the end of its answer.", metrics.duration),
        histogram("hold", "Time that requests waited for an engine or for room on one.", metrics.hold),
        histogram("gate", "Time that requests waited at a closed gate.", metrics.gate),
    ]


def histogram(name: str, what: str, values: Histogram) -> Metric:
    """Make a histogram: cumulative counts up to each bound, the count and the sum."""
    bounds = [*(f"{bound:g}" for bound in SECONDS), "+Inf"]
    buckets = list(zip(bounds, map(float, accumulate(values.counts)), strict=True))
    return HistogramMetricFamily(f"{PREFIX}{name}_seconds", what, buckets=buckets, sum_value=values.sum)


_access = logging.getLogger("penstock.router.access")
_TRACE_ID = re.compile(rb"[0-9A-Fa-f]{2}-([0-9A-Fa-f]{32})-")
"""W3C Trace Context, section 3.2: version, trace id, parent id, flags."""


def log_access(exchange: Exchange, now: float) -> None:
    """Log the JSON line of a finished request; `now` is `time.monotonic()`."""
    request = exchange.request
    trace = _TRACE_ID.match(request.traceparent)
    line = {
        "method": request.method.decode("latin-1"),
        "target": request.target.decode("latin-1"),
        "status": exchange.status,
        "engine": None if exchange.backend is None else exchange.backend.name,
        "session": request.session_id,
        "group": request.group_id,
        "trace": None if trace is None else trace[1].decode().lower(),
        "bytes_in": exchange.bytes_in,
        "bytes_out": exchange.bytes_out,
        "seconds": round(now - exchange.started_at, 6),
        "hold_seconds": round(exchange.hold_seconds, 6),
        "gate_seconds": round(exchange.gate_seconds, 6),
        "tried": [backend.name for backend in exchange.excluded],
        "outcome": exchange.outcome or "ok",
    }
    _access.info(orjson.dumps(line).decode())
