"""Trajectories to packed micro-batches: sequences end to end in one row, nothing padded.

Axes: B sequences, L tokens of the row (of each sequence all but its last), T response positions, K policy tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.types import Trajectory


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tensors of a few sequences.

    Attributes:
        input_ids_1_L: what the model reads.
        position_ids_1_L: from 0 in each sequence.
        bounds: int32 `[B + 1]`: where each sequence begins in L, and L.
        longest: tokens of the longest sequence.
        targets_K: the K tokens that the policy made, row by row.
        positions_K: where in L each of them is predicted.
        mask_B_T: true for those K tokens; false where the environment spoke, and on padding.
        behaviour_B_T: logprobs that the engine reported, 0 outside the mask.
        versions_K: weight version that made each token.
        advantages_B: one for each sequence.
    """

    input_ids_1_L: Tensor
    position_ids_1_L: Tensor
    bounds: Tensor
    longest: int
    targets_K: Tensor
    positions_K: Tensor
    mask_B_T: Tensor
    behaviour_B_T: Tensor
    versions_K: Tensor
    advantages_B: Tensor

    @property
    def needs_gradient(self) -> bool:
        """False where every advantage is 0: such sequences are only measured."""
        return bool((self.advantages_B != 0).any())

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        tensors = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **tensors)


def plan(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Split sequences into micro-batches of at most `max_tokens` tokens each; a longer one goes alone.

    Args:
        lengths: tokens of each sequence.
        max_tokens: bound on the sum over a micro-batch.

    Returns:
        Indices into `lengths`, longest first: neighbours are of about one length.
    """
    batches: list[list[int]] = []
    filled = 0
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True):
        filled += lengths[index]
        if batches and filled <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
            filled = lengths[index]
    return batches


def micro_batches(trajectories: Sequence[Trajectory], advantages_N: Tensor, max_tokens: int) -> list[MicroBatch]:
    """All trajectories, each in one micro-batch; those of advantage 0 apart, since they need no backward pass."""
    result: list[MicroBatch] = []
    for with_gradient in (True, False):
        chosen = [i for i, advantage in enumerate(advantages_N) if bool(advantage != 0) == with_gradient]
        lengths = [len(trajectories[i].prompt_ids) + len(trajectories[i].response_ids) for i in chosen]
        for batch in plan(lengths, max_tokens):
            indices = [chosen[i] for i in batch]
            result.append(collate([trajectories[i] for i in indices], advantages_N[indices]))
    return result


def collate(trajectories: Sequence[Trajectory], advantages_B: Tensor) -> MicroBatch:
    """Lay sequences end to end; the prompts must not be empty."""
    shape = (len(trajectories), max(len(t.response_ids) for t in trajectories))
    mask_B_T = torch.zeros(shape, dtype=torch.bool)
    behaviour_B_T = torch.zeros(shape)
    inputs: list[int] = []
    places: list[int] = []
    bounds = [0]
    targets: list[int] = []
    positions: list[int] = []
    versions: list[int] = []
    for row, t in enumerate(trajectories):
        inputs += (t.prompt_ids + t.response_ids)[:-1]
        places += range(len(inputs) - bounds[-1])
        size = len(t.response_ids)
        mask_B_T[row, :size] = torch.tensor(t.loss_mask, dtype=torch.bool)
        behaviour_B_T[row, :size] = torch.tensor(t.logprobs)
        # The token at position p of the response is predicted by the input one before it.
        first = bounds[-1] + len(t.prompt_ids) - 1
        made = [p for p, by_policy in enumerate(t.loss_mask) if by_policy]
        targets += [t.response_ids[p] for p in made]
        positions += [first + p for p in made]
        versions += [t.versions[p] for p in made]
        bounds.append(len(inputs))
    boundaries = torch.tensor(bounds, dtype=torch.int32)
    return MicroBatch(
        input_ids_1_L=torch.tensor([inputs], dtype=torch.long),
        position_ids_1_L=torch.tensor([places], dtype=torch.long),
        bounds=boundaries,
        longest=int(boundaries.diff().max()),
        targets_K=torch.tensor(targets, dtype=torch.long),
        positions_K=torch.tensor(positions, dtype=torch.long),
        mask_B_T=mask_B_T,
        behaviour_B_T=behaviour_B_T.masked_fill(~mask_B_T, 0.0),
        versions_K=torch.tensor(versions, dtype=torch.long),
        advantages_B=advantages_B,
    )
