"""A checksum that a tensor's own device computes. It shows whether a peer received the bytes that were sent."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache

import torch

from penstock.rooms import plugged_in
from penstock.weights.pack import all_finite

WORD = 8
"""Bytes that are summed as one integer. Narrower integers would have to be widened, which is twenty times slower than
the memory. With 8 bytes, 16 GB take 0.1 s on an H200."""
WIDTH = 1024
"""Words in a row."""
_ROW = WORD * WIDTH
_ODD, _EVEN = 0x243F6A8885A308D3, 0x13198A2E03707344
"""The first 32 hexadecimal digits of pi after the point, so that the numbers are not chosen to fit."""
_COPIED_BYTES = 256 * 2**20
Kernel = Callable[[Sequence[torch.Tensor], Sequence[torch.dtype], tuple[int, int, int]], torch.Tensor]


class DeviceSums:
    """Sums many tensors of one device. `add` queues work on the device, and does not wait.

    A tensor's bytes, padded with zeros to a multiple of 8 KiB, form a matrix of 8-byte integers with 1024 columns. Its
    checksum is the sum of all integers modulo 2**64, each times the weight of its place: `2048 f(row) + 2 f(column) +
    1` (`_mixed` is f). So sums of rows and columns suffice, in any order. All kinds of devices agree, and so do torch's
    operations and the one kernel that GPUs with Triton have instead (`sum_kernel.py`).

    It detects every change of one word. It detects a swap of two words, unless they lie 2**k times an odd number of
    words apart and differ only in their upper k + 1 bits. It misses changes that keep the sum of every row and column:
    a swap of equal words at two opposite corners of a rectangle with equal words at the other two.
    """

    def __init__(self, *, finite: bool = False) -> None:
        """`finite`: also check that all elements are finite. Free with the kernel, else a pass that `add` waits for."""
        self._finite = finite
        self._found: list[torch.Tensor] = []
        """int64 of shape `[2, tensors]`: the sums, and a number that is not 0 for NaN or infinity."""

    def add(self, *tensors: torch.Tensor) -> None:
        """Queue more tensors of any shape and dtype. They may change once the device has done the queued work."""
        with torch.no_grad():
            for together in _bounded(tensors):
                self._found.append(self._of(together))

    def _of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        if devices := {tensor.device for tensor in tensors} - {tensors[0].device}:
            raise ValueError(f"tensors on {tensors[0].device} and {', '.join(map(str, devices))} have no sums together")
        flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
        if (kernel := _kernel(flat[0].device)) is not None:
            return kernel([_words(part) for part in flat], [tensor.dtype for tensor in tensors], (_ODD, _EVEN, WIDTH))
        sums = torch.stack([_sum(part) for part in flat])
        bad = [self._finite and not all_finite(tensor) for tensor in tensors]
        return torch.stack([sums, sums.new_tensor(bad)])

    def values(self) -> list[int]:
        """Return each sum in [0, 2**64), in order: one wait for the device, one copy."""
        return [number for number, _ in self.found()]

    def found(self) -> list[tuple[int, bool]]:
        """Return each tensor's sum, and whether it is finite (if that is checked)."""
        if not self._found:
            return []
        sums, bad = torch.cat(self._found, dim=1).tolist()
        return [(signed % 2**64, not count) for signed, count in zip(sums, bad, strict=True)]


def device_sums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the checksums of tensors of one device; see `DeviceSums`."""
    sums = DeviceSums()
    sums.add(*tensors)
    return sums.values()


@lru_cache(maxsize=64)
def _kernel(device: torch.device) -> Kernel | None:
    """Return the device's kernel, if it is faster than torch's operations."""
    return plugged_in("sums.kernel")(device, (_ODD, _EVEN, WIDTH)) if device.type == "cuda" else None


def _bounded(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield batches of tensors, so that the copies of strided or unaligned tensors fit into memory."""
    together: list[torch.Tensor] = []
    copied = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        between_words = nbytes % WORD or tensor.storage_offset() * tensor.element_size() % WORD
        copied += nbytes if between_words or not tensor.is_contiguous() else 0
        together.append(tensor)
        if copied >= _COPIED_BYTES:
            yield together
            together, copied = [], 0
    if together:
        yield together


def _words(flat: torch.Tensor) -> torch.Tensor:
    """Return the bytes as 8-byte integers, the last one padded with zeros."""
    if rest := len(flat) % WORD:
        flat = torch.nn.functional.pad(flat, (0, WORD - rest))
    return _aligned(flat).view(torch.int64)


def _sum(flat: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's bytes, an int64 without dimensions. At most the last row is a copy."""
    whole = len(flat) // _ROW * _ROW
    rest = torch.nn.functional.pad(flat[whole:], (0, -len(flat) % _ROW))
    parts = [_aligned(part).view(torch.int64).view(-1, WIDTH) for part in (flat[:whole], rest)]
    of_rows = torch.cat([part.sum(1) for part in parts])
    of_columns = parts[0].sum(0) + parts[1].sum(0)
    columns = of_columns * (2 * _mixed(WIDTH, flat.device) + 1)
    return 2 * WIDTH * (of_rows * _mixed(len(of_rows), flat.device)).sum() + columns.sum()


def _aligned(flat: torch.Tensor) -> torch.Tensor:
    return flat if flat.data_ptr() % WORD == 0 and flat.storage_offset() % WORD == 0 else flat.clone()


@lru_cache(maxsize=64)
def _mixed(count: int, device: torch.device) -> torch.Tensor:
    """Return `f(x) = x * (_ODD + _EVEN * x)` for x < `count`, in wrapping int64."""
    # f(x) - f(y) = (x - y) * (_ODD + _EVEN * (x + y)): the difference times an odd number, so f maps one to one modulo
    # every power of two (Rivest, Permutation Polynomials Modulo 2^w, 2001). A weight's lowest 11 bits give the column,
    # the others the row. All weights are odd, distinct up to 2**53 rows, and as far apart as twice their places, but
    # for an odd factor. A linear f would do that too, but would not detect words a b b a that become b a a b.
    numbers = torch.arange(count, dtype=torch.int64, device=device)
    return numbers * (numbers * _EVEN + _ODD)
