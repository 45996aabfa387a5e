"""`penstock train` that is interrupted says how far it is, and the command that goes on."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from run_cli import END_S, PENSTOCK, environment, penstock

from penstock.cli import train as train_module
from penstock.cli.common import Interrupted
from penstock.config import RunConfig
from penstock.observe.run_folder import RunFolder

START_S = 120.0
"""Within which a run has made two steps, most of it importing; generous, for a machine with other things to do."""
MODEL = Path(__file__).parents[2] / "examples" / "models" / "sorter-0.8m"
FILE = f"""
name: short
engine: {{model: {MODEL}, profile: sim, max_model_len: 128, extra_args: {{vocab-size: 96, tokens-per-second: 5000}}}}
environment:
  name: reasoning_gym
  options: {{dataset: number_sorting, compact: true, min_numbers: 3, max_numbers: 5, min_decimals: 0, max_decimals: 0}}
rollout: {{groups_per_batch: 2, group_size: 2, max_tokens: 8}}
train: {{steps: 100000, checkpoint_every: 2, threads: 1}}
eval: {{size: 4}}
"""


def test_after_ctrl_c_it_says_how_far_it_is_and_the_command_that_goes_on(tmp_path: Path) -> None:
    (tmp_path / "my run.yaml").write_text(FILE)
    folder = tmp_path / "runs" / "short"
    said = _interrupted(
        tmp_path,
        "train",
        "my run.yaml",
        "seed=3",
        "--fresh",
        when=lambda: any(folder.glob("checkpoints/*[0-9]/record.json")),
    )
    done, _, command = said.splitlines()[-1].partition("; go on with: ")
    steps = (folder / "metrics.jsonl").read_text().count("\n")
    assert (done, steps >= 2) == (f"interrupted after step {steps}", True)
    assert shlex.split(command) == ["penstock", "train", "my run.yaml", "seed=3", "--resume"]


@pytest.mark.parametrize("flags", [["--fresh"], ["--resume"], []], ids=str)
def test_a_run_that_is_going_on_is_refused_and_its_process_named(tmp_path: Path, flags: list[str]) -> None:
    (tmp_path / "run.yaml").write_text(FILE)
    with RunFolder.lock(tmp_path / "runs" / "short"):
        done = penstock("train", "run.yaml", *flags, cwd=tmp_path)
    assert done.returncode == 2
    assert f"the run in runs/short is going on: it is held by process {os.getpid()} on " in " ".join(
        done.stderr.split()
    )


def _interrupted(folder: Path, *args: str, when: Callable[[], bool]) -> str:
    """What the command says when it is interrupted; `when` is seen in its files, the one thing without an event."""
    log = folder / "said"
    with log.open("w") as said:
        process = subprocess.Popen([PENSTOCK, *args], cwd=folder, env=environment(), stdout=said, stderr=said)
    try:
        end = time.monotonic() + START_S
        while not when():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=END_S) == 128 + signal.SIGINT
    finally:
        process.kill()
        process.wait(timeout=END_S)
    return log.read_text()


NO_CHECKPOINT = "and there is no checkpoint yet (train.checkpoint_every=20); start over with: {command} --fresh"


@pytest.mark.parametrize(
    ("steps", "checkpoint", "says"),
    [
        (23, True, "interrupted after step 23; go on with: {command} --resume"),
        (7, False, f"interrupted after step 7, {NO_CHECKPOINT}"),
        (0, False, f"interrupted before the end of the first step, {NO_CHECKPOINT}"),
        (None, False, "interrupted before the run began"),
    ],
)
@pytest.mark.parametrize("earlier", [True, False], ids=["over an earlier run", "as the first"])
def test_what_an_interrupted_run_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    steps: int | None,
    checkpoint: bool,
    says: str,
    earlier: bool,
) -> None:
    """The earlier run has steps and a checkpoint, which are not this one's."""
    file = tmp_path / "run.yaml"
    file.write_text(f"run_dir: {tmp_path}\nengine: {{model: m, profile: sim}}\nrouter: {{port: 0}}\n")
    if earlier:
        _leave(RunConfig.model_validate({"run_dir": tmp_path, "engine": {"model": "m"}}), steps=99, checkpoint=True)

    def interrupted(settings: RunConfig, launched: Mapping[str, str], *, resume: bool, fresh: bool) -> None:
        assert (resume, fresh, launched) == (False, True, {})
        if steps is not None:
            RunFolder.remove(settings.run_dir / settings.name)
            _leave(settings, steps=steps, checkpoint=checkpoint)
        raise Interrupted(signal.SIGINT)

    monkeypatch.setattr(train_module, "_train", interrupted)
    with pytest.raises(Interrupted):
        train_module.train(file, ["train.adam_betas=[0.8, 0.9]"], fresh=True)
    assert capsys.readouterr().err == says.format(command=f"penstock train {file} 'train.adam_betas=[0.8, 0.9]'") + "\n"


def _leave(settings: RunConfig, *, steps: int, checkpoint: bool) -> None:
    folder = RunFolder.create(settings.run_dir / settings.name, settings)
    for step in range(1, steps + 1):
        folder.append_metrics({"step": step})
    if checkpoint:
        checkpoint_folder = folder.path / "checkpoints" / "step-00000020"
        checkpoint_folder.mkdir(parents=True)
        (checkpoint_folder / "record.json").touch()
