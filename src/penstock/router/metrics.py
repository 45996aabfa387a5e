"""The router's counters, and their Prometheus text form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from penstock.router.engine import Engine


class Metrics:
    """Plain counters, written by one event loop."""

    __slots__ = (
        "broken",
        "bytes_in",
        "bytes_out",
        "cancelled",
        "errors",
        "hold_seconds",
        "holds",
        "requests",
        "retries",
    )

    def __init__(self) -> None:
        self.requests = 0
        """Requests taken in, admin calls not counted."""
        self.errors: Counter[str] = Counter()
        """Requests that the router answered itself, by code."""
        self.retries = 0
        """Requests sent once more: on a fresh connection or to another engine."""
        self.broken = 0
        """Answers that ended before they were complete."""
        self.cancelled = 0
        """Requests whose client went away first."""
        self.holds = 0
        self.hold_seconds = 0.0
        """Requests that had to wait and were let go, and how long they waited together."""
        self.bytes_in = 0
        self.bytes_out = 0
        """Payload towards engines, and answers towards clients, framing of bodies included."""

    def text(self, engines: Iterable[Engine], *, held: int, sessions: int, gate_closed: bool) -> str:
        """Prometheus text format 0.0.4."""
        lines: list[str] = []

        def add(name: str, kind: str, what: str, *values: tuple[str, float]) -> None:
            lines.append(f"# HELP penstock_router_{name} {what}")
            lines.append(f"# TYPE penstock_router_{name} {kind}")
            lines.extend(f"penstock_router_{name}{labels} {value}" for labels, value in values)

        all_engines = [(_label("engine", e.name), e) for e in engines]
        errors = [(_label("code", code), n) for code, n in self.errors.items()]
        add("requests_total", "counter", "Requests taken in.", ("", self.requests))
        add("errors_total", "counter", "Requests the router answered itself, by code.", *errors)
        add("retries_total", "counter", "Requests sent once more before their first byte.", ("", self.retries))
        add("broken_total", "counter", "Answers that an engine did not complete.", ("", self.broken))
        add("cancelled_total", "counter", "Requests whose client went away.", ("", self.cancelled))
        add("hold_seconds_total", "counter", "Time that requests waited.", ("", round(self.hold_seconds, 6)))
        add("holds_total", "counter", "Requests that waited and went on.", ("", self.holds))
        add("request_bytes_total", "counter", "Bytes of request bodies.", ("", self.bytes_in))
        add("response_bytes_total", "counter", "Bytes of response bodies.", ("", self.bytes_out))
        add("held", "gauge", "Requests waiting now.", ("", held))
        add("sessions", "gauge", "Sessions that have a home.", ("", sessions))
        add("gate_closed", "gauge", "1 while the gate is closed.", ("", int(gate_closed)))
        add("engine_outstanding", "gauge", "Requests in flight.", *[(n, e.outstanding) for n, e in all_engines])
        add("engine_requests_total", "counter", "Requests sent.", *[(n, e.requests) for n, e in all_engines])
        add("engine_eligible", "gauge", "1 if it may be used.", *[(n, int(e.view.eligible)) for n, e in all_engines])
        add("engine_down", "gauge", "1 if it refused a connection.", *[(n, int(e.down)) for n, e in all_engines])
        return "\n".join(lines) + "\n"


def _label(name: str, value: str) -> str:
    quoted = value.replace("\\", r"\\").replace('"', r"\"")
    return f'{{{name}="{quoted}"}}'
