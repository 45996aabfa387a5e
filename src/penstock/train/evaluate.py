"""Held-out accuracy of the weights in force, by the rollouts' own path: same engines, same tokens, same reward."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.rollout.environment import Task
from penstock.rollout.generator import Generator, GeneratorInput
from penstock.types import SamplingParams


async def greedy_accuracy(generator: Generator, tasks: Sequence[Task], max_tokens: int) -> float:
    """Fraction of tasks solved by the most likely response: temperature 0, one response each, reward of at least 1.

    Args:
        generator: of the policy to judge.
        tasks: held out from training.
        max_tokens: bound on a response.
    """
    greedy = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    output = await generator.generate(GeneratorInput(tasks, sampling_params=greedy))
    return sum(reward >= 1 for reward in output.rewards) / len(tasks)
