"""Copies tensors into a byte buffer, makes views of them, and checks both. Needs torch."""
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
import os
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from penstock.control_types import TensorSpec
from penstock.errors import WeightsError
from penstock.weights.manifest import ALIGNMENT, DTYPE_BYTES, TensorEntry, entry_of

SUM_THREADS = 8


def checked(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the given pairs after checks. The first tensor of a device waits for the device's queued work.

    Raises:
        WeightsError: an item is not a pair of a name and a tensor, a name is repeated, or there is no tensor at all.
            WeightsError also if a tensor is not whole, or no engine loads its dtype.
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
            torch.cuda.synchronize(tensor.device)  # another stream may compute the tensors
        yield name, tensor
    if not names:
        raise WeightsError("no tensors given: pass every parameter of the model, as model.named_parameters() does")


def described(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
) -> tuple[Iterable[tuple[str, torch.Tensor]], list[TensorSpec]]:
    """Return the tensors, checked, and their specs. Raises as `checked`.

    An object with `specs` (`TensorProvider`) is not read yet, because it may gather one tensor after another. Any other
    iterable is read into a list.
    """
    specs: Sequence[TensorSpec] | None = getattr(named_tensors, "specs", None)
    if specs is not None:
        return checked(named_tensors), list(specs)
    tensors = list(checked(named_tensors))
    return tensors, [_spec(name, tensor) for name, tensor in tensors]


def layout(specs: Sequence[TensorSpec]) -> tuple[int, list[int]]:
    """Return the total bytes and the offset of each tensor."""
    offsets: list[int] = []
    end = 0
    for spec in specs:
        offsets.append(end)
        end += -(-entry_of(spec).nbytes // ALIGNMENT) * ALIGNMENT
    return max(end, ALIGNMENT), offsets


def write(
    buffer: memoryview,
    tensors: Iterable[tuple[str, torch.Tensor]],
    specs: Sequence[TensorSpec],
    offsets: Sequence[int],
) -> tuple[TensorEntry, ...]:
    """Copy the tensors to the offsets of their specs, in any order, and checksum them.

    Returns:
        One entry per tensor, in the order of `specs`.

    Raises:
        WeightsError: a tensor holds NaN or infinity, with which a policy produces only noise; or the tensors differ
            from `specs`.
    """
    places = dict(zip(specs, offsets, strict=True))
    entries: dict[TensorSpec, tuple[TensorEntry, Future[int]]] = {}
    # A single thread sums slower than a GPU copies.
    with ThreadPoolExecutor(min(SUM_THREADS, len(os.sched_getaffinity(0)))) as pool, torch.no_grad():
        for name, tensor in tensors:
            source, spec = tensor.detach(), _spec(name, tensor)
            if not all_finite(source):
                raise WeightsError(f"tensor {name!r} holds NaN or infinity; the update was not sent")
            if spec not in places:
                raise WeightsError(f"{spec} was given and not announced; the update was not sent")
            entry = entry_of(spec, places[spec])
            if entry.nbytes:
                view(buffer, entry).copy_(source)
            entries[spec] = entry, pool.submit(zlib.crc32, buffer[entry.offset : entry.offset + entry.nbytes])
    if missing := [spec.name for spec in specs if spec not in entries]:
        raise WeightsError(f"{len(missing)} tensors, {missing[0]!r} the first, were announced and not given")
    return tuple(replace(entry, checksum=checksum.result()) for entry, checksum in (entries[spec] for spec in specs))


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape))


def view(buffer: memoryview, entry: TensorEntry) -> torch.Tensor:
    """Return a view of the tensor in `buffer`, without a copy."""
    dtype: torch.dtype = getattr(torch, entry.dtype)
    if entry.nbytes == 0:
        return torch.empty(entry.shape, dtype=dtype)
    with warnings.catch_warnings():
        # torch warns about read-only buffers, but the engine only reads.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(buffer, dtype=dtype, count=math.prod(entry.shape), offset=entry.offset)
    return flat.view(entry.shape)


def check_tensors(entries: Iterable[TensorEntry], read: Callable[[TensorEntry], memoryview]) -> None:
    """Raise WeightsError if a CRC-32 differs or a value is not finite. `read` returns a tensor's bytes."""

    def check(entry: TensorEntry) -> None:
        data = read(entry)
        if (found := zlib.crc32(data)) != entry.checksum:
            message = f"tensor {entry.name!r} has the checksum {found:08x}, its manifest says {entry.checksum:08x}"
            raise WeightsError(message)
        if not all_finite(view(data, replace(entry, offset=0))):
            raise WeightsError(f"tensor {entry.name!r} holds NaN or infinity")

    # One thread per tensor instead of torch's pool, which costs more than it gains for tensors of a few kilobytes. Half
    # of the cores, because the engine generates at the same time.
    threads = max(1, min(8, len(os.sched_getaffinity(0)) // 2))
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for _ in pool.map(check, entries):
            pass


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinity. True for integers. Only float8 is copied."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.element_size() == 1:  # torch has no minimum of float8
        tensor = tensor.to(torch.float16)
    least, most = torch.aminmax(tensor)  # NaN makes both NaN; `isfinite` of all elements takes ten times as long
    return bool(torch.isfinite(least) & torch.isfinite(most))


def dtype_name(dtype: torch.dtype) -> str:
    """Convert `torch.float32` to `float32`."""
    return str(dtype).removeprefix("torch.")
