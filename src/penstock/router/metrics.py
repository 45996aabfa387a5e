"""What the router counts: each request once, at its end."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from penstock.router.prometheus import Family, Histogram, Sample

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
