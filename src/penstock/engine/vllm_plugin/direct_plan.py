"""The copies that load a model, found by running its own `load_weights` on tensors without memory."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.errors import PenstockError
from penstock.weights.manifest import TensorEntry


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
        self._by_memory: dict[int, list[tuple[str, Piece]]] = defaultdict(list)
        for name, of_tensor in pieces.items():
            for piece in of_tensor:
                self._by_memory[memory_of(piece.target)].append((name, piece))

    def place(self, entry: TensorEntry) -> torch.Tensor | None:
        """See `sources.Place`."""
        match self._pieces.get(entry.name):
            case [piece] if piece.start == 0 and piece.shape == entry.shape and piece.target.is_contiguous():
                contiguous = torch.empty(entry.shape, device="meta").stride() == piece.stride
                return piece.target if contiguous and dtype_of(entry) == piece.target.dtype else None
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

    def of_memory(self, parameter: torch.Tensor) -> Sequence[tuple[str, Piece]]:
        """The pieces that fill a parameter, with the names of their tensors."""
        return self._by_memory.get(memory_of(parameter), ())


def trace(model: torch.nn.Module, entries: Sequence[TensorEntry]) -> dict[str, list[Piece]]:
    """What loading copies of each tensor; nothing is copied. NotDirectError: it does other things with them."""
    tensors = {e.name: torch.empty(e.shape, dtype=dtype_of(e), device="meta") for e in entries}
    sources = {tensor.untyped_storage()._cdata: name for name, tensor in tensors.items()}  # noqa: SLF001
    load_weights: Any = model.load_weights
    with _Recorder(sources) as recorder, _NoNewMemory():
        load_weights(iter(tensors.items()))
    return dict(recorder.pieces)


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
        if any(True for _ in written(func, args, kwargs or {})):
            raise NotDirectError(f"loading calls {func}")
        return func(*args, **(kwargs or {}))


class _NoNewMemory(TorchFunctionMode):
    """Refuses to give a tensor other memory (`parameter.data = ...`), which is no operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == vars(torch._C.TensorBase)["data"].__set__:  # noqa: SLF001 - each look-up makes another object
            raise NotDirectError("loading gives a parameter other memory")
        return func(*args, **(kwargs or {}))


def written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors with memory that a call of an operator writes to."""
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
    """Where the memory begins of which this is a view."""
    return tensor.untyped_storage().data_ptr()


def memories_of(values: Any) -> set[int]:
    """Where the memory begins of every tensor in nested containers."""
    return {memory_of(value) for value in tree_leaves(values) if isinstance(value, torch.Tensor)}


def dtype_of(entry: TensorEntry) -> torch.dtype:
    """Torch's name of it."""
    return getattr(torch, entry.dtype)
