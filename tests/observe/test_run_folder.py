"""The run folder: one row a step whatever happens, and no second run on top of a first."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from patience import WAIT_S
from penstock.config import RunConfig
from penstock.errors import ConfigError, UserError
from penstock.observe.run_folder import SHOWN, RunFolder, pick, record_of, to_markdown
from penstock.observe.summary import Summary
from penstock.rollout.generator import Trajectory
from penstock.settings import EngineConfig


def config_of(**changes: object) -> RunConfig:
    return RunConfig.model_validate({"engine": {"model": "m", "extra_args": {"block-size": 32}}, **changes})


def trajectory(versions: tuple[int, ...] = (3, 3, 4), group: str = "7") -> Trajectory:
    n = len(versions)
    return Trajectory(
        prompt_ids=(1, 2),
        response_ids=tuple(range(10, 10 + n)),
        loss_mask=(1,) * n,
        logprobs=(-0.5,) * n,
        versions=versions,
        reward=1.0,
        stop_reason="stop",
        group_id=group,
    )


def decode(ids: object) -> str:
    return "".join(chr(96 + i % 26) for i in ids)  # pyright: ignore[reportGeneralTypeIssues]


def row(step: int, **values: float) -> dict[str, float]:
    return {
        "step": step,
        "samples": 10,
        "multi_version_share": 0.5,
        "generated_tokens": 100,
        "seconds/step": 2.0,
        "update/bubble": 0.01 * step,
        "update/preempted": step - 1,
        "staleness/0": 5,
        **values,
    }


def test_only_a_run_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert not RunFolder.remove(path)
    path.mkdir()
    (path / "metrics.jsonl").write_text("figures of something else")
    assert not RunFolder.remove(path)
    (path / "metrics.jsonl").unlink()
    RunFolder.create(path, config_of()).append_metrics(row(1))
    (path / "checkpoints").mkdir()
    (path / "checkpoints" / "step-00000001.safetensors").touch()
    assert RunFolder.remove(path)
    assert not list(tmp_path.iterdir())


HOLDER = """
import os, sys
from pathlib import Path
from penstock.observe.run_folder import RunFolder

with RunFolder.lock(Path(sys.argv[1])):
    if not os.fork():
        print(os.getpid(), flush=True)
    sys.stdin.read()
"""


def test_a_run_that_another_process_holds_is_refused_and_its_death_frees_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            child = psutil.Process(int(holder.stdout.readline()))
            since = rf"held by process {holder.pid} on \S+ since 2\d\d\d-\S+ \S+;"
            with pytest.raises(UserError, match=since), RunFolder.lock(tmp_path / "run"):
                pass
            (tmp_path / "other name").symlink_to(tmp_path / "run")
            with pytest.raises(UserError, match=since), RunFolder.lock(tmp_path / "other name"):
                pass
            holder.kill()
            holder.wait(timeout=WAIT_S)
            assert child.is_running()  # a forked child, which has not the lock
            with RunFolder.lock(tmp_path / "run"):
                pass
        finally:
            holder.kill()


def test_other_users_cannot_take_a_lock(tmp_path: Path) -> None:
    with RunFolder.lock(tmp_path / "run"):
        assert stat.S_IMODE((tmp_path / ".run.lock").stat().st_mode) == 0o600


def test_a_disk_that_is_full_is_said_to_take_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with (
        pytest.raises(UserError, match=r"cannot lock .*No space left.*choose a run_dir"),
        RunFolder.lock(tmp_path / "x"),
    ):
        pass


def test_a_folder_that_takes_no_lock_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write .*file/\.run\.lock"), RunFolder.lock(tmp_path / "file" / "run"):
        pass


def test_a_run_that_cannot_be_removed_is_an_error_and_not_a_mixture(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "real", config_of()).append_metrics(row(1))
    (tmp_path / "run").symlink_to(tmp_path / "real")
    with pytest.raises(UserError, match=r"cannot remove the run in .*run"):
        RunFolder.remove(tmp_path / "run")
    assert len(RunFolder.open(tmp_path / "real").metrics()) == 1


def test_a_run_that_never_made_a_step_is_replaced(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, config_of()).append_evaluation(0, 0.5)
    folder = RunFolder.create(tmp_path, config_of(seed=9))
    assert folder.evaluations() == {}
    assert RunFolder.open(tmp_path).config.seed == 9


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"seed": 5}, "seed was 0 and is now 5"),
        ({"train": {"learning_rate": 0.5}}, "train.learning_rate was 0.0001 and is now 0.5"),
        ({"environment": {"options": {"dataset": "x"}}}, "environment.options"),
        ({"engine": {"model": "other"}}, "engine.model was 'm' and is now 'other'"),
    ],
)
def test_resuming_with_another_configuration_names_the_key(
    tmp_path: Path, changes: dict[str, object], key: str
) -> None:
    folder = RunFolder.create(tmp_path, config_of())
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        folder.check_resumable(config_of(**changes))


def test_rows_survive_and_truncation_drops_what_came_later(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, config_of())
    for step in range(1, 6):
        folder.append_metrics(row(step))
        folder.append_trajectories([record_of(step, trajectory(), decode)])
        folder.append_evaluation(step, step / 10)
    dropped = folder.truncate(3)
    assert [r["step"] for r in dropped] == [4, 5]
    assert [r["step"] for r in folder.metrics()] == [1, 2, 3]
    assert [r["step"] for r in folder.trajectories()] == [1, 2, 3]
    assert folder.evaluations() == {1: 0.1, 2: 0.2, 3: 0.3}


def test_a_row_cut_short_by_a_kill_is_no_row(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, config_of())
    folder.append_metrics(row(1))
    with (tmp_path / "metrics.jsonl").open("a") as out:
        out.write('{"step": 2, "sam')
    assert [r["step"] for r in folder.metrics()] == [1]
    folder.truncate(1)
    folder.append_metrics(row(2))
    assert [r["step"] for r in folder.metrics()] == [1, 2]


def test_a_completion_of_two_versions_is_recorded_where_there_is_one() -> None:
    plain, mixed = trajectory((1, 1)), trajectory((1, 2))
    assert pick([plain, plain, mixed, mixed]) == [plain, mixed]
    assert pick([plain, plain]) == [plain]
    assert pick([]) == []


def test_markdown_shows_every_token_and_survives_bars_and_backticks() -> None:
    record = record_of(2, trajectory(), lambda ids: "|`" * len(ids) + "``" * (len(ids) > 1))
    text = to_markdown([record])
    assert "## Step 2, group 7, reward 1" in text
    assert "made by weight version 3, 4" in text
    assert '| 2 | 12 | ``"\\|`"`` | -0.5000 | 4 |' in text
    assert 'Response: ````"\\|`\\|`\\|```"````\n' in text, "a fence longer than any within"


def test_markdown_shows_the_first_the_last_and_no_more_than_it_says() -> None:
    records = [record_of(step, trajectory(), decode) for step in range(1, 101)]
    text = to_markdown(records)
    assert text.count("## Step") == SHOWN
    assert "## Step 1," in text
    assert "## Step 100," in text
    assert to_markdown([]).startswith("# Sample trajectories")


def test_the_summary_adds_up_the_rows(tmp_path: Path) -> None:
    rows = [
        row(1, **{"staleness/0": 80, "logprob_difference": 1e-6}),
        row(2, **{"staleness/0": 10, "staleness/1": 60, "logprob_difference": 3e-6, "samples": 30}),
        row(3, **{"staleness/1": 5, "staleness/2": 4, "multi_version_share": 0.0, "update/tokens_lost": 40.0}),
    ]
    rows[0]["update/kept"] = 3
    summary = Summary.of(
        rows,
        name="r",
        seed=1,
        resumed_at=[2],
        evaluations={3: 0.75, 0: 0.5},
        wasted_tokens=7,
        unconsumed_tokens=0,
        seconds={"total": 6.0},
    )
    assert summary.staleness == {0: 95, 1: 65, 2: 4}
    assert (summary.steps, summary.updates, summary.updates_in_flight, summary.tokens) == (3, 3, 3, 300)
    assert summary.tokens_lost == 40.0
    unmeasured = Summary.of(
        rows[:2], name="r", seed=1, resumed_at=[], evaluations={}, wasted_tokens=0, unconsumed_tokens=0, seconds={}
    )
    assert unmeasured.tokens_lost is None, "nothing was measured"
    assert summary.tokens_per_second == pytest.approx(50.0)
    assert (summary.bubble_median, summary.bubble_max) == (pytest.approx(0.02), pytest.approx(0.03))
    assert summary.multi_version_share == pytest.approx((5 + 15) / 50)
    assert summary.logprob_difference == 3e-6
    assert (summary.accuracy_before, summary.accuracy_after) == (0.5, 0.75)
    assert summary.versions["python"]
    folder = RunFolder.create(tmp_path, config_of())
    with pytest.raises(UserError, match="has not ended"):
        folder.summary()
    folder.write_summary(summary)
    assert folder.summary()["accuracy_after"] == 0.75
    assert json.loads((tmp_path / "summary.json").read_text())["staleness"] == {"0": 95, "1": 65, "2": 4}


def test_a_folder_that_cannot_be_made_is_said_to_be_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write the run folder .*; choose another run_dir"):
        RunFolder.create(tmp_path / "file" / "run", RunConfig(engine=EngineConfig(model="m")))


def test_a_broken_row_is_named(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, RunConfig(engine=EngineConfig(model="m")))
    for row in ('{"step"', "[" * 100_000, "7", "[]", "{}", '{"step": 1e999}', '{"step": "2"}'):
        (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "loss": NaN}}\n{row}\n')
        with pytest.raises(UserError, match=r"metrics\.jsonl, line 2.*restore the file|its step is a whole number"):
            folder.metrics()
