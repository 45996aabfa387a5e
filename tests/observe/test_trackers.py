"""Trackers beside the run folder, without a network."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock.config import RunConfig, load_config
from penstock.errors import ConfigError, UserError
from penstock.observe import trackers
from penstock.observe.run_folder import HELD_OUT, RunFolder
from penstock.observe.trackers import check_trackers, tracked
from penstock.settings import EngineConfig


class Kept:
    """Keeps figures; refuses them from a step on."""

    is_new = True

    def __init__(self, refused: int = 99) -> None:
        self.figures: list[tuple[int, dict[str, float]]] = []
        self.refused = refused

    def log(self, figures: Any, step: int) -> None:
        if step >= self.refused:
            raise ConnectionError("no route")
        self.figures.append((step, dict(figures)))

    def close(self) -> None: ...


def config_with(*names: str) -> RunConfig:
    return RunConfig.model_validate({"engine": EngineConfig(model="m"), "trackers": names, "train": {"steps": 5}})


def test_steps_and_evaluations_go_to_each_tracker_and_a_failing_one_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = Kept(), Kept(refused=3)
    monkeypatch.setattr(trackers, "TRACKERS", {"tensorboard": lambda *_: bad, "wandb": lambda *_: good})
    folder = RunFolder.create(tmp_path, config_with())
    with tracked(config_with("tensorboard", "wandb"), folder):
        folder.append_evaluation(0, 0.25)
        for step in (2, 3, 4):
            folder.append_metrics({"step": step, "reward_mean": 0.5})
        folder.append_evaluation(4, 0.5)
    assert [step for step, _ in good.figures] == [0, 2, 3, 4, 4]
    assert good.figures[0] == (0, {HELD_OUT: 0.25})
    assert good.figures[-1] == (4, {HELD_OUT: 0.5})
    assert [step for step, _ in bad.figures] == [0, 2]
    assert [row["step"] for row in folder.metrics()] == [2, 3, 4]


def test_a_tracker_that_is_no_list_is_said_to_be_one() -> None:
    with pytest.raises(ConfigError, match=r"'trackers': must be a list, such as \[a, b\], got 'wandb'"):
        load_config(None, ["engine.model=m", "trackers=wandb"])


def test_a_resumed_run_gives_its_trackers_the_evaluations_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As trackers that begin with the resumption need, and wandb's, whose resumed run is another one."""
    folder, kept, bad = RunFolder.create(tmp_path, config_with()), Kept(), Kept(refused=2)
    for step in (0, 2, 4):
        folder.append_evaluation(step, step / 4)
    monkeypatch.setattr(trackers, "TRACKERS", {"wandb": lambda *_: kept, "tensorboard": lambda *_: bad})
    before = folder.on_figures
    with tracked(config_with("wandb", "tensorboard"), folder, 2):  # the checkpoint is of step 2, so 4 comes again
        folder.append_evaluation(4, 0.9)
    assert kept.figures == [(0, {HELD_OUT: 0.0}), (2, {HELD_OUT: 0.5}), (4, {HELD_OUT: 0.9})]
    assert [step for step, _ in bad.figures] == [0]
    assert caplog.text.count("it gets no more figures") == 1
    assert folder.on_figures is before
    folder.append_evaluation(5, 0.95)
    assert len(kept.figures) == 3, "the block that tracked has ended"


def test_tensorboard_of_a_resumed_run_lacks_no_evaluation_and_has_each_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = config_with("tensorboard")
    folder = RunFolder.create(tmp_path, config)
    folder.append_evaluation(0, 0.25)  # before it had a tracker
    with tracked(config, folder, 0):
        for step in (1, 2):
            folder.append_metrics({"step": step, "reward_mean": step / 4})
    with tracked(config, folder, 0):  # killed before its first checkpoint
        folder.append_metrics({"step": 1, "reward_mean": 1.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars(HELD_OUT)] == [(0, 0.25)]
    assert [(e.step, e.value) for e in events.Scalars("reward_mean")] == [(1, 1.0)]


def test_wandb_gets_config_and_figures_and_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in with wandb's names; the real one is not among the packages of the tests."""
    calls: list[tuple[str, Any]] = []

    class Run:
        def define_metric(self, name: str, step_metric: str) -> None:
            calls.append(("define_metric", (name, step_metric)))

        def log(self, figures: Any) -> None:
            calls.append(("log", figures))

        def finish(self) -> None:
            calls.append(("finish", None))

    def init(**settings: Any) -> Run:
        calls.append(("init", settings))
        return Run()

    stand_in = ModuleType("wandb")
    stand_in.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    config = config_with("wandb")
    folder = RunFolder.create(tmp_path, config)
    with tracked(config, folder):
        folder.append_metrics({"step": 1, "reward_mean": 0.5})
    assert [name for name, _ in calls] == ["init", "define_metric", "log", "finish"]
    assert calls[0][1]["dir"] == str(tmp_path)
    assert calls[0][1]["config"]["train"]["steps"] == 5
    assert calls[1][1] == ("*", "step"), "evaluations are no steps"
    assert calls[2][1] == {"step": 1, "reward_mean": 0.5}


def test_a_tracker_that_does_not_start_is_named_and_one_that_fails_at_its_end_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Unclosed(Kept):
        def close(self) -> None:
            raise ConnectionError("no route")

    def no_key(*_: Any) -> Any:
        raise ValueError("No API key\n  configured.")

    monkeypatch.setattr(trackers, "TRACKERS", {"tensorboard": lambda *_: Unclosed(), "wandb": no_key})
    folder = RunFolder.create(tmp_path, config_with())
    with tracked(config_with("tensorboard"), folder):
        pass
    assert "tensorboard failed (no route) at its end" in caplog.text
    with (
        pytest.raises(UserError, match=r"wandb failed \(No API key configured\.\); leave it out, or have wandb"),
        tracked(config_with("wandb"), folder),
    ):
        raise AssertionError("the block is not reached")


def test_a_folder_of_wandbs_files_is_no_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UserError, match="wandb is not installed"):
        check_trackers(["wandb"])
