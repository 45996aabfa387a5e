"""The engines with the lowest of some figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from penstock.router.policies.base import EngineView

Figure = Callable[[EngineView], int]
OUTSTANDING: Figure = attrgetter("outstanding")
RESIDENT_TOKENS: Figure = attrgetter("resident_tokens")


def lowest(engines: Sequence[EngineView], figure: Figure) -> Sequence[EngineView]:
    """Those of the engines, at least one, with the lowest figure."""
    figures = list(map(figure, engines))
    least = min(figures)
    if figures.count(least) == 1:
        return (engines[figures.index(least)],)
    return [engine for engine, value in zip(engines, figures, strict=True) if value == least]
