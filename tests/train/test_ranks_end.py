"""Ranks that end when they should not, and one that never begins."""

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

from penstock.config import TrainConfig
from penstock.errors import LearnerError
from penstock.train import ranks as module
from penstock.train.grpo import Trainee
from penstock.train.learner import LocalLearner
from penstock.train.rank_group import COLLECTIVE, RankGroup
from penstock.train.ranked import RankedLearner
from penstock.train.ranks import Ranks

CONFIG = TrainConfig(threads=1, micro_batch_tokens=64)


async def test_a_rank_that_is_killed_ends_the_run_with_its_name(micro_model: str, tmp_path: Path):
    batch = trajectories_of(Trainee(LocalLearner(micro_model, CONFIG, seed=0), CONFIG))
    async with Ranks(2, tmp_path, {}) as ranks:
        two = Trainee(
            await ranks.load(lambda group: RankedLearner(group, micro_model, CONFIG, seed=0, served_dtype="float32")),
            CONFIG,
        )
        pid = ranks.pids[1]

        async def steps() -> None:
            while True:
                await asyncio.to_thread(two.step, batch)

        asyncio.get_running_loop().call_later(0.3, os.kill, pid, signal.SIGKILL)
        with pytest.raises(LearnerError, match=rf"rank 1 of the learner \(pid {pid}\) ended with status -9.*--resume"):
            await asyncio.wait_for(ranks.during(steps()), 60)
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
    async with asyncio.timeout(60), Ranks(2, tmp_path, {}) as ranks:
        made: list[RankGroup] = []

        def learner_of(group: RankGroup) -> RankedLearner:
            made.append(group)
            return RankedLearner(group, micro_model, CONFIG, seed=0, served_dtype="float32")

        learner = await ranks.load(learner_of)
        assert made[0].gloo._get_backend(torch.device("cpu")).options._timeout == COLLECTIVE
        distributed_c10d._set_pg_timeout(timedelta(seconds=3), made[0].gloo)
        pid = ranks.pids[1]
        with pytest.raises(LearnerError, match=rf"lost each other: .*imed out.*; still running: rank 1 \(pid {pid}\)"):
            await ranks.during(asyncio.to_thread(learner.save, None, folder))
        assert learner.is_lost


async def test_a_rank_that_cannot_start_is_named(micro_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(LearnerError, match=r"rank 1 .* ended with status 1; it said last: nothing"):
        async with asyncio.timeout(60), Ranks(2, tmp_path, {}) as ranks:
            await ranks.load(lambda group: RankedLearner(group, micro_model, CONFIG, seed=0, served_dtype="float32"))
