"""Random trajectories for the learner's tests."""

from __future__ import annotations

import random
from collections.abc import Sequence

from penstock.rollout.generator import Trajectory
from penstock.train.grpo import Trainee, datum_of
from penstock.train.losses import LossSpec

VOCABULARY = 24


def score(trainee: Trainee, prompt: Sequence[int], response: Sequence[int]) -> list[float]:
    """Logprob of each response token under the weights held."""
    spec = LossSpec({"dapo": 1.0}, temperature=trainee.temperature)
    found = trainee.learner.forward(trainee.adapter, spec, [datum_of(trajectory(prompt, response), 0.0)])
    return found.logprobs[0][len(prompt) - 1 :].tolist()


def trajectories_of(
    learner: Trainee, *, count: int = 12, group_size: int = 4, seed: int = 0, noise: float = 0.3, version: int = 0
) -> list[Trajectory]:
    """Random token sequences of random lengths, one in three with a turn of the environment in its middle; logprobs
    are the learner's own plus noise, as an engine with somewhat older weights would report them."""
    rng = random.Random(seed)
    made = []
    for i in range(count):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 9))]
        response = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 15))]
        mask = [0 if i % 3 == 0 and p in (1, 2) else 1 for p in range(len(response))]
        logprobs = [lp + rng.gauss(0, noise) for lp in score(learner, prompt, response)]
        made.append(
            trajectory(
                prompt,
                response,
                mask=mask,
                logprobs=[lp * m for lp, m in zip(logprobs, mask, strict=True)],
                versions=[version] * len(response),
                reward=float(rng.random() < 0.5),
                group=f"g{i // group_size}",
            )
        )
    return made


def trajectory(
    prompt: Sequence[int],
    response: Sequence[int],
    *,
    mask: Sequence[int] | None = None,
    logprobs: Sequence[float] | None = None,
    versions: Sequence[int] | None = None,
    reward: float = 0.0,
    group: str = "g",
) -> Trajectory:
    size = len(response)
    return Trajectory(
        prompt_ids=tuple(prompt),
        response_ids=tuple(response),
        loss_mask=tuple(mask if mask is not None else (1,) * size),
        logprobs=tuple(logprobs if logprobs is not None else (-1.0,) * size),
        versions=tuple(versions if versions is not None else (0,) * size),
        reward=reward,
        stop_reason="stop",
        group_id=group,
    )
