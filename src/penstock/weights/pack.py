"""Tensors into a byte buffer, and views of them out of it. Needs torch."""
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from penstock.errors import WeightsError
from penstock.weights.manifest import ALIGNMENT, DTYPE_BYTES, TensorEntry

NamedTensors = Sequence[tuple[str, torch.Tensor]]


def checked(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the pairs that were given, each computed: a device has done what was queued when its first tensor comes.

    Raises:
        WeightsError: something that is no pair of a name and a tensor, a name given twice, a tensor whose values are
            not all here or whose dtype no engine loads, or no tensor at all.
    """
    given: Iterable[Any] = named_tensors
    names: set[str] = set()
    devices: set[torch.device] = set()
    for pair in given:
        match pair:
            case (str() as name, torch.Tensor() as tensor):
                pass
            case [*parts]:
                kinds = ", ".join(type(part).__name__ for part in parts)
                raise WeightsError(f"weights are pairs of a name and a torch.Tensor, got one of ({kinds})")
            case _:
                raise WeightsError(f"weights are pairs of a name and a torch.Tensor, got a {type(pair).__name__}")
        if hasattr(tensor, "full_tensor"):
            raise WeightsError(
                f"tensor {name!r} is a {type(tensor).__name__}, of which this process has one shard; gather it first, "
                "with full_tensor() on every rank (docs/how-to/weights.md)"
            )
        if tensor.is_meta or tensor.layout is not torch.strided:
            what = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
            raise WeightsError(f"tensor {name!r} is {what}; only dense tensors with values can be sent")
        if name in names:
            raise WeightsError(f"tensor {name!r} is given twice")
        names.add(name)
        if dtype_name(tensor.dtype) not in DTYPE_BYTES:
            raise WeightsError(f"tensor {name!r} has dtype {tensor.dtype}, which no engine loads")
        if tensor.is_cuda and tensor.device not in devices:
            devices.add(tensor.device)
            torch.cuda.synchronize(tensor.device)  # this thread's stream need not be the one that computes them
        yield name, tensor
    if not names:
        raise WeightsError("no tensors given: pass every parameter of the model, as model.named_parameters() does")


def layout(tensors: NamedTensors) -> tuple[int, list[int]]:
    """Return total bytes and the offset of each tensor."""
    offsets: list[int] = []
    end = 0
    for _, tensor in tensors:
        offsets.append(end)
        end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    return max(end, ALIGNMENT), offsets


def write(buffer: memoryview, tensors: NamedTensors, offsets: Sequence[int]) -> tuple[TensorEntry, ...]:
    """Copy the tensors to their offsets and checksum them.

    Raises:
        WeightsError: a tensor holds NaN or infinity; a policy with such weights produces nothing but noise.
    """
    entries: list[TensorEntry] = []
    with torch.no_grad():
        for (name, tensor), offset in zip(tensors, offsets, strict=True):
            source = tensor.detach()
            if not all_finite(source):
                raise WeightsError(f"tensor {name!r} holds NaN or infinity; the update was not sent")
            entry = TensorEntry(name, dtype_name(source.dtype), tuple(source.shape), offset, 0)
            if entry.nbytes:
                view(buffer, entry).copy_(source)
            entries.append(replace(entry, checksum=zlib.crc32(buffer[offset : offset + entry.nbytes])))
    return tuple(entries)


def view(buffer: memoryview, entry: TensorEntry) -> torch.Tensor:
    """Return the tensor that lies in `buffer`, without a copy."""
    dtype: torch.dtype = getattr(torch, entry.dtype)
    if entry.nbytes == 0:
        return torch.empty(entry.shape, dtype=dtype)
    with warnings.catch_warnings():
        # torch warns of read-only buffers; the engine only reads.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(buffer, dtype=dtype, count=math.prod(entry.shape), offset=entry.offset)
    return flat.view(entry.shape)


def read(buffer: memoryview, entries: Sequence[TensorEntry]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield views of all tensors, in the manifest's order."""
    for entry in entries:
        yield entry.name, view(buffer, entry)


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinity; true of whole numbers."""
    if not tensor.is_floating_point():
        return True
    if tensor.element_size() == 1:  # torch has no isfinite for float8_e4m3fn
        tensor = tensor.to(torch.float16)
    return bool(torch.isfinite(tensor).all())


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` -> `float32`."""
    return str(dtype).removeprefix("torch.")
