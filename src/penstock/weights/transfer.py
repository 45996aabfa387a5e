"""Transfers a version over a group, bucket by bucket: the trainer sends, every worker receives.

Two buckets are in progress: while one is used, the next one travels, and the trainer gathers it.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false

from __future__ import annotations

import logging
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING

import torch

from penstock.errors import TransferError, WeightsError
from penstock.weights.broadcast import BUCKET_BYTES
from penstock.weights.checksum import DeviceSums, Kernel, device_sums
from penstock.weights.manifest import ALIGNMENT, TensorEntry, WeightManifest
from penstock.weights.pack import checked, dtype_name, view
from penstock.weights.shared_memory import open_mapping

if TYPE_CHECKING:
    from penstock.weights.group import Group
    from penstock.weights.manifest import Place

logger = logging.getLogger("vllm.penstock")  # the only logger that vLLM's workers show
_WARMING = threading.Lock()
NO_KERNEL = (ImportError, OSError, RuntimeError, AttributeError, subprocess.SubprocessError)
"""Errors if Triton is missing, or cannot compile or load a kernel, for example without a C compiler or Python.h."""
NamedTensors = Iterable[tuple[str, torch.Tensor]]
InFlight = tuple[list[Callable[[], object]], list[torch.Tensor]]
"""Works to wait for, and the tensors that must live until then."""

PACKED_BELOW = 2**20
"""Tensors of fewer bytes are copied into one buffer. A collective for each would cost more to launch than to send.
Larger tensors go from their own memory to their final place, without a copy."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors `[start, stop)` of the version, sent together."""

    start: int
    stop: int
    offsets: tuple[int | None, ...]
    """Offset in bytes of each tensor in the packed buffer; None: the tensor goes alone."""
    packed_bytes: int


def cut(sizes: Sequence[int], bucket_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Cut tensors of these sizes in bytes into buckets, the same on every rank.

    A tensor that is larger than a bucket gets its own bucket.
    """
    cuts: list[int] = []
    held = 0
    for index, size in enumerate(sizes):
        if not cuts or held + size > bucket_bytes:
            cuts.append(index)
            held = 0
        held += size
    buckets: list[Bucket] = []
    for start, stop in pairwise([*cuts, len(sizes)]):
        small = [-(-size // ALIGNMENT) * ALIGNMENT if size < PACKED_BELOW else 0 for size in sizes[start:stop]]
        *begins, end = accumulate(small, initial=0)
        alone = [size >= PACKED_BELOW for size in sizes[start:stop]]
        offsets = tuple(None if is_alone else begin for begin, is_alone in zip(begins, alone, strict=True))
        buckets.append(Bucket(start, stop, offsets, end))
    return buckets


def describe(named_tensors: NamedTensors) -> tuple[tuple[TensorEntry, ...], torch.device]:
    """Check the tensors and sum their bits on their device, without a copy.

    Returns:
        One entry per tensor, with its sum (`checksum.py`), and the device from which they are sent.

    Raises:
        WeightsError: no tensor, a repeated name, a dtype that no engine loads, NaN or infinity.
    """
    entries: list[TensorEntry] = []
    sums = DeviceSums(finite=True)
    together: list[torch.Tensor] = []
    held = 0
    # A source other than a list may gather tensors into memory that it reuses or frees. So each is summed at once.
    limit = BUCKET_BYTES if isinstance(named_tensors, (list, tuple)) else 0
    device = torch.device("cpu")
    for name, given in checked(named_tensors):
        tensor = given.detach()
        if not entries:
            device = tensor.device
        entries.append(TensorEntry(name, dtype_name(tensor.dtype), tuple(tensor.shape), 0, 0))
        together.append(tensor.to(device))
        held += tensor.numel() * tensor.element_size()
        if held >= limit:
            sums.add(*together)
            together, held = [], 0
    sums.add(*together)
    summed: list[TensorEntry] = []
    for entry, (number, finite) in zip(entries, sums.found(), strict=True):
        if not finite:
            raise WeightsError(f"tensor {entry.name!r} holds NaN or infinity; the update was not sent")
        summed.append(replace(entry, checksum=number))
    return tuple(summed), device


def check_same_bits(sent: WeightManifest, copy: WeightManifest, named_tensors: NamedTensors) -> None:
    """Check that a copy in shared memory equals the sent version: the trainer may have changed the tensors.

    The tensors of a list are summed again on their device. Otherwise the copy is summed. WeightsError: they differ.
    """
    if isinstance(named_tensors, list):
        entries, _ = describe(named_tensors)
    else:
        with memoryview(open_mapping(copy.location["path"], copy.extent)) as mapped:
            entries, _ = describe(read(mapped, copy.tensors))
    had = {(entry.name, entry.checksum) for entry in sent.tensors}
    if changed := [entry.name for entry in entries if (entry.name, entry.checksum) not in had]:
        raise WeightsError(
            f"{len(changed)} tensors, {changed[0]!r} the first, are not those of weight version {sent.version} any "
            "more, so no copy of it was kept; change them after update_weights has returned, also where it is cancelled"
        )
    if len(entries) != len(sent.tensors):
        raise WeightsError(f"{len(entries)} tensors were given, weight version {sent.version} has {len(sent.tensors)}")


def send(group: Group, entries: Sequence[TensorEntry], named_tensors: NamedTensors, *, bucket_bytes: int) -> None:
    """Broadcast the tensors of `describe`, in order. Returns when all have left.

    Raises:
        TransferError: the group was cut, or did not receive all of them within its deadline.
        WeightsError: the tensors differ from the described ones.
    """
    source = iter(named_tensors)
    before: InFlight = ([], [])
    with group.within(group.spec.timeout_s):
        for bucket in cut([entry.nbytes for entry in entries], bucket_bytes):
            tensors = list(islice(source, bucket.stop - bucket.start))
            _check_same(entries[bucket.start : bucket.stop], tensors)
            outgoing = _outgoing(bucket, [tensor for _, tensor in tensors], group.device)
            works = group.start(outgoing)
            group.wait(before[0])
            before = (works, outgoing)
        group.wait(before[0])
        group.synchronize()


def receive(
    group: Group, entries: Sequence[TensorEntry], *, bucket_bytes: int, place: Place
) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
    """Yield every tensor, valid until the next; at the end, compare the sums.

    Args:
        group: every rank runs this while the trainer runs `send`.
        entries: entries of the manifest.
        bucket_bytes: the trainer's value.
        place: returns the memory for a tensor. Called for tensors that travel alone, over NCCL.

    Raises:
        TransferError: the group was cut, or the received bytes differ from the sent ones.
    """
    plan = cut([entry.nbytes for entry in entries], bucket_bytes)
    wanted: Place = place if group.spec.backend == "nccl" else lambda _: None
    sums = DeviceSums()
    with group.within(group.spec.timeout_s):
        incoming = [_begin(group, bucket, entries, wanted) for bucket in plan[:1]]
        for index, bucket in enumerate(plan):
            works, tensors = incoming.pop()
            incoming += [_begin(group, following, entries, wanted) for following in plan[index + 1 : index + 2]]
            group.wait(works)
            sums.add(*tensors)
            yield from zip(entries[bucket.start : bucket.stop], tensors, strict=True)
        group.synchronize()
        found = sums.values()
    for entry, number in zip(entries, found, strict=True):
        if number != entry.checksum:
            raise TransferError(
                f"tensor {entry.name!r} arrived with the sum {number}, it was sent with {entry.checksum}: it was "
                "damaged on its way, or changed, or named_tensors gave another one when it was read again"
            )


def _begin(group: Group, bucket: Bucket, entries: Sequence[TensorEntry], place: Place) -> InFlight:
    """Start to receive a bucket. Return the works, and its tensors in order."""
    packed = torch.empty(bucket.packed_bytes, dtype=torch.uint8, device=group.device)
    tensors: list[torch.Tensor] = []
    incoming: list[torch.Tensor] = []
    for entry, offset in zip(entries[bucket.start : bucket.stop], bucket.offsets, strict=True):
        dtype: torch.dtype = getattr(torch, entry.dtype)
        if offset is not None:
            tensors.append(packed[offset : offset + entry.nbytes].view(dtype).view(entry.shape))
            continue
        target = place(entry)
        tensors.append(torch.empty(entry.shape, dtype=dtype, device=group.device) if target is None else target)
        incoming.append(_bytes(tensors[-1]))
    return group.start([*incoming, packed] if bucket.packed_bytes else incoming), tensors


def _outgoing(bucket: Bucket, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return a bucket's tensors to send, in the order in which they are received."""
    packed = torch.empty(bucket.packed_bytes, dtype=torch.uint8, device=device)
    sources = [_bytes(tensor.detach().to(device).contiguous()) for tensor in tensors]
    pairs = list(zip(sources, bucket.offsets, strict=True))
    alone = [source for source, offset in pairs if offset is None]
    if parts := [(source, offset) for source, offset in pairs if offset is not None and source.numel()]:
        places = [packed[offset : offset + source.numel()] for source, offset in parts]
        torch._foreach_copy_(places, [source for source, _ in parts])  # hundreds of copies in one kernel
    return [*alone, packed] if bucket.packed_bytes else alone


def _check_same(entries: Sequence[TensorEntry], tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    found = [(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors]
    expected = [(entry.name, entry.dtype, entry.shape) for entry in entries]
    if found != expected:
        differing = [pair for pair in zip(found, expected, strict=False) if pair[0] != pair[1]]
        gave, was = differing[0] if differing else (f"{len(found)} tensors", f"{len(expected)}")
        raise WeightsError(
            f"the second pass over the tensors gave {gave} where the first gave {was}: give what can be iterated twice "
            "alike, such as a list"
        )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def read(buffer: memoryview, entries: Sequence[TensorEntry]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield views of all tensors, in the manifest's order."""
    for entry in entries:
        yield entry.name, view(buffer, entry)


def warm_up(device: torch.device) -> None:
    """Compile and load this device's kernel, so that no update waits for it."""
    try:
        with _WARMING:  # a second caller waits for the first one's compilation
            device_sums([torch.zeros(1, device=device)])
    except RuntimeError as error:  # such as no memory now; there may be some when it is needed
        logger.warning("nothing was compiled for the checksums of updates: %s", error)


def kernel_of(device: torch.device, mixing: tuple[int, int, int]) -> Kernel | None:
    """Return the kernel of `sum_kernel.py` for a GPU, or None if Triton cannot compile it here."""
    try:
        from penstock.weights.sum_kernel import compiled  # noqa: PLC0415 - Triton comes with torch for GPUs

        return compiled(device, mixing)
    except torch.OutOfMemoryError:
        raise
    except NO_KERNEL as error:
        logger.warning("checksums are computed by torch, slower, since Triton cannot: %r", error)
        return None
