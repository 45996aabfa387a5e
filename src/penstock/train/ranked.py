"""A learner of several ranks (FSDP2): the shard that each rank holds, and rank 0's calls to all of them."""

# transformers and torch's distributed tensors ship partial types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from penstock.config import TrainConfig
from penstock.control_types import TensorSpec
from penstock.errors import LearnerError, PenstockError
from penstock.start_report import error_from_json, error_to_json
from penstock.train.batching import MicroBatch, collate
from penstock.train.interface import AdamSpec, Datum, Learner, Outputs
from penstock.train.learner import LocalLearner, ServedDtype, Sums
from penstock.train.loading import ModuleLoader, check_fits, checkpoint_files, load_whole, without_weights
from penstock.train.losses import LossSpec, loss_named
from penstock.train.policy_model import PolicyModel, compute_dtype, weights_dtype
from penstock.weights.checkpoint_names import checkpoint_names_of, distinct_tensors
from penstock.weights.manifest import TensorProvider

if TYPE_CHECKING:
    from penstock.train.ranks import RankGroup

# The name in torch 2.13, or the one in 2.11, which is deprecated.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # pyright: ignore[reportDeprecated]


class ShardedLearner(LocalLearner):
    """Holds a shard of all weights, gradients and optimiser state; reads a share of data.

    Every rank makes the same calls in the same order, and waits for the others in collectives.

    Attributes:
        specs: specs of all tensors that `take` returns, over all units, with the engines' names and dtypes.
    """

    def __init__(
        self, group: RankGroup, model_path: str, config: TrainConfig, *, seed: int, served_dtype: ServedDtype
    ) -> None:
        loss_named(config.loss)  # raises now if this rank does not find a user's loss
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

    def take(self, gathering: Mapping[str, Gathering], merged: str | None = None) -> list[tuple[str, Tensor]]:
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
            found = super()._run(loss, data)
        finally:
            sharded: Any = self.policy
            sharded.reshard()  # after a pass without a gradient, the root would stay whole
        logprobs = torch.cat([torch.zeros(0), *found.logprobs])
        dist.all_reduce(logprobs, group=self._group)  # they are 0 for other ranks' data
        shares = self._ranks.exchange(replace(found, logprobs=()))
        sums = {kind: _added([getattr(one, kind) for one in shares]) for kind in ("losses", "denominators", "metrics")}
        rows = logprobs.split([len(datum.target_ids) for datum in data])
        return Outputs([row.clone() for row in rows], **sums)  # a view would be sent, as a reference, with all rows

    def _batches(self, data: Sequence[Datum], loss: LossSpec) -> list[MicroBatch]:
        """Return this rank's share, once every rank has accepted all of the data."""
        whole, refusal = list[MicroBatch](), None
        try:
            whole = super()._batches(data, loss)
        except PenstockError as error:
            refusal = error_to_json(error)  # the class of a user's error may not bear to be sent
        for found in self._ranks.exchange(refusal):
            if found is not None:
                raise error_from_json(found)
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


class Gathering:
    """One tensor on its way to every rank. A shard is cast before it is sent, which halves the bytes.

    An asynchronous `DTensor.redistribute` would do the same. Over gloo, torch 2.13 corrupts the heap in it: a process
    died after 100 to 4,400 passes over nine tensors.
    """

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
        """Wait for all ranks' parts, and return the whole tensor."""
        if self._work is not None:
            self._work.wait()
            del self._local
        return self._full


def _on_every_rank(method: Callable[..., Any]) -> Any:
    """Return a method that makes every rank call its shard's method. The result is rank 0's."""

    @wraps(method)
    def call(self: RankedLearner, *arguments: Any, **options: Any) -> Any:
        return self._call(method.__name__, *arguments, **options)  # pyright: ignore[reportPrivateUsage]

    return call


class RankedLearner(Learner):
    """The learner of all ranks. It lives on rank 0 and holds one shard itself; the other ranks run `serve`.

    Any thread may call it, one at a time. Another thread may read `weights` at the same time.

    Raises:
        ConfigError: see `PolicyModel`.
        LearnerError: a rank was lost. Every later call raises it too.
    """

    def __init__(
        self, group: RankGroup, model_path: str, config: TrainConfig, *, seed: int, served_dtype: ServedDtype
    ) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._lost = ""
        options: dict[str, Any] = {"seed": seed, "served_dtype": served_dtype}
        with self._together("build", model_path, config, **options):
            self._part = ShardedLearner(group, model_path, config, **options)
            group.exchange(None)

    @property
    def versions(self) -> dict[str | None, int]:  # pyright: ignore[reportIncompatibleVariableOverride] - read only
        return self._part.versions

    forward = _on_every_rank(ShardedLearner.forward)
    forward_backward = _on_every_rank(ShardedLearner.forward_backward)
    optim_step = _on_every_rank(ShardedLearner.optim_step)
    discard_gradient = _on_every_rank(ShardedLearner.discard_gradient)
    create_adapter = _on_every_rank(ShardedLearner.create_adapter)
    drop_adapter = _on_every_rank(ShardedLearner.drop_adapter)
    set_adapter = _on_every_rank(ShardedLearner.set_adapter)
    release_memory = _on_every_rank(ShardedLearner.release_memory)

    def adapter_config(self, name: str) -> Mapping[str, Any]:
        return self._part.adapter_config(name)

    def weights(self, adapter: str | None) -> TensorProvider:
        """See `Learner.weights`. Each pass gathers layer by layer; the next layer is gathered while one is sent."""
        part = self._part
        if adapter is not None:  # every rank holds the whole adapter
            return TensorProvider(lambda: part.weights(adapter))
        return TensorProvider(self._gather_all, specs=part.specs)

    def merged_weights(self, adapter: str) -> TensorProvider:
        self._part.check_merging(adapter)
        return TensorProvider(lambda: self._gather_all(adapter), specs=self._part.specs)

    def save(self, adapter: str | None, folder: Path) -> Mapping[str, Any]:
        """See `Learner.save`. Every rank writes its shard, so all ranks must see the folder."""
        return self._call("save", adapter, folder.resolve())

    def load(self, adapter: str | None, folder: Path, values: Mapping[str, Any]) -> None:
        self._call("load", adapter, folder.resolve(), values)

    def stop(self) -> None:
        """End the other ranks, if no rank is lost."""
        if not self._lost:
            with self._together("stop"):
                pass
            self._lost = "the learner was stopped"

    def _call(self, command: str, *arguments: Any, **options: Any) -> Any:
        """Make every rank call a method of its shard. Return this rank's result, or raise the error of all."""
        with self._together(command, *arguments, **options):
            found, mine = _try(self._part, command, arguments, options)
            for rank, why in enumerate(self._group.exchange(_said(mine))):
                if mine is None and why is not None:  # the ranks now hold different states
                    raise LearnerError(f"rank {rank} of the learner failed: {why}")
        if mine is not None:
            raise mine
        return found

    def _gather_all(self, merged: str | None = None) -> Iterator[tuple[str, Tensor]]:
        units = iter(range(self._part.units))
        following = [self._gather(next(units), merged)]
        while following:
            tensors = self._take(following.pop(), merged)
            begun = False
            while tensors:
                # Each tensor is released once yielded, so only the following unit is held in addition.
                yield tensors.pop(0)
                if not begun:  # the reader has now released the unit before
                    following += [self._gather(unit, merged) for unit in itertools.islice(units, 1)]
                    begun = True

    def _gather(self, unit: int, merged: str | None) -> dict[str, Gathering]:
        with self._together("gather", unit, merged):
            return self._part.gather(unit, merged)

    def _take(self, gathering: Mapping[str, Gathering], merged: str | None) -> list[tuple[str, Tensor]]:
        with self._losing():  # outside the lock: a step may run now, and will fail too
            return self._part.take(gathering, merged)

    @contextmanager
    def _together(self, command: str, *arguments: Any, **options: Any) -> Generator[None]:
        """Send a command, and guard this rank's part in it. If it breaks off, the ranks are out of step."""
        with self._lock:
            if self._lost:
                raise LearnerError(self._lost)
            self._lost = "a call of the learner broke off, so that its ranks may hold different weights"
            with self._losing():
                self._group.tell((command, arguments, options))
                yield
            self._lost = ""

    @contextmanager
    def _losing(self) -> Generator[None]:
        """Turn a failure of torch.distributed or CUDA into the loss of the learner."""
        try:
            yield
        except RuntimeError as error:
            self._lost = f"the ranks of the learner lost each other: {' '.join(str(error).split())}"
            raise LearnerError(self._lost) from error


def serve(group: RankGroup) -> None:
    """Follow rank 0 until it says stop; called on every other rank.

    Raises:
        PenstockError: this rank cannot load the model.
        RuntimeError: rank 0 is gone, or torch failed.
    """
    part: Any = None
    while True:
        command, arguments, options = group.hear()
        if command == "stop":
            return
        if command == "build":
            part = None  # free its memory before the new learner takes some
            part = ShardedLearner(group, *arguments, **options)
            group.exchange(None)
        elif command == "gather":
            for gathering in part.gather(*arguments).values():
                gathering.wait()
        else:
            group.exchange(_said(_try(part, command, arguments, options)[1]))


def _try(part: ShardedLearner, command: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Return the result of a method, and the error that Penstock raised, which is the same on every rank."""
    try:
        return getattr(part, command)(*arguments, **options), None
    except PenstockError as error:
        return None, error


def _said(error: PenstockError | None) -> str | None:
    return None if error is None else str(error)


def _added(sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total = Counter[str]()
    for one in sums:
        total.update(one)
    return dict(total)  # a Counter would return 0 for a missing loss


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
