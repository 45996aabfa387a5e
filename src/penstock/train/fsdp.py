"""One rank's part of a sharded learner (FSDP2): its shards and its share of data.

Every rank makes the same calls in the same order (`ranked.py`). The ranks wait for each other in collectives.
"""

# transformers and torch's distributed tensors ship partial types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from penstock.config import TrainConfig
from penstock.control_types import TensorSpec
from penstock.errors import LearnerError, PenstockError
from penstock.train.batching import MicroBatch, collate
from penstock.train.interface import AdamSpec, Datum, Outputs
from penstock.train.learner import LocalLearner, ServedDtype
from penstock.train.loading import ModuleLoader, check_fits, checkpoint_files, load_whole, without_weights
from penstock.train.losses import LossSpec
from penstock.train.passes import Sums
from penstock.train.policy_model import PolicyModel, compute_dtype, weights_dtype
from penstock.train.rank_group import RankGroup
from penstock.weights.checkpoint_names import checkpoint_names_of, distinct_tensors

# The name in torch 2.13, or the one in 2.11, which is deprecated.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # pyright: ignore[reportDeprecated]

REFUSED_ELSEWHERE = "another rank of the learner refused the data"
"""Message of a rank that accepted the data."""


class ShardedLearner(LocalLearner):
    """Holds a shard of all weights, gradients and optimiser state; reads a share of data.

    Attributes:
        specs: specs of all tensors that `take` returns, over all units, with the engines' names and dtypes.
    """

    def __init__(
        self, group: RankGroup, model_path: str, config: TrainConfig, *, seed: int, served_dtype: ServedDtype
    ) -> None:
        self._ranks, self._group = group, group.gloo
        super().__init__(model_path, config, seed=seed, served_dtype=served_dtype, device=group.device)
        self._units = _units(self.policy)
        self.specs: list[TensorSpec] = []
        self._kept: set[str] = set()
        """Tensors with the same name in the checkpoint."""
        for unit in self._units:
            blank = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in unit}
            found = checkpoint_names_of(self.policy.model, blank)
            self._kept |= blank.keys() & found.keys()
            self.specs += [
                TensorSpec(name, str(self._dtype_of(name)).removeprefix("torch."), tuple(tensor.shape))
                for name, tensor in found.items()
            ]

    @property
    def units(self) -> int:
        """Number of `gather` calls for a whole version."""
        return len(self._units)

    def check_merging(self, adapter: str) -> None:
        self._adapters_of(adapter).merged(adapter)

    def optim_step(self, adapter: str | None, adam: AdamSpec, *, scale: float) -> float:
        """See `Learner.optim_step`. Every rank holds the whole adapter, and the gradient of its share of the data."""
        if adapter is not None:
            for parameter in self._parameters(adapter).values():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
        return super().optim_step(adapter, adam, scale=scale)

    def gather(self, unit: int, merged: str | None = None) -> dict[str, Gathering]:
        """Begin to gather a unit on every rank. It is a decoder layer, or one tensor outside of the layers.

        `merged`: adapter whose product `take` adds.
        """
        narrow = {name for name in self._kept if merged is None}  # cast before sending, to send fewer bytes
        return {
            name: Gathering(tensor, self._dtype_of(name) if name in narrow else tensor.dtype, self._ranks.size)
            for name, tensor in self._units[unit]
        }

    def take(self, gathering: dict[str, Gathering], merged: str | None = None) -> list[tuple[str, Tensor]]:
        """Wait for a unit; return its tensors with their checkpoint names, in the dtypes that engines take."""
        found = checkpoint_names_of(self.policy.model, {name: part.wait() for name, part in gathering.items()})
        if merged is not None:
            adapters = self._adapters_of(merged)
            for name, layer in adapters.merged(merged).items():
                if name in found:
                    found[name] = found[name].float() + adapters.delta(merged, layer).detach()
        return [(name, tensor.to(self._dtype_of(name))) for name, tensor in found.items()]

    def _load_policy(self, model_path: str) -> PolicyModel:
        dtype = compute_dtype(self.config, self.device)
        devices = self._ranks.size if self.device.type == "cuda" else 1  # ranks on CPUs share one memory
        check_fits(model_path, self.config, self.device, frozen_bytes=dtype.itemsize, ranks=devices)
        held = weights_dtype(self.config, self.device)
        files = checkpoint_files(model_path)
        model = without_weights(model_path, held) if files else load_whole(model_path, held)
        policy = PolicyModel(model, model_path, self.config, self.device)
        policy.autocast = False  # FSDP casts the gathered weights instead
        half = dtype != torch.float32
        precision = MixedPrecisionPolicy(dtype, torch.float32) if half else MixedPrecisionPolicy()
        mesh = init_device_mesh(self.device.type, (self._ranks.size,))
        loader = ModuleLoader(model, model_path, files) if files else None
        for part in (*policy.layers, policy):
            if loader is not None:  # at most one layer at a time is whole here, until it is sharded
                loader.load(model if part is policy else part)
            sharded: Any = fully_shard(part, mesh=mesh, mp_policy=precision)
            sharded.set_gradient_divide_factor(1.0)  # sums, not means over ranks
            sharded.set_force_sum_reduction_for_comms(enable=True)  # gloo has only sums
        return policy

    def _run(self, loss: LossSpec, data: Sequence[Datum]) -> Outputs:
        try:
            return super()._run(loss, data)
        finally:
            sharded: Any = self.policy
            sharded.reshard()  # after a pass without a gradient, the root would stay whole

    def _batches(self, data: Sequence[Datum], loss: LossSpec) -> list[MicroBatch]:
        """Return this rank's share, once every rank has accepted all of the data."""
        accepted = torch.zeros(1)
        try:
            whole = super()._batches(data, loss)
            accepted += 1
        finally:
            dist.all_reduce(accepted, dist.ReduceOp.MIN, group=self._group)
        if not accepted.item():
            raise LearnerError(REFUSED_ELSEWHERE)
        return self._share(whole)

    def _share(self, whole: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Take as many batches of each kind as every other rank. Ranks wait for each other in every layer."""
        mine: list[MicroBatch] = []
        for needs_gradient in (True, False):
            batches = [batch for batch in whole if batch.needs_gradient == needs_gradient]
            share = batches[self._ranks.rank :: self._ranks.size]
            missing = math.ceil(len(batches) / self._ranks.size) - len(share)
            mine += [*share, *[replace(_nothing(), needs_gradient=needs_gradient)] * missing]
        return mine

    def _measure(self, batch: MicroBatch, loss: LossSpec) -> tuple[Tensor, Sums]:
        if batch.indices:
            try:
                return super()._measure(batch, loss)
            except PenstockError as error:  # unexpected after `_batches`; the other ranks now wait in a layer
                raise RuntimeError(f"rank {self._ranks.rank} refused in the midst of a step: {error}") from error
        with torch.set_grad_enabled(batch.needs_gradient and torch.is_grad_enabled()):
            nothing = self.policy(batch, loss.temperature).logprobs
            if torch.is_grad_enabled():
                nothing.sum().backward()  # contributes zeros to the reduction
        return nothing.detach(), {}

    def _blank(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        parameter = self._parameters(None).get(name.rpartition("/")[2])
        if isinstance(parameter, DTensor) and tuple(parameter.shape) == tuple(shape):
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return super()._blank(name, shape, dtype)


class Gathering:
    """One tensor on its way to every rank. A shard is cast before it is sent, which halves the bytes."""

    def __init__(self, tensor: Tensor, dtype: torch.dtype, ranks: int) -> None:
        self._work: Any = None
        if not isinstance(tensor, DTensor):
            self._full = tensor.detach().to(dtype)
            return
        rows = tensor.shape[0]
        shard: Any = tensor.detach()
        local: Tensor = shard.to_local().to(dtype)
        most = math.ceil(rows / ranks)
        if len(local) < most:  # the last ranks have fewer rows, or none
            local = torch.cat([local, local.new_zeros(most - len(local), *local.shape[1:])])
        gathered = local.new_empty(most * ranks, *local.shape[1:])
        self._local = local  # kept alive until it is sent
        # Send bytes, because gloo does not support all dtypes.
        flat, source = gathered.view(-1).view(torch.uint8), local.contiguous().view(-1).view(torch.uint8)
        self._work = _all_gather(flat, source, async_op=True)
        self._full = gathered[:rows]

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            del self._local
        return self._full


def _units(policy: PolicyModel) -> list[list[tuple[str, Tensor]]]:
    """Return a model's tensors in units. A unit is a decoder layer, or one tensor outside of the layers."""
    names = {module: name for name, module in policy.model.named_modules()}
    layers = tuple(f"{names[layer]}." for layer in policy.layers)
    units: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in distinct_tensors(policy.model).items():
        unit = next((layer for layer in layers if name.startswith(layer)), name)
        units.setdefault(unit, []).append((name, tensor))
    return list(units.values())


def _nothing() -> MicroBatch:
    """Return a micro-batch of one token whose logprob is not used."""
    datum = Datum([0], [0], [0.0], [0.0], [0.0])
    return replace(collate([datum], LossSpec({})), indices=(), places=())
