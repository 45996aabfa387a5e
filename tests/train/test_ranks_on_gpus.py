"""Two ranks over NCCL against one process on a GPU."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from random_trajectories import trajectories_of

from penstock.config import TrainConfig
from penstock.train import checkpoint
from penstock.train.grpo import Trainee
from penstock.train.learner import LocalLearner
from penstock.train.ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


@pytest.mark.parametrize(("dtype", "near"), [("float32", 1e-3), ("bfloat16", 0.1)])
async def test_two_ranks_over_nccl_train_as_one_process_does(micro_model: str, tmp_path: Path, dtype: str, near: float):
    config = TrainConfig.model_validate({"dtype": dtype, "micro_batch_tokens": 64, "learning_rate": 1e-3})
    one = Trainee(LocalLearner(micro_model, config, seed=0), config)
    async with Ranks(2, tmp_path, {}) as ranks:
        loaded = await ranks.load(micro_model, config, seed=0)
        two = Trainee(loaded, config)
        expected = dict(one.learner.weights(None))
        for name, tensor in two.learner.weights(None):
            assert torch.equal(tensor, expected[name]), name
        for step in range(20 if dtype == "float32" else 3):
            batch = trajectories_of(one, seed=step, version=step)
            there, here = one.step(batch), await asyncio.to_thread(two.step, batch)
            for name in ("loss", "grad_norm", "entropy"):
                assert abs(here[name] - there[name]) < near * (0.1 + abs(there[name])), (step, name, here, there)
        path = checkpoint.save(tmp_path, 1, two.save)
        held = {name: tensor.clone() for name, tensor in two.learner.weights(None)}
        one.load(path, checkpoint.load(path)[1])
        for name, tensor in one.learner.weights(None):
            assert torch.equal(tensor, held[name]), name
