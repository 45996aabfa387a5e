"""Complaint 14: experts of the engine are not replayed, or beside the wrong tokens: Megatron-LM #4168, AReaL #1207.

What the learner makes of replayed experts, `tests/train/test_router_replay.py` has.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from training_setup import Characters, Letters

from nano_models import save_moe
from penstock.config import TrainConfig
from penstock.rollout.episodes import SingleTurnGenerator
from penstock.rollout.generator import GeneratorInput
from penstock.train.grpo import datum_of
from penstock.train.learner import LocalLearner
from penstock.train.losses import LossSpec
from penstock.types import Sample, SamplingParams, VersionSpan

LAYERS, TOP_K = 2, 2


class Engine:
    """Answers with experts that say whose they are: row i holds `i % 4` and the one after it."""

    async def sample(self, prompt: list[int], n: int, *_: object, **__: object) -> list[Sample]:
        rows = np.arange(len(prompt) + 2)[:, None, None] + np.zeros((1, LAYERS, 1), dtype=int) + np.arange(TOP_K)
        span = (VersionSpan(0, 0, 3),)
        return [Sample((35, 36, 37), "length", (-1.0, -1.0, -1.0), span, routed_experts=rows % 4) for _ in range(n)]


async def test_experts_of_an_engine_are_those_that_the_learner_computes_with(tmp_path: Path) -> None:
    environment = Letters()
    generator = SingleTurnGenerator(Engine(), Characters(), environment, SamplingParams(max_tokens=3), 8)  # pyright: ignore[reportArgumentType]
    output = await generator.generate(GeneratorInput((environment.train_task(0),), num_samples=1))
    [trajectory] = output.trajectories
    datum = datum_of(trajectory, 1.0)
    assert len(datum.experts) == len(datum.input_ids)

    learner = LocalLearner(str(save_moe(tmp_path)), TrainConfig(dtype="float32"), seed=0)
    used: list[torch.Tensor] = []
    for layer in learner.policy.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _module, given: used.append(given[1]))
    learner.forward(None, LossSpec({}, all_logprobs=True), [datum, datum])
    wanted = torch.as_tensor(np.concatenate([datum.experts, datum.experts]))
    assert [torch.equal(experts, wanted[:, i]) for i, experts in enumerate(used)] == [True] * LAYERS
