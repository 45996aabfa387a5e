"""The table at the end of a run: every figure that says whether it went well."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from penstock.observe.summary import Summary

BAR_WIDTH = 24
SECONDS_LABELS: Mapping[str, str] = {
    "waiting": "waiting for rollouts",
    "training": "training",
    "update": "updating weights",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
}
"""How the parts of `Summary.seconds` are called, in the order shown; generation goes on during all of them."""


def end_table(summary: Summary) -> Table:
    """Every figure of a finished run, one a row."""
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
    table.add_row("time", _seconds(summary.seconds))
    return table


def milliseconds(seconds: float) -> str:
    """A short time to read, such as `48 ms`."""
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def clock(seconds: float) -> str:
    """A long time to read, such as `1:05` or `2:00:09`."""
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


def _bars(shares: Mapping[str, float], figures: Mapping[str, str]) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(style="cyan", width=BAR_WIDTH)
    grid.add_column(justify="right")
    for name, share in shares.items():
        grid.add_row(name, bar(share, BAR_WIDTH), figures[name])
    return grid


def bar(share: float, width: int) -> str:
    """A bar of `share` (0 to 1) of `width` cells, drawn in eighths of a cell."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")
