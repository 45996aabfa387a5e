"""Packs data into micro-batches: sequences end to end in one row, without padding.

Axes: B sequences, L tokens of the row, K places whose logprob is wanted, T the most of these in one sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.config import TrainConfig
from penstock.errors import UserError
from penstock.train.interface import UNKNOWN_EXPERT, Datum
from penstock.train.losses import LossSpec, LossTerms, loss_named


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tensors of a few sequences; positions begin at 0 in each of them.

    Attributes:
        bounds: int32 `[B + 1]`: where each sequence begins in L, and L.
        longest: tokens of the longest sequence.
        targets_K: wanted targets, sequence by sequence.
        positions_K: places in L where the targets are predicted.
        present_B_T: true for the K targets, false for padding. Weights are 0 on padding.
        extra: additional input of some losses, by name `[B, T]`.
        indices: indices of the B sequences in the data.
        places: wanted places of each sequence.
        several: true if one place may have several targets, one after another.
        experts_L_N_K: experts that the engine chose, `[L, layers, experts a token]`, if a datum has them.
        needs_gradient: false if the loss has no gradient under any policy; the sequences are then only measured.
    """

    input_ids_1_L: Tensor
    position_ids_1_L: Tensor
    bounds: Tensor
    longest: int
    targets_K: Tensor
    positions_K: Tensor
    present_B_T: Tensor
    behaviour_B_T: Tensor
    advantages_B_T: Tensor
    weights_B_T: Tensor
    reference_B_T: Tensor | None
    extra: Mapping[str, Tensor]
    indices: tuple[int, ...]
    places: tuple[Tensor, ...]
    several: bool
    needs_gradient: bool
    experts_L_N_K: Tensor | None = None

    def to(self, device: torch.device) -> MicroBatch:
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        tensors = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **tensors, extra={name: value.to(device) for name, value in self.extra.items()})

    def terms(self, logprobs_K: Tensor, entropy_K: Tensor) -> LossTerms:
        """Combine the model's outputs with the batch's data into the input of a loss."""
        blank_B_T = logprobs_K.new_zeros(self.present_B_T.shape)
        return LossTerms(
            blank_B_T.masked_scatter(self.present_B_T, logprobs_K),
            self.behaviour_B_T,
            self.advantages_B_T,
            self.weights_B_T,
            blank_B_T.masked_scatter(self.present_B_T, entropy_K),
            self.reference_B_T,
            self.extra,
        )


def plan(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Split sequences into micro-batches of at most `max_tokens` tokens each. A longer sequence goes alone.

    Returns indices into `lengths`, longest first, so that neighbours have similar lengths.
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


def default_device() -> torch.device:
    """Return the device on which a learner computes by default."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def micro_batch_tokens(config: TrainConfig, device: torch.device) -> int:
    """Return the tokens of a micro-batch. CPUs are up to twice as fast if its tensors fit in their caches."""
    return config.micro_batch_tokens or (16_384 if device.type == "cuda" else 2_048)


def micro_batches(
    data: Sequence[Datum], loss: LossSpec, max_tokens: int, *, vocabulary: int, ranks: int = 1
) -> list[MicroBatch]:
    """Return all data with a wanted place in micro-batches; data without a backward pass are separate.

    Every rank calls this with the same data, before it waits for other ranks in any layer. Micro-batches are smaller
    than `max_tokens` if several ranks would not all get a share.

    Raises:
        UserError: a token is outside the vocabulary, a place is outside its sequence, a number is not finite, a loss is
            unknown, or the data lack what a loss reads.
    """
    functions = [loss_named(part) for part in loss.parts]
    by_need: dict[bool, list[int]] = {True: [], False: []}
    for index, datum in enumerate(data):
        if len(_wanted(datum, loss)):
            by_need[_needs_gradient(datum, loss)].append(index)
    result: list[MicroBatch] = []
    for needs_gradient, chosen in by_need.items():
        lengths = [len(data[i].input_ids) for i in chosen]
        for members in plan(lengths, min(max_tokens, math.ceil(sum(lengths) / ranks))):
            indices = [chosen[i] for i in members]
            batch = replace(collate([data[i] for i in indices], loss, indices), needs_gradient=needs_gradient)
            _check(batch, vocabulary)
            blank_K = torch.zeros(len(batch.targets_K), requires_grad=True)
            for function in functions:  # raises now what it would raise within a step, perhaps on some ranks only
                function(batch.terms(blank_K, blank_K), loss.limits)
            result.append(batch)
    return result


def _check(batch: MicroBatch, vocabulary: int) -> None:
    """Refuse data that the model cannot read, or whose gradient would be meaningless."""
    samples = torch.arange(len(batch.indices))
    of_L, of_K = (samples.repeat_interleave(n) for n in (batch.bounds.diff(), batch.present_B_T.sum(-1)))
    for what, ids, of in (("input token", batch.input_ids_1_L[0], of_L), ("target", batch.targets_K, of_K)):
        if (wrong := (ids < 0) | (ids >= vocabulary)).any():
            sample, token = batch.indices[of[wrong][0]], int(ids[wrong][0])
            raise UserError(
                f"sample {sample} of the data has the {what} {token}, and the learner's model knows tokens 0 to "
                f"{vocabulary - 1}; sample from engines of the same model"
            )
    first_K, end_K = batch.bounds[of_K], batch.bounds[of_K + 1]
    if (wrong := (batch.positions_K < first_K) | (batch.positions_K >= end_K)).any():
        place, tokens = (batch.positions_K - first_K)[wrong][0], (end_K - first_K)[wrong][0]
        sample = batch.indices[of_K[wrong][0]]
        raise UserError(f"sample {sample} of the data has a target at place {place}, and {tokens} input tokens")
    for what, values in (("logprob", batch.behaviour_B_T), ("advantage", batch.advantages_B_T)):
        if (wrong := (~values.isfinite() & (batch.weights_B_T != 0)).any(-1)).any():
            sample = batch.indices[samples[wrong][0]]
            raise UserError(f"sample {sample} of the data has the {what} of a token that is no finite number")


def collate(data: Sequence[Datum], loss: LossSpec, indices: Sequence[int] = ()) -> MicroBatch:
    """Lay sequences end to end in one row.

    Raises:
        UserError: only some of the data have reference logprobs, or they have different extra values.
    """
    places = tuple(_wanted(datum, loss) for datum in data)
    lengths = torch.tensor([len(datum.input_ids) for datum in data])
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    counts = torch.tensor([len(wanted) for wanted in places])
    present_B_T = torch.arange(int(counts.max())) < counts.unsqueeze(-1)

    def chosen(rows: Iterable[Any], dtype: torch.dtype) -> Tensor:
        values = (torch.as_tensor(row, dtype=dtype) for row in rows)
        return torch.cat([row[wanted] for row, wanted in zip(values, places, strict=True)])

    def padded(rows: Iterable[Any]) -> Tensor:
        return torch.zeros(present_B_T.shape).masked_scatter_(present_B_T, chosen(rows, torch.float32))

    if len({datum.reference is not None for datum in data}) > 1:
        raise UserError("some data have reference logprobs and others do not; give them to all or to none")
    if len({frozenset(datum.extra) for datum in data}) > 1:
        wanted = sorted({name for datum in data for name in datum.extra})
        raise UserError(f"the data have different extra values; each needs {wanted}")
    at = (range(len(d.input_ids)) if d.positions is None else d.positions for d in data)
    return MicroBatch(
        input_ids_1_L=torch.cat([torch.as_tensor(datum.input_ids, dtype=torch.long) for datum in data]).unsqueeze(0),
        position_ids_1_L=torch.cat([torch.arange(int(length)) for length in lengths]).unsqueeze(0),
        bounds=bounds.to(torch.int32),
        longest=int(lengths.max()),
        targets_K=chosen((datum.target_ids for datum in data), torch.long),
        positions_K=chosen(at, torch.long) + bounds[:-1].repeat_interleave(counts),
        present_B_T=present_B_T,
        behaviour_B_T=padded(datum.logprobs for datum in data),
        advantages_B_T=padded(datum.advantages for datum in data),
        weights_B_T=padded(datum.weights for datum in data),
        reference_B_T=None if data[0].reference is None else padded(datum.reference for datum in data),
        extra={name: padded(datum.extra[name] for datum in data) for name in data[0].extra},
        indices=tuple(indices),
        places=places,
        several=any(datum.positions is not None for datum in data),
        needs_gradient=True,
        experts_L_N_K=_experts(data),
    )


def _experts(data: Sequence[Datum]) -> Tensor | None:
    """Lay experts end to end, with `UNKNOWN_EXPERT` for data without experts."""
    known = next((torch.as_tensor(datum.experts) for datum in data if datum.experts is not None), None)
    if known is None:
        return None
    rows = [
        torch.full((len(datum.input_ids), *known.shape[1:]), UNKNOWN_EXPERT)
        if datum.experts is None
        else torch.as_tensor(datum.experts, dtype=torch.long)
        for datum in data
    ]
    return torch.cat(rows)


def _wanted(datum: Datum, loss: LossSpec) -> Tensor:
    """Return the places of a datum whose logprobs are wanted."""
    weights = torch.as_tensor(datum.weights, dtype=torch.float32)
    return torch.arange(len(weights)) if loss.all_logprobs else weights.nonzero().squeeze(-1)


def _needs_gradient(datum: Datum, loss: LossSpec) -> bool:
    trained = torch.as_tensor(datum.weights) != 0
    return bool((trained & (torch.as_tensor(datum.advantages) != 0) if loss.by_advantage else trained).any())
