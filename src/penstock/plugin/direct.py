"""Updates by plain copies at memory speed, for models whose loading is proved to be only copies.

1. `trace` runs the model's own `load_weights` on tensors without memory, and records every `copy_`.
2. The first update uses vLLM's reload, and proves the copies: they would have made the same bits.
3. Later updates use the copies. Without the proof, vLLM's reload stays: right for any model, but ten times as slow.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.model_executor.layers.attention import Attention, MMEncoderAttention
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.v1.attention.backend import AttentionImplBase

from penstock.errors import PenstockError
from penstock.plugin import attempt
from penstock.plugin.compat import without_adapters
from penstock.weights.checksum import DeviceSums, device_sums
from penstock.weights.manifest import Source, TensorEntry, WeightManifest

logger = logging.getLogger("vllm.penstock")
"""A child of vLLM's logger, the only one with a handler in a worker."""

PLAIN_METHODS = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"})
"""vLLM's methods that keep nothing of the weights except the parameters."""
KV_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale")


class DirectLoads:
    """The plan of one worker, kept for versions whose tensors have the same names, dtypes and shapes."""

    def __init__(self) -> None:
        self.plan: DirectPlan | None = None
        self.proved = False
        self._planned: tuple[Any, ...] | None = None

    def prepare(self, model: Any, manifest: WeightManifest) -> None:
        """Make the plan, unless it exists. The weights in force stay the same."""
        planned = tuple((e.name, e.dtype, e.shape) for e in manifest.tensors)
        if planned != self._planned:
            with without_adapters(model):
                self.plan = make_plan(model, manifest.tensors)
            self._planned, self.proved = planned, False

    def copy(self, manifest: WeightManifest, source: Source) -> None:
        """Load a version by the proved plan."""
        assert self.plan is not None  # noqa: S101 - only a plan can be proved
        with torch.no_grad():
            for entry, tensor in source.tensors(manifest, self.plan.place):
                self.plan.put(entry.name, tensor)
        torch.accelerator.synchronize()

    def proof(self) -> Proof | None:
        """Return the comparison of a reload with the plan; None: there is no plan."""
        return None if self.plan is None else Proof(self.plan)

    def settle(self, proof: Proof, model: Any) -> None:
        """Keep the plan if the finished reload has proved it."""
        with without_adapters(model):
            self.proved = proof.holds(model)
        self.plan = self.plan if self.proved else None


class NotDirectError(PenstockError):
    """This model's loading does more than copy."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One copy: a strided part of a checkpoint tensor goes to `target`, a view of live memory."""

    target: torch.Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    """Offset in elements from the first element of the checkpoint tensor."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.start)


class DirectPlan:
    """The copies of every checkpoint tensor, by the tensor's name."""

    def __init__(self, pieces: dict[str, list[Piece]]) -> None:
        self.pieces = pieces

    def place(self, entry: TensorEntry) -> torch.Tensor | None:
        match self.pieces.get(entry.name):
            case [piece] if piece.start == 0 and piece.shape == entry.shape and piece.target.is_contiguous():
                contiguous = torch.empty(entry.shape, device="meta").stride() == piece.stride
                return piece.target if contiguous and dtype_of(entry) == piece.target.dtype else None
            case _:
                return None

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Copy one whole checkpoint tensor to its places, unless it already lies there."""
        tensor = tensor.contiguous()
        for piece in self.pieces.get(name, ()):
            if piece.target.data_ptr() != tensor.data_ptr():
                piece.target.copy_(piece.of(tensor), non_blocking=True)


def make_plan(model: torch.nn.Module, entries: Sequence[TensorEntry]) -> DirectPlan | None:
    """Find the copies that load such tensors, not yet proved; None: copies are not enough. Steps may run."""

    def plan() -> DirectPlan:
        _refuse_what_derives(model, entries)
        with torch.no_grad(), _nothing_kept(model):
            return DirectPlan(trace(model, entries))

    found, error = attempt(plan, "planning copies")  # runs the model's own code; vLLM's reload is right in any case
    if error is not None:
        _say_slow(error)
    return found


class Proof:
    """Compares the result of a reload with the result that a plan's copies of the same tensors would have."""

    def __init__(self, plan: DirectPlan) -> None:
        self._plan = plan
        self._sent = DeviceSums()
        self._targets: list[tuple[str, torch.Tensor]] = []

    def note(self, name: str, tensor: torch.Tensor) -> None:
        """Record a tensor on the model's device that is about to be loaded."""
        pieces = self._plan.pieces.get(name, ())
        tensor = tensor.contiguous()
        if pieces:
            self._sent.add(*(piece.of(tensor).to(piece.target.dtype) for piece in pieces))
        self._targets += [(name, piece.target) for piece in pieces]

    def holds(self, model: torch.nn.Module) -> bool:
        """Whether updates may be copied from now on, once a whole version is loaded."""
        try:
            with torch.no_grad():
                self._check(model)
        except (NotDirectError, RuntimeError) as error:  # torch's own: no memory, or no such operation for this dtype
            _say_slow(error)
            return False
        logger.info("updates of %d tensors are copied to their places", len(self._plan.pieces))
        return True

    def _check(self, model: torch.nn.Module) -> None:
        in_force = device_sums(target for _, target in self._targets)
        for (name, _), sent, found in zip(self._targets, self._sent.values(), in_force, strict=True):
            if sent != found:
                raise NotDirectError(f"the copies of {name} are not what vLLM loads")
        filled: dict[int, list[torch.Tensor]] = defaultdict(list)
        for _, target in self._targets:
            filled[memory_of(target)].append(target)
        for name, parameter in model.named_parameters():
            targets = filled[memory_of(parameter)]
            if parameter.numel() and not targets:
                raise NotDirectError(f"{name} was not loaded")
            rest = torch.empty_strided(parameter.shape, parameter.stride(), dtype=torch.bool, device=parameter.device)
            rest.fill_(True)  # noqa: FBT003 - an element
            for target in targets:
                offset = target.storage_offset() - parameter.storage_offset()
                rest.as_strided(target.shape, target.stride(), offset).fill_(False)  # noqa: FBT003
            if rest.any() and ((parameter.detach() != 0) & rest).any():  # padding is zero
                raise NotDirectError(f"{name} holds what no tensor of the update brings")


def _say_slow(error: Exception) -> None:
    logger.warning("updates are loaded by vLLM's layerwise reload, which takes longer than copies: %r", error)


# --- which copies loading makes --------------------------------------------------------------------------------------


def trace(model: torch.nn.Module, entries: Sequence[TensorEntry]) -> dict[str, list[Piece]]:
    """Find the copies that loading makes. NotDirectError: it does more."""
    tensors = {e.name: torch.empty(e.shape, dtype=dtype_of(e), device="meta") for e in entries}
    sources = {tensor.untyped_storage()._cdata: name for name, tensor in tensors.items()}  # noqa: SLF001
    load_weights: Any = model.load_weights
    with _Recorder(sources) as recorder, _NoNewMemory():
        load_weights(iter(tensors.items()))
    return dict(recorder.pieces)


class _Recorder(TorchDispatchMode):
    """Records copies from the checkpoint's tensors, and refuses every other change of live memory."""

    def __init__(self, sources: dict[int, str]) -> None:
        super().__init__()
        self.pieces: dict[str, list[Piece]] = defaultdict(list)
        self._sources = sources

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].device.type == "meta":
            target, source = args[0], args[1]
            name = self._sources.get(source.untyped_storage()._cdata)  # noqa: SLF001 - its only identity on meta
            if name is None or target.shape != source.shape:
                raise NotDirectError(f"a copy of shape {tuple(source.shape)} is not from the checkpoint as it is")
            piece = Piece(target.detach(), tuple(source.shape), source.stride(), source.storage_offset())
            self.pieces[name].append(piece)
            return target
        if func is torch.ops.aten.fill_.Scalar and args[1] == 0:  # padding, zero before and after
            return args[0]
        if any(True for _ in written(func, args, kwargs or {})):
            raise NotDirectError(f"loading calls {func}")
        return func(*args, **(kwargs or {}))


class _NoNewMemory(TorchFunctionMode):
    """Refuses to replace a tensor's memory (`parameter.data = ...`), which is not an operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == vars(torch._C.TensorBase)["data"].__set__:  # noqa: SLF001 - each look-up makes another object
            raise NotDirectError("loading gives a parameter other memory")
        return func(*args, **(kwargs or {}))


def written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors with memory to which a call of an operator writes."""
    for number, name in _arguments_written(func):
        given = args[number] if number < len(args) else kwargs.get(name)
        for tensor in tree_leaves(given):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                yield tensor


@functools.cache
def _arguments_written(func: Any) -> list[tuple[int, str]]:
    arguments = enumerate(func._schema.arguments)  # noqa: SLF001 - it has no public name
    return [(number, a.name) for number, a in arguments if a.alias_info is not None and a.alias_info.is_write]


def memory_of(tensor: torch.Tensor) -> int:
    """Return the address of the memory under a view."""
    return tensor.untyped_storage().data_ptr()


def dtype_of(entry: TensorEntry) -> torch.dtype:
    """Return torch's dtype of an entry."""
    return getattr(torch, entry.dtype)


# --- loading that does more than copy --------------------------------------------------------------------------------


def _refuse_what_derives(model: torch.nn.Module, entries: Sequence[TensorEntry]) -> None:
    """Raise NotDirectError for layers that compute tensors from loaded weights."""
    if scales := [entry.name for entry in entries if entry.name.endswith(KV_SCALES)]:
        raise NotDirectError(f"{scales[0]} scales a KV cache, which is more than a copy")
    for name, module in model.named_modules():
        kind = type(module).__name__
        after_loading = getattr(type(module), "process_weights_after_loading", None)
        if after_loading is not None and not isinstance(module, QuantizeMethodBase):  # seen with its layer
            if not _derives_nothing(module, after_loading):
                raise NotDirectError(f"{name}, a {kind}, may compute other tensors from weights once they are loaded")
            continue  # its method scales its KV cache (`KV_SCALES`)
        method = getattr(module, "quant_method", None)
        if method is not None and type(method).__name__ not in PLAIN_METHODS | {"NoneType"}:
            raise NotDirectError(f"{name} is a {kind} with {type(method).__name__}")


def _derives_nothing(layer: Any, after_loading: Callable[..., None]) -> bool:
    """Whether a layer's own `process_weights_after_loading` (0.26 to 0.33) derives nothing."""
    if after_loading is MMEncoderAttention.process_weights_after_loading:
        return True  # reads scales from a file
    if after_loading is not Attention.process_weights_after_loading:
        return False  # for example MLA's, which absorbs a projection
    variants = layer.impl.get_impl_variants() if hasattr(layer.impl, "get_impl_variants") else (layer.impl,)
    return all(
        type(impl).process_weights_after_loading is AttentionImplBase.process_weights_after_loading
        # FlashInfer and b12x compute with a copy of the attention sinks, unless these are absent or float32.
        or (hasattr(impl, "_sinks_source") and impl.sinks is impl._sinks_source)  # noqa: SLF001
        for impl in variants
    )


@contextmanager
def _nothing_kept(model: torch.nn.Module) -> Iterator[None]:
    """Raise NotDirectError if a module or its helpers hold other tensors afterwards, and undo that."""
    owners = (
        (module, getattr(module, "impl", None), getattr(module, "quant_method", None)) for module in model.modules()
    )
    held = [vars(owner) for of_module in owners for owner in of_module if hasattr(owner, "__dict__")]
    before = [dict(attributes) for attributes in held]
    changed: list[str] = []
    try:
        yield
    finally:
        for now, then in zip(held, before, strict=True):
            for key in now.keys() | then.keys():
                values = now.get(key), then.get(key)
                if values[0] is not values[1] and any(isinstance(value, torch.Tensor) for value in values):
                    changed.append(key)
                    del now[key]
                    now.update((name, value) for name, value in then.items() if name == key)
    if changed:
        raise NotDirectError(f"loading computes {changed[0]}")
