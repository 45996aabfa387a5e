# matplotlib ships partial types; its names are unknown to pyright in places.
# pyright: reportUnknownMemberType=false
"""Plots of one run or several, all panels in one picture. Needs matplotlib."""

from __future__ import annotations

import io
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import AutoLocator, MaxNLocator, PercentFormatter

from penstock.errors import UserError
from penstock.observe.run_folder import RunFolder
from penstock.observe.summary import idle_shares, staleness_counts

BLUE, ORANGE, GREEN, PURPLE, SKY, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#8A8A8A"
COLORS = (BLUE, ORANGE, GREEN, PURPLE, SKY, "#D55E00", "#F0E442", GREY)
"""The palette of Okabe and Ito (2008), distinct for every kind of colour vision. Two runs never share a colour."""
SMOOTHING = 9
"""Steps in the moving mean of noisy curves. A run of fewer than twice as many is drawn as it is."""
LOGPROB_BAR = 1e-4
"""Largest accepted difference of fp32 logprobs at equal weights (invariant 1)."""
SIDES = ("learner", "engines")
NEEDED = (
    "step", "version", "reward_mean", "seconds/step", "seconds/training", "seconds/waiting", "seconds/update",
    "update/bubble", "tokens_per_second",
)  # fmt: skip
"""Columns that every row has."""
AFTER_A_STEP = ("seconds/evaluation", "seconds/checkpoint")
"""Columns about the time after a step. The row of the next step has them."""


@dataclass(frozen=True, slots=True)
class DrawnRun:
    """A run in the form that panels draw."""

    label: str
    color: str
    rows: Sequence[Mapping[str, float]]
    evaluations: Mapping[int, float]

    @classmethod
    def read(cls, folder: RunFolder, color: str, label: str) -> DrawnRun:
        """Read a run, finished or not. UserError: it has no step yet, or a row lacks a column."""
        if not (rows := folder.metrics()):
            raise UserError(f"{folder.path} has no step to plot yet: metrics.jsonl is empty or missing")
        if lacking := [key for key in NEEDED if any(key not in row for row in rows)]:
            raise UserError(f"{folder.path}/metrics.jsonl has a row without {lacking[0]!r}: is it of another Penstock?")
        schedule, seed = folder.config.train.schedule, folder.config.seed
        return cls(f"{label} ({schedule}, seed {seed})", color, rows, folder.evaluations())

    def column(self, key: str) -> list[float]:
        return [row[key] for row in self.rows]

    def minutes(self) -> list[float]:
        """Return the minutes from the start of the first step to the end of each step."""
        return [seconds / 60 for seconds in itertools.accumulate(self.column("seconds/step"))]


Panel = Callable[[Axes, Sequence[DrawnRun]], None]


def draw_plots(folders: Sequence[RunFolder], out: Path) -> None:
    """Draw all panels of one run or several into the picture `out`.

    Raises:
        UserError: more runs than colours, a run without a step, a row without a column, or `out` cannot be written.
    """
    if len(folders) > len(COLORS):
        raise UserError(f"{len(folders)} runs are too many for one picture; give at most {len(COLORS)}")
    names = [folder.path.name for folder in folders]
    labels = [str(f.path) if names.count(name) > 1 else name for f, name in zip(folders, names, strict=True)]
    runs = [DrawnRun.read(*given) for given in zip(folders, COLORS, labels, strict=False)]
    panels = [*PANELS, *([draw_seconds] if len(runs) == 1 else [])]
    figure, drawn = Figure(figsize=(20, 13), layout="constrained"), io.BytesIO()
    for draw, axes in zip(panels, figure.subplots(3, 3).flat, strict=False):
        draw(axes, runs)
    handles = [Line2D([], [], color=run.color, linewidth=2, label=run.label) for run in runs]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(runs), 4), frameon=False)
    if len(runs) > 1:
        figure.axes[-1].set_axis_off()
    try:
        figure.savefig(drawn, dpi=110, format=out.suffix[1:] or "png")
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(drawn.getvalue())
    except (OSError, ValueError) as error:  # ValueError: a format that matplotlib does not know
        raise UserError(f"cannot write {out}: {error}") from error


# --- panels ----------------------------------------------------------------------------------------------------------


def curves(title: str, y: str, key: str, x: str = "step") -> Panel:
    """Return a panel of a noisy column, and in long runs of its mean over `SMOOTHING` values (fewer at the ends)."""

    def draw(axes: Axes, runs: Sequence[DrawnRun]) -> None:
        smoothed, half = [run for run in runs if len(run.rows) >= 2 * SMOOTHING], SMOOTHING // 2
        _label(axes, title, y, x)
        if smoothed:
            axes.set_xlabel(f"{x} (thick line: mean of {SMOOTHING} steps)")
        for run in runs:
            at, values = run.column("step") if x == "step" else run.minutes(), run.column(key)
            if run not in smoothed:
                axes.plot(at, values, color=run.color, marker=".", linewidth=2)
                continue
            means = [statistics.fmean(values[max(i - half, 0) : i + half + 1]) for i in range(len(values))]
            axes.plot(at, values, color=run.color, alpha=0.3, linewidth=1)
            axes.plot(at, means, color=run.color, linewidth=2)

    return draw


def draw_accuracy(axes: Axes, runs: Sequence[DrawnRun]) -> None:
    """Draw held-out accuracy over wall time, at the end of the step that it follows. Step 0: before training."""
    _label(axes, "Held-out accuracy by wall time", "decoded greedily", x="minutes")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    for run in runs:
        at = {0: 0.0} | {int(row["step"]): minutes for row, minutes in zip(run.rows, run.minutes(), strict=True)}
        points = [(at[step], accuracy) for step, accuracy in run.evaluations.items() if step in at]
        if points:
            axes.plot(*zip(*points, strict=True), color=run.color, marker="o", linewidth=2)


def draw_bubble(axes: Axes, runs: Sequence[DrawnRun]) -> None:
    """Draw the bubble of each update, in which an engine made no token because of it."""
    _label(axes, "Update bubble: time without a token because of the update", "ms", x="update")
    for run in runs:
        bubbles = [1e3 * value for value in run.column("update/bubble")]
        middle = statistics.median(bubbles)
        axes.plot(run.column("version"), bubbles, color=run.color, marker=".", linestyle="none", alpha=0.6)
        axes.axhline(middle, color=run.color, linewidth=2, linestyle="--", label=f"median {middle:.0f} ms")
    axes.set_ylim(bottom=0)
    _legend(axes)


def draw_staleness(axes: Axes, runs: Sequence[DrawnRun]) -> None:
    """Draw the share of trained tokens by their age in weight versions."""
    _label(axes, "Staleness of the tokens trained on", "share of tokens", x="trainer version minus the token's version")
    counts = {run.label: staleness_counts(run.rows) for run in runs}
    ages = range(max(max(each, default=0) for each in counts.values()) + 1)

    def shares(run: DrawnRun) -> list[float | None]:
        total = sum(counts[run.label].values()) or 1.0
        return [counts[run.label].get(age, 0) / total for age in ages]

    _bars(axes, runs, [str(age) for age in ages], shares)


def draw_logprobs(axes: Axes, runs: Sequence[DrawnRun]) -> None:
    """Draw the largest |trainer - engine logprob| over tokens of equal versions."""
    _label(axes, "Trainer against engine, at equal weights", "largest |difference of logprobs| in nats")
    axes.set_yscale("log")
    for run in runs:
        points = [(row["step"], row["logprob_difference"]) for row in run.rows if row.get("logprob_difference", 0) > 0]
        if points:
            axes.plot(*zip(*points, strict=True), color=run.color, marker=".", linestyle="none")
    axes.set_xlim(0, max(run.rows[-1]["step"] for run in runs) + 1)  # all steps, though few may have such tokens
    axes.axhline(LOGPROB_BAR, color=GREY, linewidth=2, linestyle="--", label=f"bar for fp32, {LOGPROB_BAR:.0e}")
    _legend(axes)


def draw_idle(axes: Axes, runs: Sequence[DrawnRun]) -> None:
    """Draw the share of the steps' time in which each side was idle. A side without data has no bar."""
    _label(axes, "Idle share of the steps' time", "share", x="side")
    _bars(axes, runs, SIDES, lambda run: [idle_shares(run.rows).get(side) for side in SIDES])


def draw_seconds(axes: Axes, runs: Sequence[DrawnRun]) -> None:
    """Draw how the trainer's wall time was spent, for each step of one run.

    Evaluation and checkpoint are drawn on the step that they follow, but the next step's row holds their time. For the
    last step this time is unknown.
    """
    _label(axes, "Where a step's time goes", "wall time in s")
    (run,) = runs
    evaluation, checkpoint = ([*(row.get(key, 0.0) for row in run.rows[1:]), 0.0] for key in AFTER_A_STEP)
    within = ("seconds/training", "seconds/waiting", "seconds/update", "seconds/sleep", *AFTER_A_STEP)
    rest = [max(row["seconds/step"] - sum(row.get(key, 0.0) for key in within), 0.0) for row in run.rows]
    parts = {
        "training": (run.column("seconds/training"), BLUE),
        "waiting for rollouts": (run.column("seconds/waiting"), ORANGE),
        "updating weights": (run.column("seconds/update"), GREEN),
        **({"sleep and wake-up": (run.column("seconds/sleep"), SKY)} if "seconds/sleep" in run.rows[0] else {}),
        "evaluation": (evaluation, PURPLE),
        "checkpoint, rest": ([c + r for c, r in zip(checkpoint, rest, strict=True)], GREY),
    }
    bottom = [0.0] * len(run.rows)
    for label, (values, color) in parts.items():
        axes.bar(run.column("step"), values, bottom=bottom, width=1.0, color=color, label=label)
        bottom = [b + v for b, v in zip(bottom, values, strict=True)]
    _legend(axes)


def _label(axes: Axes, title: str, y: str, x: str = "step") -> None:
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(AutoLocator() if x == "minutes" else MaxNLocator(integer=True, min_n_ticks=1))


def _legend(axes: Axes) -> None:
    """Put the legend below the panel, where it covers nothing."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False)


def _bars(
    axes: Axes, runs: Sequence[DrawnRun], groups: Sequence[str], shares: Callable[[DrawnRun], list[float | None]]
) -> None:
    """Draw one bar per run in each group."""
    width = 0.8 / len(runs)
    for place, run in enumerate(runs):
        known = [(i, share) for i, share in enumerate(shares(run)) if share is not None]
        left = [i + width * (place - (len(runs) - 1) / 2) for i, _ in known]
        bars = axes.bar(left, [share for _, share in known], 0.9 * width, color=run.color)
        axes.bar_label(bars, labels=[f"{share:.1%}" for _, share in known], padding=2)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.margins(y=0.12)


PANELS: Sequence[Panel] = (
    curves("Reward by step", "mean reward, sampled", "reward_mean"),
    curves("Reward by wall time", "mean reward, sampled", "reward_mean", "minutes"),
    draw_accuracy,
    curves("Generation, all engines together", "tokens per s", "tokens_per_second"),
    draw_bubble,
    draw_staleness,
    draw_logprobs,
    draw_idle,
)
"""Panels for any number of runs. `draw_seconds` is for a single one."""
