# matplotlib ships partial types; its names are unknown to pyright in places.
# pyright: reportUnknownMemberType=false
"""Several runs in one picture: reward by step and by wall time, held-out accuracy, bubbles, staleness, idle shares."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import AutoLocator, PercentFormatter

from penstock.errors import UserError
from penstock.observe.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, Row, axes_of, column, moving_mean
from penstock.observe.run_folder import RunFolder
from penstock.observe.summary import idle_shares

COLORS = (BLUE, ORANGE, GREEN, PURPLE, "#56B4E9", "#D55E00", "#F0E442", GREY)
"""The palette of Okabe and Ito (2008); two runs never share one."""
SIDES = ("learner", "engines")


@dataclass(frozen=True, slots=True)
class _Run:
    label: str
    color: str
    rows: Sequence[Row]
    evaluations: dict[int, float]

    def minutes(self) -> list[float]:
        """Wall time at the end of each step, from the start of the first."""
        return [seconds / 60 for seconds in itertools.accumulate(column(self.rows, "seconds/step"))]


def compare_runs(folders: Sequence[RunFolder], out: Path) -> None:
    """Draw runs beside each other into the PNG file `out`; those under way, as far as they have come.

    Raises:
        UserError: more runs than there are colours, a run without a step, or `out` cannot be written.
    """
    if len(folders) > len(COLORS):
        raise UserError(f"{len(folders)} runs are too many for one picture; give at most {len(COLORS)}")
    runs = [_read(folder, color, folders) for folder, color in zip(folders, COLORS, strict=False)]
    figure = Figure(figsize=(15, 8), layout="constrained")
    panels = iter(figure.subplots(2, 3).flat)
    _draw_rewards(next(panels), runs, by_time=False)
    _draw_rewards(next(panels), runs, by_time=True)
    _draw_accuracy(next(panels), runs)
    _draw_bubbles(next(panels), runs)
    _draw_staleness(next(panels), runs)
    _draw_idle(next(panels), runs)
    handles = [panel for panel in figure.axes[0].get_lines() if not str(panel.get_label()).startswith("_")]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(runs), 4), frameon=False)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=110, format=out.suffix[1:] or "png")  # else it would add `.png` by itself
    except (OSError, ValueError) as error:  # the latter: a format that matplotlib does not know
        raise UserError(f"cannot write {out}: {error}") from error


def _read(folder: RunFolder, color: str, among: Sequence[RunFolder]) -> _Run:
    rows = folder.metrics()
    if not rows:
        raise UserError(f"{folder.path} has no step to plot yet: metrics.jsonl is empty or missing")
    same = sum(other.path.name == folder.path.name for other in among) > 1
    name = str(folder.path) if same else folder.path.name
    schedule, seed = folder.config.train.schedule, folder.config.seed
    return _Run(f"{name} ({schedule}, seed {seed})", color, rows, folder.evaluations())


def _draw_rewards(axes: Axes, runs: Sequence[_Run], *, by_time: bool) -> None:
    axes_of(
        axes,
        f"Reward by {'wall time' if by_time else 'step'}",
        "mean reward, sampled",
        x="minutes" if by_time else "step",
    )
    if by_time:
        axes.xaxis.set_major_locator(AutoLocator())
    for run in runs:
        x, rewards = run.minutes() if by_time else column(run.rows, "step"), column(run.rows, "reward_mean")
        axes.plot(x, rewards, color=run.color, alpha=0.25, linewidth=1)
        axes.plot(x, moving_mean(rewards), color=run.color, linewidth=2, label=run.label)


def _draw_accuracy(axes: Axes, runs: Sequence[_Run]) -> None:
    axes_of(axes, "Held-out accuracy by wall time", "decoded greedily", x="minutes")
    axes.xaxis.set_major_locator(AutoLocator())
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    for run in runs:
        at = {0: 0.0} | {int(row["step"]): minutes for row, minutes in zip(run.rows, run.minutes(), strict=True)}
        points = [(at[step], accuracy) for step, accuracy in run.evaluations.items() if step in at]
        if points:
            axes.plot(*zip(*points, strict=True), color=run.color, marker="o", linewidth=2)


def _draw_bubbles(axes: Axes, runs: Sequence[_Run]) -> None:
    axes_of(axes, "Update bubble", "ms, each update and the median", x="run and median")
    names: list[str] = []
    for place, run in enumerate(runs):
        bubbles = [1e3 * value for value in column(run.rows, "update/bubble")]
        spread = [place + 0.5 * (i / max(len(bubbles) - 1, 1) - 0.5) for i in range(len(bubbles))]
        axes.scatter(spread, bubbles, s=8, color=run.color, alpha=0.5, linewidths=0)
        middle = statistics.median(bubbles)
        axes.hlines(middle, place - 0.35, place + 0.35, color=run.color, linewidth=2)
        names.append(f"{place + 1}: {middle:.0f} ms")
    axes.set_xticks(range(len(runs)), names)
    axes.set_xlim(-0.6, len(runs) - 0.4)
    axes.set_ylim(bottom=0)


def _draw_staleness(axes: Axes, runs: Sequence[_Run]) -> None:
    axes_of(axes, "Staleness of the tokens trained on", "mean age in versions")
    for run in runs:
        axes.plot(column(run.rows, "step"), column(run.rows, "staleness_mean"), color=run.color, linewidth=2)
    axes.set_ylim(bottom=-0.05)


def _draw_idle(axes: Axes, runs: Sequence[_Run]) -> None:
    axes_of(axes, "Idle share of the steps' time", "share", x="side")
    width = 0.8 / len(runs)
    for place, run in enumerate(runs):
        shares = idle_shares(run.rows)
        known = [(i, shares[side]) for i, side in enumerate(SIDES) if side in shares]
        bars = axes.bar(
            [i + width * (place - (len(runs) - 1) / 2) for i, _ in known],
            [s for _, s in known],
            0.9 * width,
            color=run.color,
        )
        axes.bar_label(bars, labels=[f"{share:.0%}" for _, share in known], padding=2)
    axes.set_xticks(range(len(SIDES)), SIDES)
    axes.set_xlim(-0.6, len(SIDES) - 0.4)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.margins(y=0.12)
