"""Shows a run: a live panel on a terminal, else a plain line every few steps."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from rich.bar import Bar
from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.observe.summary import Reporter, Summary
from penstock.types import UpdateReport

BLOCKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 48
ETA_WINDOW = 20
"""Number of last steps whose mean duration predicts the remaining time."""
LINE_EVERY = 5
"""Steps between two plain lines."""
REFRESH_PER_SECOND = 4
PREPARING = "preparing"
EVALUATIONS = 4
"""Maximum number of held-out accuracies that the panel shows."""

PHASES: Mapping[str, str] = {
    "launch": "starting engines",
    "resume": "resuming",
    "restart": "there is no checkpoint yet: starting again from step 0",
    "evaluate": "evaluating on the held-out set",
    "train": "training",
    "checkpoint": "writing a checkpoint",
    "done": "done",
}


class RunDisplay(Reporter):
    """Shows a run to people. It is a context manager that restores the terminal on exit.

    `clock_s` returns monotonic seconds; tests pass their own.
    """

    def __init__(
        self, name: str, steps: int, *, console: Console | None = None, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._steps = steps
        self._console = console or Console()
        self._now = clock_s
        self._started = clock_s()
        self._step = 0
        self._phase = PREPARING
        self._last: Mapping[str, float] = {}
        self._rewards: list[float] = []
        self._durations: deque[float] = deque(maxlen=ETA_WINDOW)
        self._bubbles: list[float] = []
        self._evaluations: dict[str, float] = {}
        self._update: UpdateReport | None = None
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=REFRESH_PER_SECOND, get_renderable=self._panel)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None and self._phase == PREPARING:
            self._live.transient = True  # no engine was started and the error says why, so an empty panel is useless
        self._stop_live()

    # --- Reporter ----------------------------------------------------------------------------------------------------

    def on_phase(self, name: str) -> None:
        self._phase = PHASES.get(name, name)
        if name in {"launch", "resume", "restart", "evaluate"}:
            self._line(self._phase)

    def on_step(self, metrics: Mapping[str, float]) -> None:
        self._last = metrics
        self._step = int(metrics["step"])
        self._rewards.append(metrics["reward_mean"])
        self._durations.append(metrics["seconds/step"])
        self._phase = PHASES["train"]
        if self._step % LINE_EVERY == 0 or self._step == self._steps:
            self._line(self._step_line())

    def on_update(self, report: UpdateReport) -> None:
        self._update = report
        self._bubbles.append(report.bubble)
        for engine, reason in report.failures.items():
            self._console.print(f"engine {engine} left the fleet: {reason}", style="yellow", markup=False)

    def on_eval(self, name: str, accuracy: float) -> None:
        self._evaluations[name] = accuracy
        self._line(f"held-out accuracy {name}: {accuracy:.1%}")

    def on_warning(self, text: str) -> None:
        self._console.print(f"warning: {text}", style="yellow", markup=False)

    def on_end(self, summary: Summary) -> None:
        self._stop_live()
        self._console.print(end_table(summary))

    # --- how it looks ------------------------------------------------------------------------------------------------

    def eta_s(self) -> float | None:
        """Return the seconds for the remaining steps, or None before the first step."""
        return statistics.fmean(self._durations) * (self._steps - self._step) if self._durations else None

    def _stop_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self, text: str) -> None:
        """Print a plain line if there is no live panel."""
        if not self._console.is_terminal:
            self._console.print(
                f"[{clock(self._now() - self._started)}] {text}", markup=False, highlight=False, soft_wrap=True
            )

    def _step_line(self) -> str:
        row = self._last
        return (
            f"step {self._step}/{self._steps}  reward {row['reward_mean']:.3f}  "
            f"staleness {row['staleness_mean']:.2f} (max {row['staleness_max']:.0f})  "
            f"{row['tokens_per_second']:,.0f} tokens/s  bubble {milliseconds(row['update/bubble'])}  "
            f"version {row['version']:.0f}  eta {clock(self.eta_s() or 0)}"
        )

    def _panel(self) -> RenderableType:
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="bold", no_wrap=True)
        rows.add_column()
        rows.add_row(f"step {self._step}/{self._steps}", self._progress())
        rows.add_row("now", self._phase)
        rows.add_row("reward", self._reward())
        rows.add_row("held-out", self._accuracy())
        rows.add_row("staleness", self._figure("mean {staleness_mean:.2f}, max {staleness_max:.0f} (in versions)"))
        rows.add_row("tokens/s", self._figure("{tokens_per_second:,.0f}"))
        rows.add_row("bubble", self._bubble())
        rows.add_row("engines", self._engines())
        return Panel(rows, title=f"penstock train: {self._name}", title_align="left", border_style="cyan", expand=False)

    def _progress(self) -> RenderableType:
        left = self.eta_s()
        times = f"{clock(self._now() - self._started)} elapsed" + ("" if left is None else f", {clock(left)} left")
        grid = Table.grid(padding=(0, 2))
        grid.add_row(ProgressBar(total=self._steps, completed=self._step, width=32, complete_style="cyan"), times)
        return grid

    def _reward(self) -> RenderableType:
        if not self._rewards:
            return Text("-", style="dim")
        return Text.assemble(f"{self._rewards[-1]:.3f}  ", (sparkline(self._rewards, SPARK_WIDTH), "cyan"))

    def _accuracy(self) -> RenderableType:
        if not self._evaluations:
            return Text("-", style="dim")
        each = [f"{value:.1%} {name}" for name, value in self._evaluations.items()]
        # Show the first and the last ones: a long run has more than one line can hold.
        return ", ".join(each if len(each) <= EVALUATIONS else [each[0], "...", *each[1 - EVALUATIONS :]])

    def _figure(self, template: str) -> RenderableType:
        return template.format_map(self._last) if self._last else Text("-", style="dim")

    def _bubble(self) -> RenderableType:
        if not self._bubbles:
            return Text("-", style="dim")
        middle, longest = statistics.median(self._bubbles), max(self._bubbles)
        return f"{milliseconds(self._bubbles[-1])} (median {milliseconds(middle)}, max {milliseconds(longest)})"

    def _engines(self) -> RenderableType:
        if self._update is None:
            return Text("-", style="dim")
        version = self._update.version
        serving = [(f"{engine.engine} v{version}  ", "green") for engine in self._update.engines]
        return Text.assemble(*serving, *((f"{engine} gone  ", "red") for engine in self._update.failures))


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a sparkline of `values` in at most `width` characters. It averages neighbours if there are more values."""
    count = min(width, len(values))
    edges = [i * len(values) // count for i in range(count + 1)]
    means = [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in means)


BAR_WIDTH = 24
SECONDS_LABELS: Mapping[str, str] = {
    "waiting": "waiting for rollouts",
    "training": "training",
    "update": "updating weights",
    "sleep": "engines to sleep and awake",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
}
"""Labels of the parts of `Summary.seconds`, in display order."""


def end_table(summary: Summary) -> Table:
    """Return a table with every figure of a finished run, one per row."""
    table = Table(title=f"run {summary.name}, seed {summary.seed}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("held-out accuracy", _accuracy(summary))
    table.add_row("steps", _steps(summary))
    table.add_row("tokens", f"{summary.tokens:,} generated, {summary.tokens_per_second:,.0f} a second")
    table.add_row("weight updates", f"{summary.updates}, of which {summary.updates_in_flight} with requests in flight")
    table.add_row(
        "update bubble", f"median {milliseconds(summary.bubble_median)}, max {milliseconds(summary.bubble_max)}"
    )
    lost = "not measured" if summary.tokens_lost is None else f"{summary.tokens_lost:,.0f} to {summary.updates} updates"
    table.add_row("tokens lost", lost)
    table.add_row(
        "wasted tokens", Text(f"{summary.wasted_tokens:,}", style="green" if not summary.wasted_tokens else "red")
    )
    table.add_row("unused tokens", f"{summary.unconsumed_tokens:,} generated and not trained on when the run ended")
    if summary.logprob_difference is not None:
        table.add_row(
            "logprob difference", f"|trainer - engine| at most {summary.logprob_difference:.1e} at equal weights"
        )
    table.add_row("mixed versions", f"{summary.multi_version_share:.1%} of completions span an update")
    table.add_row("staleness", _staleness(summary.staleness))
    if summary.idle:
        table.add_row(
            "idle", ", ".join(f"{side} {share:.0%}" for side, share in summary.idle.items()) + " of the steps"
        )
    table.add_row("time", _seconds(summary.seconds))
    return table


def milliseconds(seconds: float) -> str:
    """Format a short time, such as `48 ms`."""
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def clock(seconds: float) -> str:
    """Format a long time, such as `1:05` or `2:00:09`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _accuracy(summary: Summary) -> RenderableType:
    before, after = summary.accuracy_before, summary.accuracy_after
    if before is None or after is None:
        known = ", ".join(f"{value:.1%} after step {step}" for step, value in summary.evaluations.items())
        return known or "not measured"
    points = 100 * (after - before)
    gain = Text(f"({points:+.1f} points)", style="bold green" if points > 0 else "bold red")
    return Text.assemble(f"{before:.1%} before, {after:.1%} after ", gain)


def _steps(summary: Summary) -> str:
    resumed = f", resumed after step {', '.join(map(str, summary.resumed_at))}" if summary.resumed_at else ""
    return f"{summary.steps}{resumed}"


def _staleness(counts: Mapping[int, int]) -> RenderableType:
    total = sum(counts.values())
    if not total:
        return "no token was trained on"
    rows = {f"{age} version{'' if age == 1 else 's'}": count / total for age, count in counts.items()}
    return _bars(rows, {name: f"{share:.1%}" for name, share in rows.items()})


def _seconds(seconds: Mapping[str, float]) -> RenderableType:
    total = seconds.get("total") or sum(seconds.values())
    parts = {label: seconds[key] for key, label in SECONDS_LABELS.items() if seconds.get(key)}
    other = total - sum(parts.values())
    if other > 0.01 * total:
        parts["start and the rest"] = other
    shares = {label: part / total for label, part in parts.items()} if total else {}
    bars = _bars(shares, {label: f"{parts[label]:.1f} s" for label in shares})
    bars.add_row("in all, once started", "", clock(total))
    return bars


def _bars(shares: Mapping[str, float], values: Mapping[str, str]) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(width=BAR_WIDTH)
    grid.add_column(justify="right")
    for name, share in shares.items():
        grid.add_row(name, Bar(1.0, 0.0, share, width=BAR_WIDTH, color="cyan"), values[name])
    return grid
