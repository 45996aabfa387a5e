"""The main job on real engines: in a short form that is killed and taken up again, and whole (slow)."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from patience import alive, eventually

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parent.parent.parent
DEMO = ROOT / "examples" / "DEMO.yaml"
SHORT = (
    "fleet.engines=1", "train.steps=6", "train.checkpoint_every=2", "rollout.groups_per_batch=8", "eval.size=48",
)  # fmt: skip


@pytest.mark.slow
async def test_a_killed_demo_is_taken_up_again_and_ends(tmp_path):
    arguments = [str(DEMO), *SHORT, f"run_dir={tmp_path}", "name=short"]
    folder = tmp_path / "short"
    first = await _three_steps_on(folder, arguments)
    engines = psutil.Process(first.pid).children(recursive=True)
    assert engines
    first.send_signal(signal.SIGKILL)
    await first.wait()
    await eventually(lambda: not any(alive(p.pid) for p in engines), 60)

    out = await trained(*arguments, "--resume", seconds=200)
    rows = _rows(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["version"] for row in rows] == [1, 2, 3, 4, 5, 6]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["updates"] == 6
    assert summary["resumed_at"] in ([2], [4])
    assert max(row["staleness_max"] for row in rows) <= 1
    # The first step's tokens are all of version 0, which trainer and engine loaded from the same file.
    assert 0 < rows[0]["logprob_difference"] <= 1e-4
    assert (folder / "plots.png").exists()
    assert "weight version" in (folder / "trajectories.md").read_text().lower()
    assert b"held-out accuracy" in out


@pytest.mark.slow
async def test_a_learner_of_two_processes_trains_it(tmp_path):
    overrides = ("train.ranks=2", "train.steps=2", f"run_dir={tmp_path}", "name=ranks")
    await trained(str(DEMO), *SHORT, *overrides, seconds=280)
    rows = _rows(tmp_path / "ranks")
    assert [row["version"] for row in rows] == [1, 2]
    assert 0 < rows[0]["logprob_difference"] <= 1e-4
    assert all(row.get("logprob_difference", 0.0) <= 1e-4 for row in rows)  # of tokens of gathered weights too


@pytest.mark.slow
async def test_a_run_that_loses_a_rank_says_so_and_is_taken_up_again(tmp_path):
    arguments = [str(DEMO), *SHORT, "train.ranks=2", f"run_dir={tmp_path}", "name=lost"]
    folder = tmp_path / "lost"
    first = await _three_steps_on(folder, arguments)
    started = psutil.Process(first.pid).children(recursive=True)
    (rank,) = (process for process in started if "penstock.train.ranks" in process.cmdline())
    rank.send_signal(signal.SIGKILL)
    out, _ = await asyncio.wait_for(first.communicate(), 100)
    assert first.returncode == 1, out.decode()
    said = " ".join(out.decode().split())
    assert f"rank 1 of the learner (pid {rank.pid}) ended with status -9" in said
    assert "Go on from the last checkpoint with --resume" in said
    assert all(row["update/failures"] == 0 for row in _rows(folder)), "the engines were whole"
    assert not any(alive(process.pid) for process in started)

    await trained(*arguments, "--resume", seconds=200)
    rows = _rows(folder)
    assert [row["version"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["update/failures"] == 0 for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
async def test_the_demo_learns(tmp_path, seed):
    """The bar: at least 20 points of held-out exact-match accuracy in at most 4 minutes of training, nothing wasted."""
    await trained(str(DEMO), f"seed={seed}", f"run_dir={tmp_path}", "name=demo", seconds=800)
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert summary["accuracy_after"] - summary["accuracy_before"] >= 0.20
    assert summary["wasted_tokens"] == 0
    assert summary["logprob_difference"] <= 1e-4
    assert summary["updates_in_flight"] > 0


async def _training(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock", "train", *arguments, cwd=ROOT,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip


async def trained(*arguments: str, seconds: float) -> bytes:
    """What a run says that ends well within so many seconds."""
    run = await _training(*arguments)
    out, _ = await asyncio.wait_for(run.communicate(), seconds)
    assert run.returncode == 0, out.decode()
    return out


async def _three_steps_on(folder: Path, arguments: Sequence[str]) -> asyncio.subprocess.Process:
    """A run that has made three steps, and goes on."""
    run = await _training(*arguments)
    await eventually(lambda: len(_rows(folder)) >= 3 or run.returncode is not None, 180)
    assert run.returncode is None, (await run.communicate())[0].decode()
    return run


def _rows(folder: Path) -> list[dict]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
