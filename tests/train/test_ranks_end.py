"""Ranks that end when they should not, one that never begins, and one that lacks what the user wrote."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from random_trajectories import trajectories_of
from torch.distributed import distributed_c10d

from patience import WAIT_S
from penstock.config import TrainConfig
from penstock.errors import LearnerError, PenstockError
from penstock.train import ranks as module
from penstock.train.grpo import Trainee
from penstock.train.interface import Datum
from penstock.train.learner import LocalLearner
from penstock.train.losses import LossSpec
from penstock.train.ranked import RankedLearner
from penstock.train.ranks import Ranks
from penstock.train.schedules import to_the_end

CONFIG = TrainConfig(threads=1, micro_batch_tokens=64)


async def test_a_rank_that_is_killed_ends_the_run_with_its_name(micro_model: str, tmp_path: Path):
    batch = trajectories_of(Trainee(LocalLearner(micro_model, CONFIG, seed=0), CONFIG))
    async with Ranks(2, tmp_path, {}) as ranks:
        two = Trainee(
            await ranks.load(micro_model, CONFIG, seed=0),
            CONFIG,
        )
        pid = ranks.pids[1]

        async def steps() -> None:
            while True:
                await asyncio.to_thread(two.step, batch)

        asyncio.get_running_loop().call_later(0.3, os.kill, pid, signal.SIGKILL)
        with pytest.raises(LearnerError, match=rf"rank 1 of the learner \(pid {pid}\) ended with status -9.*--resume"):
            await asyncio.wait_for(ranks.during(steps()), WAIT_S)
        with pytest.raises(LearnerError):
            two.step(batch)


async def test_a_rank_that_stands_still_in_a_save_ends_the_run_with_its_name(
    micro_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "STOP_S", 1.0)
    monkeypatch.setattr(module, "EXPLAIN_S", 1.0)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    os.mkfifo(folder / "__1_0.distcp")  # rank 1 opens it to write, and nothing ever reads
    async with asyncio.timeout(WAIT_S), Ranks(2, tmp_path, {}) as ranks:
        learner = await ranks.load(micro_model, CONFIG, seed=0)
        assert isinstance(learner, RankedLearner)
        gloo = learner._group.gloo
        assert gloo._get_backend(torch.device("cpu")).options._timeout == module.COLLECTIVE
        distributed_c10d._set_pg_timeout(timedelta(seconds=3), gloo)
        pid = ranks.pids[1]
        with pytest.raises(LearnerError, match=rf"lost each other: .*imed out.*; still running: rank 1 \(pid {pid}\)"):
            await ranks.during(asyncio.to_thread(learner.save, None, folder))
        assert learner._lost


async def test_a_cancelled_run_does_not_wait_for_a_rank_that_stands_still(
    micro_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "STOP_S", 1.0)
    data = [Datum([1, 2, 3], [2, 3, 4], [1.0] * 3, [-1.0] * 3, [1.0] * 3)]
    async with asyncio.timeout(WAIT_S), Ranks(2, tmp_path, {}) as ranks:
        learner = await ranks.load(micro_model, CONFIG, seed=0)
        os.kill(ranks.pids[1], signal.SIGSTOP)
        step = to_the_end(asyncio.to_thread(learner.forward_backward, None, LossSpec({"dapo": 1.0}), data))
        run = asyncio.create_task(ranks.during(step))
        await asyncio.sleep(1.0)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert learner._lost


async def test_a_rank_that_cannot_start_is_named(micro_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(LearnerError, match=r"rank 1 .* ended with status 1; it said last: nothing"):
        async with asyncio.timeout(WAIT_S), Ranks(2, tmp_path, {}) as ranks:
            await ranks.load(micro_model, CONFIG, seed=0)


OWN = """
import os, threading
from penstock.errors import UserError
from penstock.train.losses import LOSSES

class OwnError(UserError):
    def __init__(self, message, *, lock):
        super().__init__(message)
        self.lock = lock

def mine(terms, limits):
    if os.path.exists("BROKEN") and os.environ.get("RANK") == "1":
        raise ValueError("not today")
    if os.path.exists("OWN"):
        raise OwnError("never", lock=threading.Lock())
    return LOSSES["dapo"](terms, limits)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """A loss that is found by rank 0, in this process."""
    (tmp_path / "losses_of_mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return CONFIG.model_copy(update={"loss": "losses_of_mine:mine"})


async def _load(ranks: Ranks, model: str, config: TrainConfig) -> Trainee:
    learner = await ranks.load(model, config, seed=0)
    return Trainee(learner, config)


async def test_a_loss_of_ones_own_is_computed_by_every_rank(
    micro_model: str, own: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    one = Trainee(LocalLearner(micro_model, CONFIG, seed=0), CONFIG)
    batch = trajectories_of(one)
    monkeypatch.chdir(tmp_path)  # where the other ranks find it, as they do beside `penstock train`
    async with asyncio.timeout(WAIT_S), Ranks(2, tmp_path, {}) as ranks:
        two = await _load(ranks, micro_model, own)
        there, here = one.step(batch), await asyncio.to_thread(two.step, batch)
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-3, abs=1e-5)
        assert here["grad_norm"] == pytest.approx(there["grad_norm"], rel=1e-3)
        (tmp_path / "BROKEN").touch()
        with pytest.raises(PenstockError, match=r"losses_of_mine:mine' failed: ValueError: not today"):
            await asyncio.to_thread(two.step, batch)  # rank 0 would have taken it
        (tmp_path / "BROKEN").unlink()
        (tmp_path / "OWN").touch()
        with pytest.raises(PenstockError, match="never"):  # an error that no pickle holds
            await asyncio.to_thread(two.step, batch)
        (tmp_path / "OWN").unlink()
        assert (await asyncio.to_thread(two.step, batch))["loss"] != here["loss"]


async def test_a_rank_that_does_not_find_the_loss_is_named_before_the_first_step(
    micro_model: str, own: TrainConfig, tmp_path: Path
):
    async with asyncio.timeout(WAIT_S), Ranks(2, tmp_path, {}) as ranks:
        with pytest.raises(LearnerError, match=r"rank 1 .*ended with status 1; .*losses_of_mine"):
            await _load(ranks, micro_model, own)
