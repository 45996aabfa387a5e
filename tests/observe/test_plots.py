from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from PIL import Image
from sample_run import sample_rows, sample_summary

from penstock.config import RunConfig
from penstock.errors import UserError
from penstock.observe.plots import (
    COLORS,
    DrawnRun,
    Panel,
    curves,
    draw_accuracy,
    draw_bubble,
    draw_logprobs,
    draw_plots,
    draw_seconds,
    draw_staleness,
)
from penstock.observe.run_folder import RunFolder
from penstock.settings import EngineConfig


def folder_with(path: Path, rows: list[dict[str, float]]) -> RunFolder:
    folder = RunFolder.create(path, RunConfig(engine=EngineConfig(model="m")))
    for row in rows:
        folder.append_metrics(row)
    return folder


def test_a_run_is_a_readable_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # For a run of thousands of steps the search of a free place takes seconds, and warns.
    monkeypatch.delattr(Legend, "_find_best_position")
    rows = sample_rows(12)
    folder = folder_with(tmp_path, rows)
    folder.write_summary(sample_summary(rows))
    draw_plots([folder], tmp_path / "plots.png")
    with Image.open(tmp_path / "plots.png") as picture:
        assert picture.width >= 2000
        assert len(picture.convert("RGB").getcolors(maxcolors=2**24)) > 100


def test_a_run_under_way_is_drawn_too(tmp_path: Path) -> None:
    [row] = sample_rows(1)
    del row["logprob_difference"]  # no token of the trainer's own version yet
    draw_plots([folder_with(tmp_path, [row])], tmp_path / "plots.png")


def panel(draw: Panel, *runs: DrawnRun) -> Axes:
    axes = Figure().add_subplot()
    draw(axes, runs)
    return axes


def drawn(rows: list[dict[str, float]], evaluations: dict[int, float] | None = None) -> DrawnRun:
    return DrawnRun("a", "#0072B2", rows, evaluations or {})


def test_a_short_run_is_drawn_as_it_is_and_a_long_one_smoothed_too() -> None:
    draw = curves("Reward", "mean", "reward_mean")
    [line] = panel(draw, short := drawn(sample_rows(5))).lines
    assert list(line.get_ydata()) == short.column("reward_mean")
    axes = panel(draw, drawn(sample_rows(60)))
    values, means = (list(line.get_ydata()) for line in axes.lines)
    assert means[30] == pytest.approx(sum(values[26:35]) / 9)
    assert "mean of 9 steps" in axes.get_xlabel()


@pytest.mark.parametrize("draw", [draw_seconds, draw_bubble, draw_logprobs])
def test_a_legend_covers_nothing_of_its_panel(draw: Panel) -> None:
    axes = panel(draw, drawn(sample_rows(5)))
    FigureCanvasAgg(axes.get_figure(root=True)).draw()
    assert not axes.get_legend().get_window_extent().overlaps(axes.get_window_extent())


def test_accuracy_is_shown_from_before_the_first_step() -> None:
    run = drawn(sample_rows(10), {0: 0.44, 10: 0.7})
    [line] = panel(draw_accuracy, run).lines
    assert list(line.get_xdata()) == [0, run.minutes()[-1]]
    assert list(line.get_ydata()) == [0.44, 0.7]


def test_seconds_stack_to_the_whole_step_with_what_was_done_after_it() -> None:
    rows = sample_rows(42)
    *_, evaluation, top = panel(draw_seconds, drawn(rows)).containers
    assert evaluation.get_label() == "evaluation"
    shown = {row["step"]: bar.get_height() for row, bar in zip(rows, evaluation, strict=True) if bar.get_height()}
    assert shown == pytest.approx({20: 0.8, 40: 0.8}), "on the step after which it was made"
    extra = {20: 1.1, 21: -1.1, 40: 1.1, 41: -1.1}  # a checkpoint too
    ends = [bar.get_y() + bar.get_height() for bar in top]
    assert ends == pytest.approx([row["seconds/step"] + extra.get(int(row["step"]), 0.0) for row in rows])


def test_the_sleep_of_colocated_engines_is_drawn_by_itself() -> None:
    axes = panel(draw_seconds, drawn([{**row, "seconds/sleep": 0.25} for row in sample_rows(3)]))
    [sleep] = [bars for bars in axes.containers if bars.get_label() == "sleep and wake-up"]
    assert [bar.get_height() for bar in sleep] == [0.25] * 3


def test_staleness_shares_add_up_and_no_age_is_left_out() -> None:
    [bars] = panel(draw_staleness, drawn([{"staleness/0": 30, "staleness/3": 10}, {"staleness/0": 40}])).containers
    assert [bar.get_height() for bar in bars] == pytest.approx([0.875, 0, 0, 0.125])


def test_runs_are_compared_in_one_picture(tmp_path: Path) -> None:
    runs = [folder_with(tmp_path / name, sample_rows(12, seed)) for seed, name in enumerate("abc")]
    runs[0].append_evaluation(0, 0.4)  # the others say nothing of it
    runs[0].append_evaluation(12, 0.6)
    draw_plots(runs, tmp_path / "deep" / "comparison.png")
    with Image.open(tmp_path / "deep" / "comparison.png") as picture:
        colors = {color for _, color in picture.convert("RGB").getcolors(maxcolors=2**24)}
        assert {tuple(bytes.fromhex(color[1:])) for color in COLORS[:3]} <= colors


def test_a_comparison_that_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    run = folder_with(tmp_path / "run", sample_rows(1))
    with pytest.raises(UserError, match="9 runs are too many for one picture; give at most 8"):
        draw_plots([run] * 9, tmp_path / "c.png")
    with pytest.raises(UserError, match="no step to plot yet"):
        draw_plots([run, folder_with(tmp_path / "none", [])], tmp_path / "c.png")
    with pytest.raises(UserError, match=r"cannot write .*c\.nothing"):
        draw_plots([run, run], tmp_path / "new" / "c.nothing")
    assert not (tmp_path / "new").exists()
    run.append_metrics({"step": 3})
    with pytest.raises(UserError, match=r"run/metrics.jsonl has a row without 'version': is it of another"):
        draw_plots([run], tmp_path / "c.png")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"cannot write .*folder"):
        draw_plots([folder_with(tmp_path / "other", sample_rows(1))], tmp_path / "folder")
