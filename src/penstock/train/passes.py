"""Passes over packed data: losses of one adapter, or of several in a shared pass."""

# torch ships partial types of some methods.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.errors import StateError
from penstock.train.batching import MicroBatch, plan
from penstock.train.interface import Datum, Outputs
from penstock.train.logprobs import TokenLogprobs
from penstock.train.losses import LossSpec, loss_named
from penstock.train.policy_model import PolicyModel
from penstock.train.router_replay import UNKNOWN

if TYPE_CHECKING:
    from penstock.train.lora import Adapters

Sums = Mapping[str, Mapping[str, Tensor]]
"""Sums over a micro-batch by kind (a field of `Outputs`) and name."""


class Tally:
    """Collects the results of passes over the data of one call."""

    def __init__(self, data: Sequence[Datum]) -> None:
        self._logprobs = [torch.zeros(len(datum.target_ids)) for datum in data]
        self._sums: dict[str, dict[str, float]] = {"losses": {}, "denominators": {}, "metrics": {}}

    def add(self, batch: MicroBatch, logprobs_K: Tensor, sums: Sums) -> None:
        named = [(kind, name, value.double()) for kind, values in sums.items() for name, value in values.items()]
        # Read all values at once, because each read waits for the device.
        found = torch.stack([value for *_, value in named]).tolist() if named else []
        for (kind, name, _), value in zip(named, found, strict=True):
            self._sums[kind][name] = self._sums[kind].get(name, 0.0) + value
        parts = logprobs_K.float().cpu().split([len(places) for places in batch.places])
        for index, places, part in zip(batch.indices, batch.places, parts, strict=True):
            self._logprobs[index][places] = part

    def outputs(self) -> Outputs:
        return Outputs(self._logprobs, **self._sums)


def loss_of(found: TokenLogprobs, batch: MicroBatch, loss: LossSpec) -> tuple[Tensor, Sums]:
    """Return a micro-batch's sum to differentiate, and its sums without gradients."""
    terms = batch.terms(found.logprobs, found.entropy)
    outputs = {part: loss_named(part)(terms, loss.limits) for part in loss.parts}
    metrics = {name: value for output in outputs.values() for name, value in output.metrics.items()}
    metrics["entropy"] = (terms.entropy_B_T.detach() * terms.mask()).sum()  # pyright: ignore[reportOptionalMemberAccess]
    losses = {part: output.loss.detach() for part, output in outputs.items()}
    denominators = {part: output.denominator for part, output in outputs.items()}
    nothing = found.logprobs.new_zeros(())  # a loss without parts only needs logprobs
    total = torch.stack([nothing, *(factor * outputs[part].loss for part, factor in loss.parts.items())]).sum()
    return total, {"losses": losses, "denominators": denominators, "metrics": metrics}


@dataclass(frozen=True, slots=True)
class Share:
    """A micro-batch of one adapter that may share a pass. `tally` collects its results."""

    adapter: str
    loss: LossSpec
    batch: MicroBatch
    tally: Tally


def shared_passes(policy: PolicyModel, adapters: Adapters, shares: Sequence[Share], tokens: int) -> None:
    """Evaluate micro-batches of several adapters in shared passes. Add their gradients.

    Each sequence of a row sees only itself, and each token only its own adapter. The gradients therefore equal those of
    separate passes, unless one of them is not finite.

    Raises:
        StateError: a loss is not finite.
    """
    for needs_gradient in (True, False):
        chosen = [share for share in shares if share.batch.needs_gradient == needs_gradient]
        for members in plan([share.batch.input_ids_1_L.shape[1] for share in chosen], tokens):
            with torch.set_grad_enabled(needs_gradient):
                _shared_pass(policy, adapters, [chosen[i] for i in members])


def _shared_pass(policy: PolicyModel, adapters: Adapters, shares: Sequence[Share]) -> None:
    row = _end_to_end([share.batch for share in shares])
    lengths = [share.batch.input_ids_1_L.shape[1] for share in shares]
    stretches = [(share.adapter, length) for share, length in zip(shares, lengths, strict=True)]
    totals: list[Tensor] = []
    with adapters.together(stretches, row.input_ids_1_L.device):
        parts = policy.hidden(row).split(lengths, dim=1)
        for share, hidden_1_L_H in zip(shares, parts, strict=True):
            adapters.activate(share.adapter)  # the output matrix is outside of the row: each uses its own
            found = policy.measure(hidden_1_L_H, share.batch, share.loss.temperature)
            total, sums = loss_of(found, share.batch, share.loss)
            share.tally.add(share.batch, found.logprobs.detach(), sums)
            totals.append(total)
        whole = torch.stack(totals).sum()
        if not whole.isfinite():
            raise StateError("a loss is not finite")
        if torch.is_grad_enabled():
            whole.backward()


def _end_to_end(batches: Sequence[MicroBatch]) -> MicroBatch:
    """Lay the rows of micro-batches end to end. Only the fields that a model reads are valid."""
    starts = [0]
    for batch in batches:
        starts.append(starts[-1] + batch.input_ids_1_L.shape[1])
    bounds = [batch.bounds[:-1] + start for batch, start in zip(batches, starts, strict=False)]
    experts = next((batch.experts_L_N_K for batch in batches if batch.experts_L_N_K is not None), None)
    if experts is not None:
        unknown = experts.new_full((1, *experts.shape[1:]), UNKNOWN)
        rows = [unknown.expand(b.input_ids_1_L.shape[1], -1, -1) for b in batches]
        given = [row if b.experts_L_N_K is None else b.experts_L_N_K for b, row in zip(batches, rows, strict=True)]
        experts = torch.cat(given)
    return replace(
        batches[0],
        input_ids_1_L=torch.cat([batch.input_ids_1_L for batch in batches], dim=1),
        position_ids_1_L=torch.cat([batch.position_ids_1_L for batch in batches], dim=1),
        bounds=torch.cat([*bounds, batches[0].bounds.new_tensor([starts[-1]])]),
        longest=max(batch.longest for batch in batches),
        experts_L_N_K=experts,
    )
