"""Advantages of trajectories, from the rewards of each group (one prompt's samples).

Axes: N trajectories, G groups. `groups_N` holds the index of each trajectory's group, from 0 to G - 1, in any order.
`episodes_N` holds the index of its episode. An agent's episode has one trajectory per leaf; together they weigh as much
as one. Without `episodes_N`, each trajectory is an episode.
If all rewards of a group are equal up to rounding, every advantage is exactly 0, because no sample is better.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Advantage = Callable[[Tensor, Tensor, Tensor | None], Tensor]

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


ADVANTAGES: Mapping[str, Advantage] = {
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
