from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from sample_run import sample_report, sample_rows, sample_summary

from penstock.observe.progress import LINE_EVERY, RunDisplay, clock, end_table, milliseconds
from penstock.observe.summary import Reporter


class Run:
    """A run of `steps` steps told to a display, and what that wrote."""

    def __init__(self, *, terminal: bool, steps: int = 20, width: int = 100) -> None:
        self.out = io.StringIO()
        self.rows = sample_rows(steps)
        self.console = Console(file=self.out, force_terminal=terminal, width=width, _environ={"TERM": "xterm"})
        self.display = RunDisplay("demo", steps, console=self.console, clock_s=lambda: 65.0)

    def steps(self, count: int) -> None:
        reporter: Reporter = self.display
        reporter.on_phase("evaluate")
        reporter.on_eval("before", 0.441)
        reporter.on_phase("train")
        for row in self.rows[:count]:
            reporter.on_update(sample_report(int(row["version"]), row["update/bubble"]))
            reporter.on_step(row)


def test_plain_lines_where_there_is_no_terminal() -> None:
    run = Run(terminal=False)
    with run.display:
        run.steps(20)
        run.display.on_end(sample_summary(run.rows))
    text = run.out.getvalue()
    assert "\x1b" not in text
    lines = [line for line in text.splitlines() if " step " in line]
    assert [line.split(" step ")[1].split()[0] for line in lines] == [
        f"{n}/20" for n in range(LINE_EVERY, 21, LINE_EVERY)
    ]
    assert "held-out accuracy before: 44.1%" in text
    assert "version 20" in lines[-1]
    assert "44.1% before" in text
    assert "71.3% after" in text


def test_a_terminal_has_a_live_panel_and_is_given_back_when_the_run_fails() -> None:
    run = Run(terminal=True)
    with pytest.raises(RuntimeError), run.display:  # noqa: PT012 - the error has to come from inside
        run.steps(7)
        raise RuntimeError
    text = run.out.getvalue()
    for piece in ("step 7/20", "44.1% before", "engine-0 v7", "engine-1 v7", "bubble", "tokens/s", "left"):
        assert piece in text
    assert "[0:00] step" not in text
    assert text.rstrip().endswith("\x1b[?25h"), "the cursor is shown again"


@pytest.mark.parametrize("terminal", [True, False])
def test_the_router_is_named_for_penstock_status(*, terminal: bool) -> None:
    run = Run(terminal=terminal)
    with run.display:
        run.display.on_fleet("http://127.0.0.1:4033")
    assert "http://127.0.0.1:4033" in run.out.getvalue()
    assert ("penstock status http://127.0.0.1:4033" in run.out.getvalue()) is not terminal


def test_what_is_left_is_by_the_last_steps_and_an_engine_that_left_is_named() -> None:
    run = Run(terminal=False)
    assert run.display.eta_s() is None
    for row in run.rows[:10]:
        run.display.on_step({**row, "seconds/step": 2.0})
    assert run.display.eta_s() == pytest.approx(20.0)
    run.display.on_update(sample_report(1, failures={"engine-1": "its [checksum] differs"}))
    assert "engine engine-1 left the fleet: its [checksum] differs" in run.out.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_table_fits_the_terminal(width: int) -> None:
    run = Run(terminal=False, width=width)
    run.console.print(end_table(sample_summary(run.rows)))
    lines = run.out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(run.out.getvalue().split())
    for piece in ("+27.2 points", "wasted tokens │ 0 thrown away, 4,120 not", "1 version ", "2 versions", "median 4"):
        assert piece in text
    for unit in ("wall time │ 0:0", "tokens/s", "nats", "in flight", "44.1% before training"):
        assert unit in text
    summary = sample_summary(run.rows)
    assert f"{summary.staleness[0] / sum(summary.staleness.values()):.1%}" in text
    parts = sum(seconds for name, seconds in summary.seconds.items() if name != "total")
    assert f"training {summary.seconds['training'] / parts:.1%}" in text
    run.console.print(end_table(sample_summary(run.rows, evaluations={})))
    assert "held-out accuracy │ not measured" in " ".join(run.out.getvalue().split())
    run.console.print(end_table(replace(summary, logprob_difference=None)))
    assert "logprob difference │ not measured" in " ".join(run.out.getvalue().split())


def test_times() -> None:
    assert [clock(s) for s in (5, 65.4, 7209)] == ["0:05", "1:05", "2:00:09"]
    assert [milliseconds(s) for s in (0.0448, 1.234)] == ["45 ms", "1.23 s"]
