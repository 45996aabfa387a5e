# matplotlib ships partial types; its names are unknown to pyright in places.
# pyright: reportUnknownMemberType=false
"""Plots of a run as PNG files, and several runs in one picture. Needs matplotlib (the extra `train`)."""

from __future__ import annotations

import io
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import AutoLocator, MaxNLocator, PercentFormatter, StrMethodFormatter

from penstock.errors import UserError
from penstock.observe.run_folder import RunFolder
from penstock.observe.summary import idle_shares, staleness_counts

Row = Mapping[str, float]

BLUE, ORANGE, GREEN, PURPLE, SKY, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#8A8A8A"
"""The palette of Okabe and Ito (2008), distinct in every kind of colour vision; grey for what matters less."""
SMOOTHING = 9
"""Steps in the moving mean of noisy curves."""
LOGPROB_BAR = 1e-4
"""Largest difference of fp32 logprobs at equal weights that we accept (invariant 1)."""
NEEDED = (
    "step", "version", "reward_mean", "seconds/step", "seconds/training", "seconds/waiting", "seconds/update",
    "update/bubble", "tokens_per_second", "staleness_mean",
)  # fmt: skip
"""Columns that every row has."""
AFTER_A_STEP = ("seconds/evaluation", "seconds/checkpoint")
"""Columns about the time after the step before: the next row has them."""


def draw_plots(folder: RunFolder) -> list[Path]:
    """Draw every plot of a run into its folder `plots`.

    Returns:
        The files, in the order drawn.

    Raises:
        UserError: the run has no step yet, a row lacks a column, or `plots` cannot be written.
    """
    rows = _rows(folder)
    out = folder.path / "plots"
    files: list[Path] = []
    plots = {"learning": partial(draw_learning, evaluations=folder.evaluations()), **PLOTS}
    try:
        out.mkdir(exist_ok=True)
        for name, draw in plots.items():
            figure = Figure(figsize=(8, 4.5), layout="constrained")
            draw(figure, rows)
            files.append(out / f"{name}.png")
            figure.savefig(files[-1], dpi=130)
    except OSError as error:
        raise UserError(f"cannot write the plots into {out}: {error}") from error
    return files


def draw_learning(figure: Figure, rows: Sequence[Row], evaluations: Mapping[int, float]) -> None:
    """Mean reward of each batch with its moving mean, and held-out accuracy by the step after which it was measured."""
    axes = _axes(figure, "Reward and held-out accuracy", "mean reward, sampled")
    steps, rewards = column(rows, "step"), column(rows, "reward_mean")
    axes.plot(steps, rewards, color=BLUE, alpha=0.3, linewidth=1, label="reward, each step")
    axes.plot(steps, moving_mean(rewards), color=BLUE, linewidth=2, label=f"reward, mean of {SMOOTHING} steps")
    if evaluations:
        right = axes.twinx()
        right.plot(
            *zip(*evaluations.items(), strict=True), color=ORANGE, marker="o", linewidth=2, label="held-out accuracy"
        )
        right.set_ylabel("held-out accuracy, decoded greedily")
        right.yaxis.set_major_formatter(PercentFormatter(1.0))
        right.spines[["top"]].set_visible(False)
        if min(rewards) >= 0 and max(rewards) <= 1:  # both are fractions, so one scale for both tells the truth
            limits = (*axes.get_ylim(), *right.get_ylim())
            low, high = max(min(limits), -0.02), max(*limits, 0.1)  # where all is 0, no scale below it
            axes.set_ylim(low, high)
            right.set_ylim(low, high)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)


def draw_seconds(figure: Figure, rows: Sequence[Row]) -> None:
    """Where the trainer's wall time went, each step.

    Evaluation and checkpoint stand on the step after which they were made, though it is the next row that has their
    time; there is none of the last step's.
    """
    axes = _axes(figure, "Where a step's time goes", "wall time in s")
    steps = column(rows, "step")
    evaluation, checkpoint = ([*(row.get(key, 0.0) for row in rows[1:]), 0.0] for key in AFTER_A_STEP)
    within = ("seconds/training", "seconds/waiting", "seconds/update", "seconds/sleep", *AFTER_A_STEP)
    rest = [max(row["seconds/step"] - sum(row.get(key, 0.0) for key in within), 0.0) for row in rows]
    parts = {
        "training": (column(rows, "seconds/training"), BLUE),
        "waiting for rollouts": (column(rows, "seconds/waiting"), ORANGE),
        "updating weights": (column(rows, "seconds/update"), GREEN),
        **({"sleep and wake-up": (column(rows, "seconds/sleep"), SKY)} if "seconds/sleep" in rows[0] else {}),
        "evaluation": (evaluation, PURPLE),
        "checkpoint, rest": ([c + r for c, r in zip(checkpoint, rest, strict=True)], GREY),
    }
    bottom = [0.0] * len(rows)
    for label, (values, color) in parts.items():
        axes.bar(steps, values, bottom=bottom, width=1.0, color=color, label=label)
        bottom = [b + v for b, v in zip(bottom, values, strict=True)]
    figure.legend(loc="outside lower center", ncols=5, frameon=False)


def draw_bubble(figure: Figure, rows: Sequence[Row]) -> None:
    """Update bubble of each update: the time in which an engine made no token because of it."""
    axes = _axes(figure, "Update bubble: time without a token because of the update", "bubble in ms", x="update")
    bubbles = [1e3 * value for value in column(rows, "update/bubble")]
    middle = statistics.median(bubbles)
    axes.bar(column(rows, "version"), bubbles, width=0.8, color=BLUE, label="each update")
    axes.axhline(middle, color=ORANGE, linewidth=2, linestyle="--", label=f"median, {middle:.0f} ms")
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)


def draw_staleness(figure: Figure, rows: Sequence[Row]) -> None:
    """Share of the tokens trained on, by age in weight versions."""
    counts = staleness_counts(rows)
    total = sum(counts.values()) or 1.0
    ages = list(range(max(counts, default=0) + 1))
    axes = _axes(
        figure, "Staleness of the tokens trained on", "share of tokens", x="trainer version minus the token's version"
    )
    bars = axes.bar(ages, [counts.get(age, 0.0) / total for age in ages], width=0.7, color=BLUE)
    axes.bar_label(bars, labels=[f"{counts.get(age, 0.0) / total:.1%}" for age in ages], padding=2)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.margins(y=0.12)


def draw_logprobs(figure: Figure, rows: Sequence[Row]) -> None:
    """Largest difference between the trainer's and the engines' logprobs on tokens of the trainer's own version."""
    axes = _axes(figure, "Trainer against engine, at equal weights", "largest |difference of logprobs| in nats")
    points = [(row["step"], row["logprob_difference"]) for row in rows if row.get("logprob_difference", 0.0) > 0]
    axes.set_yscale("log")
    if points:
        axes.plot(*zip(*points, strict=True), color=BLUE, marker=".", linestyle="none", label="each step")
    axes.set_xlim(0, rows[-1]["step"] + 1)  # of the run, not of the few steps that had such tokens
    axes.axhline(LOGPROB_BAR, color=ORANGE, linewidth=2, linestyle="--", label=f"bar for fp32, {LOGPROB_BAR:.0e}")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)


def draw_throughput(figure: Figure, rows: Sequence[Row]) -> None:
    """Response tokens a second, all engines together."""
    axes = _axes(figure, "Generation, all engines together", "tokens per s")
    steps, rates = column(rows, "step"), column(rows, "tokens_per_second")
    axes.plot(steps, rates, color=BLUE, alpha=0.3, linewidth=1, label="each step")
    axes.plot(steps, moving_mean(rates), color=BLUE, linewidth=2, label=f"mean of {SMOOTHING} steps")
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)


PLOTS: Mapping[str, Callable[[Figure, Sequence[Row]], None]] = {
    "seconds": draw_seconds,
    "bubble": draw_bubble,
    "staleness": draw_staleness,
    "logprobs": draw_logprobs,
    "throughput": draw_throughput,
}
"""Plots that need the rows only, by the names of their files."""


def _axes(figure: Figure, title: str, y: str, x: str = "step") -> Axes:
    return axes_of(figure.add_subplot(), title, y, x)


def axes_of(axes: Axes, title: str, y: str, x: str = "step") -> Axes:
    """Give axes their title, labels, grid and whole numbers along x; return them."""
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return axes


def _rows(folder: RunFolder) -> Sequence[Row]:
    if not (rows := folder.metrics()):
        raise UserError(f"{folder.path} has no step to plot yet: metrics.jsonl is empty or missing")
    if lacking := [key for key in NEEDED if any(key not in row for row in rows)]:
        raise UserError(f"{folder.path}/metrics.jsonl has a row without {lacking[0]!r}: is it of another Penstock?")
    return rows


def column(rows: Sequence[Row], key: str) -> list[float]:
    """Return one value of each row."""
    return [row[key] for row in rows]


def moving_mean(values: Sequence[float]) -> list[float]:
    """Mean over the `SMOOTHING` values around each; fewer at the ends."""
    half = SMOOTHING // 2
    return [statistics.fmean(values[max(i - half, 0) : i + half + 1]) for i in range(len(values))]


# --- Several runs in one picture -------------------------------------------------------------------------------------

COLORS = (BLUE, ORANGE, GREEN, PURPLE, SKY, "#D55E00", "#F0E442", GREY)
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
    drawn = io.BytesIO()
    try:
        figure.savefig(drawn, dpi=110, format=out.suffix[1:] or "png")
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(drawn.getvalue())
    except (OSError, ValueError) as error:  # the latter: a format that matplotlib does not know
        raise UserError(f"cannot write {out}: {error}") from error


def _read(folder: RunFolder, color: str, among: Sequence[RunFolder]) -> _Run:
    rows = _rows(folder)
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
