"""`penstock train` that is interrupted says the command that goes on."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from patience import WAIT_S
from penstock.cli import train
from penstock.cli.common import Interrupted
from penstock.config import load_config
from penstock.observe.run_folder import RunFolder
from run_cli import PENSTOCK, environment, penstock

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


@pytest.mark.parametrize("ended_by", ["Ctrl-C", "fleet stop"])
def test_when_it_is_ended_it_says_the_command_that_goes_on(ended_by: str, tmp_path: Path) -> None:
    (tmp_path / "my run.yaml").write_text(FILE)
    folder = tmp_path / "runs" / "short"
    argv = [PENSTOCK, "train", "my run.yaml", "seed=3", "--fresh"]
    log = tmp_path / "said"
    with log.open("w") as said:
        process = subprocess.Popen(argv, cwd=tmp_path, env=environment(), stdout=said, stderr=said)
    try:
        end = time.monotonic() + WAIT_S
        while not any(folder.glob("checkpoints/*[0-9]/record.json")):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.02)
        if ended_by == "Ctrl-C":
            process.send_signal(signal.SIGINT)
        else:
            url = re.search(r"penstock status (http:\S+) shows them", log.read_text())
            assert url
            assert penstock("fleet", "stop", "--url", url[1]).stdout == "stopped\n"
        assert process.wait(timeout=WAIT_S) == (130 if ended_by == "Ctrl-C" else 1)
    finally:
        process.kill()
        process.wait(timeout=WAIT_S)
    lines = log.read_text().splitlines()
    if ended_by == "fleet stop":
        if lines[-1].startswith("in the rollout of group "):  # a rollout met the end first
            lines.pop()
        assert lines.pop() == "penstock: the fleet was stopped, by `penstock fleet stop` or another program"
    told, _, command = lines[-1].partition(" with: ")
    assert told == "interrupted; runs/short goes on from its last checkpoint"
    assert shlex.split(command) == ["penstock", "train", "my run.yaml", "seed=3", "--resume"]
    assert re.search(r"engines are ready: penstock status http://127\.0\.0\.1:\d+ shows them\n", log.read_text())


@pytest.mark.parametrize("began", [True, False])
def test_before_the_first_checkpoint_it_promises_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, began: bool
) -> None:
    def interrupted(run: Coroutine[Any, Any, object]) -> None:
        run.close()
        if began:
            RunFolder.create(tmp_path / "runs" / "short", load_config("run.yaml"))
        raise Interrupted(signal.SIGINT)

    (tmp_path / "run.yaml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "run_until_signal", interrupted)
    with pytest.raises(Interrupted):
        train._run_here(Path("run.yaml"), [], {}, resume=False, fresh=False)
    first = "the first checkpoint; runs/short starts again with: penstock train run.yaml --resume"
    assert capsys.readouterr().err == f"interrupted before {first if began else 'the run began'}\n"


def test_a_run_that_is_going_on_is_refused_and_its_process_named(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(FILE)
    with RunFolder.lock(tmp_path / "runs" / "short"):
        done = penstock("train", "run.yaml", "--fresh", cwd=tmp_path)
    assert done.returncode == 2
    assert f"the run in runs/short is going on: it is held by process {os.getpid()} on " in " ".join(
        done.stderr.split()
    )


def test_a_run_that_has_ended_starts_nothing_when_resumed(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(FILE)
    of_run = ["train", "run.yaml", "train.steps=2"]
    assert penstock(*of_run, cwd=tmp_path).returncode == 0
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs" / "short").iterdir()}
    done = penstock(*of_run, "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "runs/short has made all of its 2 steps; give a larger train.steps for more"
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs" / "short").iterdir()} == kept
    changed = penstock(*of_run, "seed=7", "--resume", cwd=tmp_path)
    assert (changed.returncode, "seed was 0 and is now 7" in " ".join(changed.stderr.split())) == (2, True)
    assert "resumed after step 2" in penstock("train", "run.yaml", "train.steps=3", "--resume", cwd=tmp_path).stdout
