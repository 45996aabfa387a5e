# ruff: noqa: ARG002
"""Routers small enough to be read, for tests of the discrete-event fleet."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fleet_sim.router import FleetRequest
from penstock.router.membership import EngineEntry
from penstock.router.policies import Defer


class RoundRobin:
    """One after another among the engines that are up; remembers what it was told."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.down: set[str] = set()
        self.outstanding: dict[str, int] = {}
        self.placed: list[str] = []
        self.finished: list[str] = []
        self.tried: list[tuple[str, ...]] = []

    def set_engines(self, entries: Sequence[EngineEntry]) -> None:
        self.names = [entry.name for entry in entries]

    def mark(self, name: str, *, down: bool) -> None:
        (self.down.add if down else self.down.discard)(name)

    def report_kv(self, name: str, *, kv_usage: float, kv_capacity: int) -> None:
        assert name in self.names
        assert 0 <= kv_usage <= 1
        assert kv_capacity > 0

    def place(self, request: FleetRequest, now: float, tried: Collection[str] = ()) -> str | Defer | None:
        up = [name for name in self.names if name not in self.down and name not in tried]
        if not up:
            return None
        name = self.pick(request, up)
        self.placed.append(name)
        self.tried.append(tuple(tried))
        self.outstanding[name] = self.outstanding.get(name, 0) + 1
        return name

    def pick(self, request: FleetRequest, up: list[str]) -> str:
        return up[len(self.placed) % len(up)]

    def done(self, request: FleetRequest, name: str, now: float) -> None:
        self.outstanding[name] -= 1

    def finish_session(self, session_id: str) -> bool:
        self.finished.append(session_id)
        return True

    def expire(self, now: float) -> None:
        pass
