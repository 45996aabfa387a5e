"""The learner of one process: a language model and its optimiser, on CUDA or CPUs."""

# transformers ships partial types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from transformers import AutoConfig

from penstock.config import TrainConfig
from penstock.errors import CheckpointError, StateError, UserError
from penstock.train.batching import MicroBatch, default_device, micro_batch_tokens, micro_batches, plan
from penstock.train.checkpoint import read_tensors, write_tensors
from penstock.train.interface import UNKNOWN_EXPERT, AdamSpec, Datum, Learner, LoraSpec, Outputs
from penstock.train.loading import check_fits, load_whole, stored_dtypes
from penstock.train.logprobs import TokenLogprobs
from penstock.train.losses import LossSpec, loss_named
from penstock.train.policy_model import PolicyModel, compute_dtype, weights_dtype
from penstock.weights.checkpoint_names import checkpoint_tensors, is_adapter, plain_name

if TYPE_CHECKING:
    from penstock.train.lora import Adapters

ServedDtype = Literal["auto", "float32", "bfloat16", "float16"]
Sums = Mapping[str, Mapping[str, Tensor]]
"""Sums over a micro-batch by kind (a field of `Outputs`) and name."""


class LocalLearner(Learner):
    """Trains in this process, with master weights in fp32.

    Models compute without dropout, as engines do. `seed` is torch's, for losses that draw numbers. `served_dtype` is
    the dtype that engines take (`weights`); `auto`: each tensor's dtype in the checkpoint.

    Raises:
        ConfigError: see `check_fits` and `PolicyModel`.
    """

    _group: dist.ProcessGroup | None = None
    """Group of the ranks that write and read a checkpoint; None: this process alone."""

    def __init__(
        self,
        model_path: str,
        config: TrainConfig,
        *,
        seed: int,
        served_dtype: ServedDtype = "float32",
        device: torch.device | None = None,
    ) -> None:
        self.config = config
        self._model_path = model_path
        self.versions = {None: 0}
        self.device = device or default_device()
        self._use_threads()
        torch.manual_seed(seed)
        self.policy = self._load_policy(model_path)
        self._stored_dtypes = stored_dtypes(model_path) if served_dtype == "auto" else {}
        self._served_dtype = _config_dtype(model_path) if served_dtype == "auto" else getattr(torch, served_dtype)
        self._casts: dict[str, Tensor] = {}
        self._optimizers: dict[str | None, torch.optim.AdamW] = {}
        self._adapters: Adapters | None = None
        self._base_digest = ""
        # Compiled layers would be compiled again for each mix of adapters.
        self.joins = self._group is None and not config.compile
        if self._group is None:  # refuse a model that cannot be packed now; with ranks, the first step does
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                self._run(LossSpec({}), [Datum([0, 0], [0, 0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0])] * 2)

    def forward(self, adapter: str | None, loss: LossSpec, data: Sequence[Datum]) -> Outputs:
        self._use_threads()
        self._activate(adapter)
        with torch.no_grad():
            return self._run(loss, data)

    def forward_backward(self, adapter: str | None, loss: LossSpec, data: Sequence[Datum]) -> Outputs:
        """See `Learner.forward_backward`. Packed micro-batches hold at most `micro_batch_tokens` tokens."""
        self._use_threads()
        if not loss.parts:
            raise UserError("a loss of no parts has no gradient; name one in LossSpec.parts, or call forward")
        self._check_trained(adapter)
        self._activate(adapter)
        with ExitStack() as failed:
            failed.callback(self._optimizer(adapter).zero_grad)
            outputs = self._run(loss, data)
            failed.pop_all()
        return outputs

    def forward_backward_together(self, parts: Sequence[tuple[str, LossSpec, Sequence[Datum]]]) -> list[Outputs]:
        self._use_threads()
        shares: list[Share] = []
        tallies = [Tally(data) for _, _, data in parts]
        for (adapter, loss, data), tally in zip(parts, tallies, strict=True):
            self._activate(adapter)
            shares += [Share(adapter, loss, b.to(self.device), tally) for b in self._batches(data, loss)]
        parameters = [p for adapter, _, _ in parts for p in self._parameters(adapter).values()]
        held = [parameter.grad for parameter in parameters]
        with ExitStack() as failed:
            failed.callback(_set_gradients, parameters, held)
            _set_gradients(parameters, [None] * len(parameters))
            shared_passes(
                self.policy, self._adapters_of(parts[0][0]), shares, micro_batch_tokens(self.config, self.device)
            )
            found = [parameter.grad for parameter in parameters if parameter.grad is not None]
            if not torch.nn.utils.get_total_norm(found).isfinite():
                raise StateError("a gradient is not finite")
            failed.pop_all()
        for parameter, old in zip(parameters, held, strict=True):
            if old is not None:
                parameter.grad = old if parameter.grad is None else parameter.grad.add_(old)
        return [tally.outputs() for tally in tallies]

    def optim_step(self, adapter: str | None, adam: AdamSpec, *, scale: float) -> float:
        self._use_threads()
        self._check_trained(adapter)
        parameters = list(self._parameters(adapter).values())
        for parameter in parameters if scale != 1.0 else ():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        norm: Any = torch.nn.utils.clip_grad_norm_(parameters, adam.grad_clip_norm or math.inf)
        grad_norm = float(_whole(norm))
        optimizer = self._optimizer(adapter)
        if math.isfinite(grad_norm):
            optimizer.param_groups[0].update(
                lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay
            )
            optimizer.step()
            self.versions[adapter] += 1
        optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(grad_norm):
            raise StateError(
                f"a gradient of norm {grad_norm}: nothing was changed; lower the learning rate, and look at the "
                "logprobs and ratios of the data"
            )
        return grad_norm

    def discard_gradient(self, adapter: str | None) -> None:
        self._check_trained(adapter)
        parameters = list(self._parameters(adapter).values())
        _set_gradients(parameters, [None] * len(parameters))

    def create_adapter(self, name: str, spec: LoraSpec) -> None:
        from penstock.train.lora import Adapters  # noqa: PLC0415 - most runs have no adapters, and peft takes seconds

        if self.versions[None]:
            raise StateError("the base's weights have been trained; adapters need a learner of their own")
        adapters = self._adapters or Adapters(self.policy.model, compiled=self.config.compile)
        adapters.create(name, spec)  # raises before it changes the model
        self._adapters = adapters
        self._optimizers.pop(None, None)
        for parameter in self._parameters(None).values():
            parameter.grad = None
        self.versions[name] = 1

    def drop_adapter(self, name: str) -> None:
        self._adapters_of(name).drop(name)
        self._optimizers.pop(name, None)
        del self.versions[name]

    def set_adapter(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        parameters = self._parameters(name)
        for key in sorted(parameters.keys() | tensors.keys()):
            here, there = (list(t[key].shape) if key in t else None for t in (parameters, tensors))
            if here != there:
                raise UserError(f"the adapter's tensor {key} has the shape {there}, and this model's {here}")
            if not tensors[key].isfinite().all():
                raise UserError(f"the adapter's tensor {key} has a value that is no finite number")
        with torch.no_grad():
            for key, parameter in parameters.items():
                parameter.copy_(tensors[key])
        self._optimizer(name).zero_grad()
        del self._optimizers[name]

    def adapter_config(self, name: str) -> Mapping[str, Any]:
        return self._adapters_of(name).config(name)

    def weights(self, adapter: str | None) -> Iterator[tuple[str, Tensor]]:
        """See `Learner.weights`. A tensor is live if it has the engines' dtype, else a copy.

        Copies keep their place in memory for the next version, so engines that map it (`cuda_ipc`) do so only once.
        """
        if adapter is not None:
            for name, parameter in self._adapters_of(adapter).parameters(adapter).items():
                yield name, parameter.detach()
            return
        yield from self._served({})

    def merged_weights(self, adapter: str) -> Iterator[tuple[str, Tensor]]:
        adapters = self._adapters_of(adapter)
        layers = adapters.merged(adapter)
        return self._served({name: partial(adapters.delta, adapter, layer) for name, layer in layers.items()})

    def _served(self, changes: Mapping[str, Callable[[], Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the base's weights, adding `changes` to some of them."""
        for name, weight in checkpoint_tensors(self.policy.model).items():
            tensor = weight.detach()
            if name in changes:
                tensor = tensor.float() + changes[name]().detach()
            dtype = self._dtype_of(name)
            if dtype == tensor.dtype:
                yield name, tensor
                continue
            if name not in self._casts:
                self._casts[name] = torch.empty_like(tensor, dtype=dtype)
            yield name, self._casts[name].copy_(tensor)

    def save(self, adapter: str | None, folder: Path) -> Mapping[str, Any]:
        write_tensors(folder, self._state(adapter), self._group)
        return {"version": self.versions[adapter]} | ({} if adapter is None else {"base": self._fingerprint()})

    def load(self, adapter: str | None, folder: Path, values: Mapping[str, Any]) -> None:
        self.load_state(adapter, read_tensors(folder, self._blank, self._group), values)

    def release_memory(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _state(self, adapter: str | None) -> dict[str, Tensor]:
        """Return the live tensors that `save` writes."""
        optimizer = self._optimizer(adapter)
        tensors: dict[str, Tensor] = {"rng/cpu": torch.get_rng_state()}
        for name, parameter in self._parameters(adapter).items():
            tensors[f"model/{name}"] = parameter.detach()
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer/{key}/{name}"] = value
        if self.device.type == "cuda":
            tensors["rng/cuda"] = torch.cuda.get_rng_state(self.device)
        return tensors

    def load_state(self, adapter: str | None, state: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore the state that `save` wrote, and discard the current gradient.

        Raises:
            CheckpointError: the state belongs to another model; nothing is changed.
        """
        parameters = self._parameters(adapter)
        here = {f"model/{name}": tuple(parameter.shape) for name, parameter in parameters.items()}
        there = {name: tuple(tensor.shape) for name, tensor in state.items() if name.startswith("model/")}
        for name in sorted(here.keys() | there.keys()):
            if here.get(name) != there.get(name):
                raise CheckpointError(
                    f"the checkpoint is of another model: {name} has shape {here.get(name)} here and {there.get(name)} "
                    "there; resume with the model of that run, or start a new one"
                )
        if adapter is not None and values.get("base") != self._fingerprint():
            raise CheckpointError(
                f"the checkpoint is of an adapter of another base model than {self._model_path}; resume with the model "
                "of that run, or start a new one"
            )
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(state[f"model/{name}"])
        optimizer = self._optimizer(adapter)
        optimizer.zero_grad()  # a gradient belongs to the replaced weights
        optimizer.state.clear()
        for key, value in state.items():
            if key.startswith("optimizer/"):
                _, entry, name = key.split("/", 2)
                # AdamW counts its steps on the CPU unless it is fused.
                place = "cpu" if entry == "step" and adapter is None else self.device
                optimizer.state[parameters[name]][entry] = value.to(place, copy=True)
        torch.set_rng_state(state["rng/cpu"])
        if self.device.type == "cuda" and "rng/cuda" in state:
            torch.cuda.set_rng_state(state["rng/cuda"], self.device)
        self.versions[adapter] = int(values["version"])

    def _run(self, loss: LossSpec, data: Sequence[Datum]) -> Outputs:
        """Evaluate all data, with gradients if autograd is on."""
        tally = Tally(data)
        for given in self._batches(data, loss):
            batch = given.to(self.device)
            tally.add(batch, *self._measure(batch, loss))
        return tally.outputs()

    def _measure(self, batch: MicroBatch, loss: LossSpec) -> tuple[Tensor, Sums]:
        """Evaluate a micro-batch and add its gradient. Return logprobs `[K]`, and sums as in `Outputs`."""
        with torch.set_grad_enabled(batch.needs_gradient and torch.is_grad_enabled()):
            found = self.policy(batch, loss.temperature)
            total, sums = loss_of(found, batch, loss)
            if torch.is_grad_enabled():
                total.backward()
        return found.logprobs.detach(), sums

    def _load_policy(self, model_path: str) -> PolicyModel:
        check_fits(model_path, self.config, self.device, frozen_bytes=compute_dtype(self.config, self.device).itemsize)
        model = load_whole(model_path, weights_dtype(self.config, self.device)).to(self.device)
        return PolicyModel(model, model_path, self.config, self.device)

    def _batches(self, data: Sequence[Datum], loss: LossSpec) -> list[MicroBatch]:
        """Return the micro-batches of this process. Every rank refuses the same invalid data."""
        for datum in data:
            if datum.experts is not None:
                self.policy.replay.check(torch.as_tensor(datum.experts, dtype=torch.long))
        ranks = 1 if self._group is None else self._group.size()
        tokens = micro_batch_tokens(self.config, self.device)
        return micro_batches(data, loss, tokens, vocabulary=self.policy.vocabulary, ranks=ranks)

    def _dtype_of(self, name: str) -> torch.dtype:
        return self._stored_dtypes.get(name, self._served_dtype)

    def _blank(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a tensor of a saved state: this rank's part where parameters are sharded."""
        parameter = self._parameters(None).get(name.rpartition("/")[2])
        if isinstance(parameter, DTensor) and tuple(parameter.shape) == tuple(shape):
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return torch.empty(tuple(shape), dtype=dtype)

    def _parameters(self, adapter: str | None) -> Mapping[str, Parameter]:
        """Return the parameters that `optim_step` changes, by their names in saved states."""
        if adapter is not None:
            return self._adapters_of(adapter).parameters(adapter)
        named = self.policy.model.named_parameters()
        return {plain_name(name): parameter for name, parameter in named if not is_adapter(name)}

    def _fingerprint(self) -> str:
        """Return a digest of the frozen base: each tensor's sum of bits and a few values."""
        if not self._base_digest:
            digest = hashlib.blake2b(digest_size=16)
            for name, parameter in self._parameters(None).items():
                whole = _whole(parameter.detach()).contiguous()
                bits = int(whole.view(torch.int16 if whole.itemsize == 2 else torch.int32).sum(dtype=torch.int64))  # noqa: PLR2004
                digest.update(f"{name}{tuple(whole.shape)}{bits}{whole.flatten()[:8].tolist()}".encode())
            self._base_digest = digest.hexdigest()
        return self._base_digest

    def _optimizer(self, adapter: str | None) -> torch.optim.AdamW:
        if adapter not in self._optimizers:
            # An adapter has hundreds of small tensors. One fused step is faster than one step for each.
            self._optimizers[adapter] = torch.optim.AdamW(self._parameters(adapter).values(), fused=adapter is not None)
        return self._optimizers[adapter]

    def _adapters_of(self, name: str) -> Adapters:
        if self._adapters is None or name not in self.versions:
            known = ", ".join(repr(known) for known in self.versions if known is not None) or "none"
            raise UserError(f"the learner has no adapter {name!r}; it has {known}")
        return self._adapters

    def _check_trained(self, adapter: str | None) -> None:
        if adapter is None and self._adapters is not None:
            raise StateError("the base's weights are frozen, as adapters are trained on them; name an adapter")

    def _activate(self, adapter: str | None) -> None:
        adapters = self._adapters if adapter is None else self._adapters_of(adapter)
        if adapters is not None:
            adapters.activate(adapter)

    def _use_threads(self) -> None:
        # Set this in each call, because it belongs to the calling thread.
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)


def _set_gradients(parameters: Sequence[Parameter], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _whole(tensor: Tensor) -> Tensor:
    """Return a whole tensor from its shards. All ranks must call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _config_dtype(model_path: str) -> torch.dtype:
    """Return the dtype in the checkpoint's config. Engines use it if a tensor's header names none."""
    config: Any = AutoConfig.from_pretrained(model_path)
    return config.dtype or config.get_text_config().dtype or torch.float32


# --- passes over packed data, of one adapter, or of several in a shared pass ------------------------------------------


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
        unknown = experts.new_full((1, *experts.shape[1:]), UNKNOWN_EXPERT)
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
