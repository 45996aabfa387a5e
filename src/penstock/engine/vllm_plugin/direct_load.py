"""Where in a model's memory each tensor of a checkpoint belongs, so that updates are plain copies.

vLLM's layerwise reload loads any model right, at a price: each layer is taken apart, its tensors are gathered, loaded
into new memory, processed, and copied to where the kernels look. For an unquantised model on a GPU all of this comes
down to copies, and which ones does not depend on the values. So they are found once, by running the model's own
`load_weights` on tensors without memory (torch's meta device) and noting every `copy_` from them, and then proved: the
layerwise reload is run on random tensors, and what it would have put in force must be, bit for bit, what the copies
make. Nothing in force is touched by either. A model for which this fails in any way is reloaded by vLLM as ever.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import logging
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload import layerwise

from penstock.errors import PenstockError
from penstock.weights.manifest import TensorEntry

logger = logging.getLogger(__name__)

PLAIN_METHODS = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"})
"""vLLM's methods that keep nothing else of the weights than the parameters themselves."""
DERIVING_LAYERS = frozenset({"MLAAttention"})
"""Layers that compute other tensors from their weights when these are loaded."""


class NotDirectError(PenstockError):
    """This model's loading is more than copies."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One copy: a strided part of a checkpoint tensor goes to `target`, a view of live memory."""

    target: torch.Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    """Elements from the checkpoint tensor's first."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a whole, contiguous checkpoint tensor."""
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.start)


class DirectPlan:
    """The copies of every checkpoint tensor."""

    def __init__(self, pieces: dict[str, list[Piece]]) -> None:
        self._pieces = pieces

    def place(self, entry: TensorEntry) -> torch.Tensor | None:
        """See `sources.Place`."""
        match self._pieces.get(entry.name):
            case [piece] if piece.start == 0 and piece.shape == entry.shape and piece.target.is_contiguous():
                contiguous = torch.empty(entry.shape, device="meta").stride() == piece.stride
                return piece.target if contiguous and _dtype(entry) == piece.target.dtype else None
            case _:
                return None

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Copy one whole checkpoint tensor to where it belongs; nothing, if it came there already."""
        tensor = tensor.contiguous()
        for piece in self._pieces.get(name, ()):
            if piece.target.data_ptr() != tensor.data_ptr():
                piece.target.copy_(piece.of(tensor), non_blocking=True)

    def knows(self, name: str) -> bool:
        """Whether anything of this tensor is on this worker."""
        return name in self._pieces

    def of_memory(self, parameter: torch.Tensor) -> Iterator[tuple[str, Piece]]:
        """The pieces that fill a parameter, with the names of their tensors."""
        for name, pieces in self._pieces.items():
            for piece in pieces:
                if _memory(piece.target) == _memory(parameter):
                    yield name, piece


def make_plan(
    model: torch.nn.Module, model_config: Any, entries: Sequence[TensorEntry], device: torch.device
) -> DirectPlan | None:
    """The proved plan of a model for tensors of these names, dtypes and shapes; None where there is none.

    The model's weights stay as they are, but no step may run meanwhile.
    """
    try:
        _refuse_what_derives(model)
        plan = DirectPlan(_trace(model, entries))
        _Proof(model, entries, plan, device).run(model_config)
    except Exception as error:  # noqa: BLE001 - the reload of vLLM is right in any case, and only slower
        logger.info("weights are loaded by vLLM's layerwise reload, not in place: %r", error)
        return None
    return plan


def _refuse_what_derives(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        kind = type(module).__name__
        method = getattr(module, "quant_method", None)
        if kind in DERIVING_LAYERS or (
            method is not None and type(method).__name__ not in PLAIN_METHODS | {"NoneType"}
        ):
            # An attention layer's method scales its KV cache, which is no weight unless the checkpoint has scales.
            if kind == "Attention":
                continue
            raise NotDirectError(f"{name} is a {kind} with {type(method).__name__}")


class _Recorder(TorchDispatchMode):
    """Notes copies from tensors of the checkpoint, and refuses whatever else would change live memory."""

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
        if func._schema.is_mutable and args[0].device.type != "meta":  # noqa: SLF001 - the public way to ask
            raise NotDirectError(f"loading calls {func}")
        return func(*args, **(kwargs or {}))


def _trace(model: torch.nn.Module, entries: Sequence[TensorEntry]) -> dict[str, list[Piece]]:
    tensors = {e.name: torch.empty(e.shape, dtype=_dtype(e), device="meta") for e in entries}
    sources = {tensor.untyped_storage()._cdata: name for name, tensor in tensors.items()}  # noqa: SLF001
    load_weights: Any = model.load_weights
    with torch.no_grad(), _Recorder(sources) as recorder:
        load_weights(iter(tensors.items()))
    return dict(recorder.pieces)


class _Proof:
    """Compares, layer by layer, what vLLM's reload of random tensors would put in force with what the plan makes."""

    def __init__(
        self, model: torch.nn.Module, entries: Sequence[TensorEntry], plan: DirectPlan, device: torch.device
    ) -> None:
        self._model = model
        self._entries = entries
        self._plan = plan
        self._device = device
        self._sent: dict[str, torch.Tensor] = {}
        self._proved: set[int] = set()
        self._problems: list[str] = []

    def run(self, model_config: Any) -> None:
        """Raise NotDirectError where they differ. The model comes out as it went in, whatever happens between."""
        original = layerwise._copy_and_restore_kernel_tensors  # noqa: SLF001 - where vLLM puts a layer in force
        kept: list[tuple[torch.nn.Module, Any, Any]] = []
        layerwise._copy_and_restore_kernel_tensors = self._compare  # noqa: SLF001
        try:
            layerwise.initialize_layerwise_reload(self._model)
            for layer in self._model.modules():
                info = layerwise.get_layerwise_info(layer)
                kept.append((layer, info.kernel_tensors, info.kernel_non_persistent_buffers))
            load_weights: Any = self._model.load_weights
            load_weights(self._random_tensors())
            layerwise.finalize_layerwise_reload(self._model, model_config)
        finally:
            layerwise._copy_and_restore_kernel_tensors = original  # noqa: SLF001
            self._sent.clear()
            for layer, tensors, non_persistent in kept:
                _put_back(layer, tensors, non_persistent)
        for name, parameter in self._model.named_parameters():
            if _memory(parameter) not in self._proved:
                self._problems.append(f"{name} was not loaded")
        if self._problems:
            raise NotDirectError("; ".join(self._problems[:3]))

    def _random_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for entry in self._entries:
            seed = torch.Generator(self._device).manual_seed(zlib.crc32(entry.name.encode()))
            dtype = _dtype(entry)
            made_in = dtype if dtype.is_floating_point and dtype.itemsize > 1 else torch.float32
            tensor = torch.rand(entry.shape, generator=seed, device=self._device, dtype=made_in).to(dtype)
            if self._plan.knows(entry.name):  # others are of another rank's part of the model
                self._sent[entry.name] = tensor
            yield entry.name, tensor

    def _compare(self, layer: torch.nn.Module, info: Any) -> None:
        """In place of vLLM's copy."""
        parameters, _ = info.kernel_tensors
        for name, live in parameters.items():
            made = torch.zeros_like(live)  # vLLM fills padding with zeros
            pieces = list(self._plan.of_memory(live))
            for source, piece in pieces:
                offset = piece.target.storage_offset() - live.storage_offset()
                target = made.as_strided(piece.target.shape, piece.target.stride(), offset)
                if source in self._sent:
                    target.copy_(piece.of(self._sent[source]))
            if not torch.equal(made, getattr(layer, name).detach()):
                self._problems.append(f"the copies for {name} of a {type(layer).__name__} are not what vLLM loads")
            self._proved.add(_memory(live))
            for source, _ in pieces:
                self._sent.pop(source, None)
        layerwise._place_kernel_tensors(layer, info)  # noqa: SLF001


def put_back(model: torch.nn.Module) -> None:
    """End a reload of vLLM's that was cut: layers that wait for tensors get back those that they had."""
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            _put_back(layer, info.kernel_tensors, info.kernel_non_persistent_buffers)


def _put_back(layer: torch.nn.Module, tensors: Any, non_persistent: Any) -> None:
    info = layerwise.get_layerwise_info(layer)
    if tensors is not None:
        parameters, buffers = tensors
        now = {**dict(layer.named_parameters(recurse=False)), **dict(layer.named_buffers(recurse=False))}
        if any(now.get(name) is not live for name, live in [*parameters.items(), *buffers.items()]):
            info.kernel_tensors, info.kernel_non_persistent_buffers = tensors, non_persistent
            layerwise._place_kernel_tensors(layer, info)  # noqa: SLF001
    info.reset()


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _dtype(entry: TensorEntry) -> torch.dtype:
    return getattr(torch, entry.dtype)
