"""A placement that speaks of engines by name, as tests do."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from penstock.router.memory import Engine
from penstock.router.placement import Placement
from penstock.router.policies import Defer, EngineView, Hints
from penstock.settings import RouterConfig


class NamedPlacement:
    """What is `done` is so on the engine that had the name when the request was placed."""

    def __init__(self, config: RouterConfig | None = None) -> None:
        self.own = Placement(config)
        self._seen: dict[str, Engine] = {}
        self._placed: dict[tuple[Hints, str], Engine] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def place(self, request: Hints, now: float, tried: Collection[str] = ()) -> str | Defer | None:
        found = self.own.place(request, now, [self._seen[name] for name in tried])
        if not isinstance(found, Engine):
            return found
        self._seen[found.name] = self._placed[request, found.name] = found
        return found.name

    def done(self, request: Hints, name: str, now: float) -> None:
        self.own.done(request, self._placed.pop((request, name)), now)

    def mark(self, name: str, **given: bool) -> None:
        self.own.mark(self.own.engines[name], **given)

    def report_kv(self, name: str, **given: Any) -> None:
        self.own.report_kv(self.own.engines[name], **given)

    def views(self) -> Mapping[str, EngineView]:
        return {name: engine.view for name, engine in self.own.engines.items()}
