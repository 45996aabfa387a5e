"""Shows a run: a live panel on a terminal, else a plain line every few steps."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.control_types import UpdateReport
from penstock.observe.summary import Reporter, Summary

ETA_WINDOW = 20
"""Number of last steps whose mean duration predicts the remaining time."""
LINE_EVERY = 5
"""Steps between two plain lines."""
PREPARING = "preparing"
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
        self._figures: dict[str, str] = {}
        """What the panel shows, by the label of its line."""
        self._durations: deque[float] = deque(maxlen=ETA_WINDOW)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, get_renderable=self._panel)
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

    def on_fleet(self, url: str) -> None:
        self._figures["router"] = url
        self._line(f"engines are ready: penstock status {url} shows them")

    def on_step(self, metrics: Mapping[str, float]) -> None:
        self._step = int(metrics["step"])
        self._durations.append(metrics["seconds/step"])
        self._phase = PHASES["train"]
        figures = {
            "reward": f"{metrics['reward_mean']:.3f}",
            "staleness": f"{metrics['staleness_mean']:.2f} (max {metrics['staleness_max']:.0f})",
            "tokens/s": f"{metrics['tokens_per_second']:,.0f}",
            "bubble": milliseconds(metrics["update/bubble"]),
        }
        self._figures |= figures
        if self._step % LINE_EVERY == 0 or self._step == self._steps:
            listed = "  ".join(f"{name} {value}" for name, value in figures.items())
            version, left = f"version {metrics['version']:.0f}", clock(self.eta_s() or 0)
            self._line(f"step {self._step}/{self._steps}  {listed}  {version}  eta {left}")

    def on_update(self, report: UpdateReport) -> None:
        self._figures["engines"] = "  ".join(f"{engine.engine} v{report.version}" for engine in report.engines)
        for engine, reason in report.failures.items():
            self._console.print(f"engine {engine} left the fleet: {reason}", style="yellow", markup=False)

    def on_eval(self, name: str, accuracy: float) -> None:
        self._figures["held-out before" if name == "before" else "held-out"] = f"{accuracy:.1%} {name}"
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
            elapsed = clock(self._now() - self._started)
            self._console.print(f"[{elapsed}] {text}", markup=False, highlight=False, soft_wrap=True)

    def _panel(self) -> RenderableType:
        left = self.eta_s()
        times = f"{clock(self._now() - self._started)} elapsed" + ("" if left is None else f", {clock(left)} left")
        bar = ProgressBar(total=self._steps, completed=self._step, width=32, complete_style="cyan")
        rows = {f"step {self._step}/{self._steps}": bar, "time": times, "now": self._phase, **self._figures}
        return Panel(_rows(rows), title=f"penstock train: {self._name}", title_align="left", expand=False)


def end_table(summary: Summary) -> Table:
    """Return a table with the main figures of a finished run, one per row. summary.json has all of them."""
    resumed = f", resumed after step {', '.join(map(str, summary.resumed_at))}" if summary.resumed_at else ""
    gap, lost = summary.logprob_difference, summary.tokens_lost
    idle = ", ".join(f"{side} {share:.0%}" for side, share in summary.idle.items())
    rows = {
        "held-out accuracy": _accuracy(summary),
        "training steps": f"{summary.steps}{resumed}",
        "wall time": f"{timedelta(seconds=round(summary.seconds['total']))} (h:mm:ss)",
        "generated": f"{summary.tokens:,} tokens, {summary.tokens_per_second:,.0f} tokens/s over all engines",
        "wasted tokens": f"{summary.wasted_tokens:,} thrown away, {summary.unconsumed_tokens:,} not used at the end",
        "weight updates": f"{summary.updates}, of these {summary.updates_in_flight} with requests in flight",
        "update bubble": f"median {milliseconds(summary.bubble_median)}, longest {milliseconds(summary.bubble_max)}",
        "lost by updates": "not measured" if lost is None else f"{lost:,.0f} tokens that engines would have made",
        "mixed versions": f"{summary.multi_version_share:.1%} of completions have tokens of several versions",
        "token staleness": _shares({f"{age} version{'s' * (age != 1)}": n for age, n in summary.staleness.items()}),
        "logprob difference": "not measured"
        if gap is None
        else f"at most {gap:.1e} nats, trainer to engine at equal weights",
        "idle": f"{idle} of the steps' time" if idle else "not measured",
        "trainer's time": _shares({name: s for name, s in summary.seconds.items() if name != "total"}),
    }
    table = Table(title=f"run {summary.name}, seed {summary.seed}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    for name, value in rows.items():
        table.add_row(name, value)
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
    return Text.assemble(f"{before:.1%} before training, {after:.1%} after ", gain)


def _shares(parts: Mapping[str, float]) -> str:
    """Return the share of each part that is not 0."""
    total = sum(parts.values())
    return ", ".join(f"{name} {part / total:.1%}" for name, part in parts.items() if part)


def _rows(figures: Mapping[str, RenderableType]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    for name, value in figures.items():
        grid.add_row(name, value)
    return grid
