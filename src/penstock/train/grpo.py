"""One training step on trajectories: advantages, loss, optimiser, and metrics.

It works on any `Learner`, with the base's weights or with one of its adapters.
"""

# torch ships partial types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.config import TrainConfig
from penstock.control_types import UpdateReport
from penstock.errors import StateError, UserError
from penstock.fleet.fleet import Fleet
from penstock.rollout.generator import Trajectory
from penstock.train.batching import collate
from penstock.train.interface import AdamSpec, Datum, Learner, Outputs
from penstock.train.losses import DROP_NOTHING, LOG_RATIO_LIMIT, LOSSES, Limits, LossSpec, loss_named


@dataclass(frozen=True, slots=True)
class Trainee:
    """The weights that a run trains: a learner's base weights, or one of its adapters.

    Attributes:
        temperature: temperature of sampling.
        max_tokens: generation budget, the constant that Dr. GRPO divides by.
        merge: send engines the base's weights with the adapter merged in, and no adapter.
        reference: learner of the model that `kl_coefficient` compares with; None: the base without the adapter.
    """

    learner: Learner
    config: TrainConfig
    temperature: float = 1.0
    max_tokens: int = 1
    adapter: str | None = None
    merge: bool = False
    reference: Learner | None = None

    @property
    def version(self) -> int:
        """Version of the weights: 0 for a loaded base, 1 for a new adapter, +1 per step."""
        return self.learner.versions[self.adapter]

    @property
    def served_adapter(self) -> str | None:
        """Name by which requests select the adapter; None: the engines' own weights."""
        return None if self.merge else self.adapter

    async def put_in_force(self, engine: Fleet) -> UpdateReport:
        if self.adapter is None:
            return await engine.update_weights(self.learner.weights(None), version=self.version, kv=self.config.kv)
        if self.merge:
            merged = self.learner.merged_weights(self.adapter)
            return await engine.update_weights(merged, version=self.version, kv=self.config.kv)
        tensors, config = self.learner.weights(self.adapter), self.learner.adapter_config(self.adapter)
        return await engine.update_adapter(
            self.adapter, tensors, config=config, version=self.version, kv=self.config.kv
        )

    def step(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Do one optimiser step on the batch. `version` goes up by one.

        The gradient of each loss part is divided by the part's denominator over the whole batch. The engine's logprobs
        are those of the behaviour policy: no second forward pass computes them.

        Returns:
            The metrics that docs/reference/run-folder.md explains under `learner/...`.

        Raises:
            UserError: no trajectories, an empty prompt, or no token that the policy made.
            StateError: loss or gradient is NaN or infinite; weights and optimiser are unchanged.
        """
        started = time.perf_counter()
        policy_tokens = _count_policy_tokens(trajectories)
        rewards_N = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
        if not rewards_N.isfinite().all():
            raise UserError("a trajectory's reward is no finite number; look at what the environment returns")
        groups_N = group_indices([t.group_id for t in trajectories])
        episodes_N = group_indices([t.episode_id or str(i) for i, t in enumerate(trajectories)])
        advantages_N = ADVANTAGES[self.config.advantage](rewards_N, groups_N, episodes_N).float()
        data = [datum_of(t, advantage) for t, advantage in zip(trajectories, advantages_N.tolist(), strict=True)]
        if self.config.kl_coefficient:
            found = (self.reference or self.learner).forward(None, LossSpec({}, temperature=self.temperature), data)
            data = [replace(datum, reference=row) for datum, row in zip(data, found.logprobs, strict=True)]
        version = self.version
        outputs = self.learner.forward_backward(self.adapter, self._loss(data), data)
        losses, grad_norm = self._optimise(outputs)
        means = {name: total / policy_tokens for name, total in outputs.metrics.items()}
        tokens = sum(len(t.prompt_ids) + len(t.response_ids) for t in trajectories)
        seconds = time.perf_counter() - started
        return {
            **losses,
            **means,
            **_logprob_metrics(outputs, data, trajectories, version),
            "grad_norm": grad_norm,
            "reward_mean": float(rewards_N.mean()),
            "trajectories_without_advantage": float((advantages_N == 0).float().mean()),
            "tokens": float(tokens),
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
        }

    def release_memory(self) -> None:
        self.learner.release_memory()
        if self.reference is not None:
            self.reference.release_memory()

    def save(self, folder: Path) -> Mapping[str, Any]:
        return self.learner.save(self.adapter, folder)

    def load(self, folder: Path, values: Mapping[str, Any]) -> None:
        self.learner.load(self.adapter, folder, values)

    def _coefficients(self) -> dict[str, float]:
        """Return the parts of the loss and their coefficients. The policy's part comes first."""
        config = self.config
        others = {"kl": config.kl_coefficient, "entropy": config.entropy_coefficient}
        return {config.loss: 1.0} | {part: factor for part, factor in others.items() if factor}

    def _loss(self, data: Sequence[Datum]) -> LossSpec:
        """Return the loss to evaluate. The coefficients make up for one common denominator, the policy part's."""
        config = self.config
        limits = Limits(
            low=config.clip_low,
            high=config.clip_high,
            correction=config.correction,
            importance_cap=config.importance_cap,
            ratio_band=config.ratio_band,
            probability_gap=config.probability_gap,
            sequence_gap=config.sequence_gap,
            max_tokens=self.max_tokens,
        )
        spec = LossSpec(self._coefficients(), limits, self.temperature)
        if len(spec.parts) == 1:
            return spec
        if config.correction in DROP_NOTHING and config.loss in LOSSES:
            found = known_denominators(spec, data)
        else:
            found = self.learner.forward(self.adapter, spec, data).denominators
        whole = max(found[config.loss], 1.0)
        return replace(
            spec, parts={part: factor * whole / max(found[part], 1.0) for part, factor in spec.parts.items()}
        )

    def _optimise(self, outputs: Outputs) -> tuple[dict[str, float], float]:
        """Take the optimiser's step. Return the losses of the batch and its parts, and the gradient's norm."""
        config = self.config
        coefficients = self._coefficients()
        means = {part: outputs.losses[part] / max(outputs.denominators[part], 1.0) for part in coefficients}
        loss = sum(factor * means[part] for part, factor in coefficients.items())
        adam = AdamSpec(
            learning_rate=config.learning_rate,
            beta1=config.adam_betas[0],
            beta2=config.adam_betas[1],
            weight_decay=config.weight_decay,
            grad_clip_norm=config.grad_clip_norm,
        )
        try:
            # A NaN loss may leave a finite gradient. Scaled by NaN, the step is refused like one with a NaN gradient.
            scale = 1 / max(outputs.denominators[config.loss], 1.0) if math.isfinite(loss) else math.nan
            grad_norm = self.learner.optim_step(self.adapter, adam, scale=scale)
        except StateError as error:
            raise StateError(f"step {self.version + 1} has loss {loss} and {error}") from error
        return {"loss": loss} | {f"loss_{part}": means[part] for part in means if part != config.loss}, grad_norm


def known_denominators(spec: LossSpec, data: Sequence[Datum]) -> dict[str, float]:
    """Return the denominators, given a correction that drops no token. They do not depend on the policy."""
    batch = collate([datum for datum in data if any(datum.weights)], spec)
    behaviour_K = batch.behaviour_B_T[batch.present_B_T]
    terms = batch.terms(behaviour_K, torch.zeros_like(behaviour_K))
    return {part: float(loss_named(part)(terms, spec.limits).denominator) for part in spec.parts}


def datum_of(trajectory: Trajectory, advantage: float) -> Datum:
    """Convert a trajectory into inputs and targets. Every policy token has the same advantage."""
    ids = trajectory.prompt_ids + trajectory.response_ids
    context = (0.0,) * (len(trajectory.prompt_ids) - 1)
    weights = (*context, *map(float, trajectory.loss_mask))
    made = zip(trajectory.logprobs, trajectory.loss_mask, strict=True)
    logprobs = (*context, *(logprob if by_policy else 0.0 for logprob, by_policy in made))
    experts = trajectory.routed_experts
    return Datum(ids[:-1], ids[1:], weights, logprobs, (advantage,) * len(weights), experts=experts)


def _count_policy_tokens(trajectories: Sequence[Trajectory]) -> int:
    if not trajectories:
        raise UserError("a training step needs at least one trajectory, got none")
    if any(not t.prompt_ids for t in trajectories):
        raise UserError("a trajectory has an empty prompt; its first token would have nothing to be predicted from")
    forced = sum(mask for t in trajectories for mask, c in zip(t.loss_mask, t.constrained, strict=False) if c)
    if forced:
        raise UserError(
            f"{forced} tokens of these trajectories were sampled under a grammar (a tool_choice that forces a call): "
            "their logprobs are those under the grammar, which no learner can repeat; let the agent choose its calls, "
            "or set the loss mask of these tokens to 0"
        )
    tokens = sum(sum(t.loss_mask) for t in trajectories)
    if not tokens:
        raise UserError(f"none of the {len(trajectories)} trajectories has a token that the policy made")
    return tokens


def _logprob_metrics(
    outputs: Outputs, data: Sequence[Datum], trajectories: Sequence[Trajectory], version: int
) -> dict[str, float]:
    """Return metrics of trainer logprob - engine logprob over the policy's tokens, K.

    The effective sample size of weights w is (sum w)^2 / sum w^2 (Kish 1965), here divided by the number of tokens.
    Tokens that attend to KV of older weights count apart. The trainer lacks this KV, so their difference is expected.
    """
    made = [torch.tensor(datum.weights) != 0 for datum in data]
    engine = [torch.tensor(datum.logprobs) for datum in data]
    log_ratio_K = torch.cat(
        [(ours - theirs)[mask] for ours, theirs, mask in zip(outputs.logprobs, engine, made, strict=True)]
    )
    versions, kept = [], []
    for t in trajectories:
        versions += itertools.compress(t.versions, t.loss_mask)
        kept += itertools.compress(t.kv_kept or (False,) * len(t.loss_mask), t.loss_mask)
    ages_K, kept_K, difference_K = version - torch.tensor(versions), torch.tensor(kept), log_ratio_K.abs()
    ratio_K = log_ratio_K.double().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().sort().values
    result = {f"ratio_p{q}": float(ratio_K[round((len(ratio_K) - 1) * q / 100)]) for q in (1, 50, 99)}
    result["ratio_max"] = float(ratio_K[-1])
    result["effective_sample_share"] = float(ratio_K.sum() ** 2 / (ratio_K.square().sum() * len(ratio_K)))
    result["logprob_diff_mean"] = float(difference_K.mean())
    result["kv_kept_share"] = float(kept_K.float().mean())
    if kept_K.any():
        result["logprob_diff_kv_kept"] = float(difference_K[kept_K].mean())
    difference_K, ages_K = difference_K[~kept_K], ages_K[~kept_K]
    equal_K = difference_K[ages_K == 0]
    result["logprob_diff_equal_tokens"] = float(len(equal_K))
    if len(equal_K):
        result["logprob_diff_max_equal"] = float(equal_K.max())
    for age in ages_K.unique().tolist():
        result[f"logprob_diff_staleness/{age}"] = float(difference_K[ages_K == age].mean())
    return result


# --- advantages ------------------------------------------------------------------------------------------------------

# Axes: N trajectories, G groups. `groups_N` holds the index of each trajectory's group, from 0 to G - 1, in any order.
# `episodes_N` holds the index of its episode. An agent's episode has one trajectory per leaf; together they weigh as
# much as one. Without `episodes_N`, each trajectory is an episode. If all rewards of a group are equal up to rounding,
# every advantage is exactly 0, because no sample is better.

ROUNDING = 1e-6
"""Largest difference between equal rewards of a group: relative to the largest reward, or to 1 if that is more."""


def group_mean(rewards_N: Tensor, groups_N: Tensor, episodes_N: Tensor | None = None) -> Tensor:
    """Return the reward minus the group's mean: A_i = R_i - mean(R) (Dr. GRPO, arXiv:2503.20783)."""
    mean_N = _mean(rewards_N, groups_N, _weights(rewards_N, episodes_N))
    return (rewards_N - mean_N).masked_fill(_constant(rewards_N, groups_N), 0.0)


def group_norm(rewards_N: Tensor, groups_N: Tensor, episodes_N: Tensor | None = None) -> Tensor:
    """Return A_i = (R_i - mean(R)) / std(R) within the group (GRPO, arXiv:2402.03300).

    The standard deviation is that of the population (divided by n), so that a group's advantages have variance 1.
    """
    centred_N = group_mean(rewards_N, groups_N, episodes_N)
    std_N = _mean(centred_N.square(), groups_N, _weights(rewards_N, episodes_N)).sqrt()
    return torch.where(std_N > 0, centred_N / std_N, torch.zeros_like(centred_N))


def leave_one_out(rewards_N: Tensor, groups_N: Tensor, episodes_N: Tensor | None = None) -> Tensor:
    """Return A_i = R_i - mean_{j != i} R_j in the group (RLOO, arXiv:2402.14740, eq. 8).

    For n episodes of one trajectory each, this is n / (n - 1) times `group_mean`. A group of one has advantage 0.
    """
    weights_N = _weights(rewards_N, episodes_N)
    centred_N = group_mean(rewards_N, groups_N, episodes_N)
    own_N = centred_N if episodes_N is None else _mean(centred_N, episodes_N, weights_N)
    count_N = torch.zeros_like(weights_N).index_add_(0, groups_N, weights_N)[groups_N]
    return centred_N + own_N / (count_N - 1).clamp(min=1)


ADVANTAGES: Mapping[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "group_norm": group_norm,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
}
"""Advantages by their name in the config (`train.advantage`)."""


def group_indices(group_ids: Sequence[str]) -> Tensor:
    """Return the index of each trajectory's group, `[N]`. Groups are numbered in order of their first trajectory."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(group_id, len(numbers)) for group_id in group_ids])


def _weights(rewards_N: Tensor, episodes_N: Tensor | None) -> Tensor:
    """Return each trajectory's weight, `[N]`: 1 / (trajectories of its episode)."""
    if episodes_N is None:
        return torch.ones_like(rewards_N)
    return 1 / episodes_N.bincount().to(rewards_N.dtype)[episodes_N]


def _mean(values_N: Tensor, groups_N: Tensor, weights_N: Tensor) -> Tensor:
    """Return the mean of each trajectory's group, `[N]`."""
    weight_G, total_G = (
        values_N.new_zeros(int(groups_N.max()) + 1).index_add_(0, groups_N, added_N)
        for added_N in (weights_N, values_N * weights_N)
    )
    return (total_G / weight_G)[groups_N]


def _constant(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Return where all rewards of a group are equal up to rounding. `group_norm` would amplify the rounding."""
    groups = int(groups_N.max()) + 1
    low_G = rewards_N.new_zeros(groups).scatter_reduce_(0, groups_N, rewards_N, "amin", include_self=False)
    high_G = rewards_N.new_zeros(groups).scatter_reduce_(0, groups_N, rewards_N, "amax", include_self=False)
    return (high_G - low_G <= ROUNDING * high_G.abs().clamp(min=1))[groups_N]
