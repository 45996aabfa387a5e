"""Where a run's wall time goes: by activity, for each step and in all."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager


class Stopwatch:
    """Adds up seconds by name.

    Args:
        earlier: totals of the run before it was resumed, as `totals` gave them.
        clock: monotonic seconds; a test injects its own.
    """

    def __init__(self, earlier: Mapping[str, float] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._totals = dict(earlier or {})
        self._started = clock() - self._totals.pop("total", 0.0)
        self._lap: dict[str, float] = {}
        self._lap_started = clock()

    @contextmanager
    def measure(self, name: str) -> Generator[None]:
        """Count the time of a `with` block as `name`, unless it raises."""
        started = self._clock()
        yield
        seconds = self._clock() - started
        self._lap[name] = self._lap.get(name, 0.0) + seconds
        self._totals[name] = self._totals.get(name, 0.0) + seconds

    def lap(self) -> dict[str, float]:
        """Seconds by name since the lap before, and `step`: all of the time since then."""
        now = self._clock()
        lap = {**self._lap, "step": now - self._lap_started}
        self._lap = {}
        self._lap_started = now
        return lap

    def totals(self) -> dict[str, float]:
        """Seconds by name since the run began, and `total`: all of the time."""
        return {**self._totals, "total": self._clock() - self._started}
