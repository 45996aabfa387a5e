"""Trajectories to padded micro-batches, by length, so that little of a batch is padding.

Axes: B sequences, L input positions (prompt and response without the last token), T response positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.types import Trajectory


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Right-padded tensors of a few sequences.

    Attributes:
        input_ids_B_L: what the model reads; padding comes last, so that causal attention never sees it.
        targets_K: the K tokens that the policy made, row by row.
        positions_K: where in the flattened `[B * L]` each of them is predicted.
        mask_B_T: true for those K tokens; false where the environment spoke, and on padding.
        behaviour_B_T: logprobs that the engine reported, 0 outside the mask.
        versions_K: weight version that made each token.
        advantages_B: one for each sequence.
    """

    input_ids_B_L: Tensor
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
        return MicroBatch(*(getattr(self, name).to(device) for name in self.__slots__))


def plan(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Split sequences into micro-batches of at most `max_tokens` padded tokens each; a longer one goes alone.

    Args:
        lengths: tokens of each sequence.
        max_tokens: bound on sequences times the longest of them.

    Returns:
        Indices into `lengths`, longest first.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True):
        # The first of a batch is its longest, so its length is the padded one.
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
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
    """Pad to the longest; the prompts must not be empty."""
    rows = len(trajectories)
    width = max(len(t.prompt_ids) + len(t.response_ids) for t in trajectories) - 1
    response_width = max(len(t.response_ids) for t in trajectories)
    input_ids_B_L = torch.zeros(rows, width, dtype=torch.long)
    mask_B_T = torch.zeros(rows, response_width, dtype=torch.bool)
    behaviour_B_T = torch.zeros(rows, response_width)
    targets: list[int] = []
    positions: list[int] = []
    versions: list[int] = []
    for row, t in enumerate(trajectories):
        ids = t.prompt_ids + t.response_ids
        input_ids_B_L[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        size = len(t.response_ids)
        mask_B_T[row, :size] = torch.tensor(t.loss_mask, dtype=torch.bool)
        behaviour_B_T[row, :size] = torch.tensor(t.logprobs)
        # The token at position p of the response is predicted by the input one before it.
        first = row * width + len(t.prompt_ids) - 1
        made = [p for p, by_policy in enumerate(t.loss_mask) if by_policy]
        targets += [t.response_ids[p] for p in made]
        positions += [first + p for p in made]
        versions += [t.versions[p] for p in made]
    return MicroBatch(
        input_ids_B_L=input_ids_B_L,
        targets_K=torch.tensor(targets, dtype=torch.long),
        positions_K=torch.tensor(positions, dtype=torch.long),
        mask_B_T=mask_B_T,
        behaviour_B_T=behaviour_B_T.masked_fill(~mask_B_T, 0.0),
        versions_K=torch.tensor(versions, dtype=torch.long),
        advantages_B=advantages_B,
    )
