"""What a run tells while it goes on: implemented by the live display, and by nothing at all in a test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from penstock.observe.summary import Summary
from penstock.types import UpdateReport


class Reporter(Protocol):
    """Called from the event loop of the run; an implementation must return at once and raise nothing."""

    def on_phase(self, name: str) -> None:
        """A phase begins: `launch`, `resume`, `evaluate`, `train`, `checkpoint`, `done`."""

    def on_step(self, metrics: Mapping[str, float]) -> None:
        """A step is done; `metrics` is its row of metrics.jsonl (keys: `penstock.observe.run_folder`)."""

    def on_update(self, report: UpdateReport) -> None:
        """New weights are in force on the engines. Comes before `on_step` of the step that made them."""

    def on_eval(self, name: str, accuracy: float) -> None:
        """An evaluation ended. `name` is `before`, `after` or `step N`; `accuracy` is a fraction from 0 to 1."""

    def on_end(self, summary: Summary) -> None:
        """The run ended well."""


class NullReporter:
    """Reports nothing."""

    def on_phase(self, name: str) -> None:
        """Ignore."""

    def on_step(self, metrics: Mapping[str, float]) -> None:
        """Ignore."""

    def on_update(self, report: UpdateReport) -> None:
        """Ignore."""

    def on_eval(self, name: str, accuracy: float) -> None:
        """Ignore."""

    def on_end(self, summary: Summary) -> None:
        """Ignore."""
