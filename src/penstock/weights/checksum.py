"""A checksum that a tensor's own device computes: whether the bytes that a peer received are those that were sent."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import logging
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache

import torch

from penstock.rooms import plugged_in

WORD = 8
"""Bytes that are summed as one integer. Sums of narrower ones have to be widened, which makes them twenty times slower
than the memory: 0.1 s for 16 GB on an H200."""
WIDTH = 1024
"""Words in a row."""
_ROW = WORD * WIDTH
_ODD, _EVEN = 0x243F6A8885A308D3, 0x13198A2E03707344
"""The first 32 hexadecimal digits of pi after the point: numbers that nobody chose to fit."""
_EXPONENTS = {
    torch.float64: (0x7FF0_0000_0000_0000, 0x0010_0000_0000_0000),
    torch.float32: (0x7F80_0000_7F80_0000, 0x0080_0000_0080_0000),
    torch.bfloat16: (0x7F80_7F80_7F80_7F80, 0x0080_0080_0080_0080),
    torch.float16: (0x7C00_7C00_7C00_7C00, 0x0400_0400_0400_0400),
    torch.float8_e5m2: (0x7C7C_7C7C_7C7C_7C7C, 0x0404_0404_0404_0404),
    torch.float8_e4m3fn: (0x7F7F_7F7F_7F7F_7F7F, 0x0101_0101_0101_0101),  # it has one NaN, all ones, and no infinity
}
"""Bits of a word that are all set in NaN and infinity, and the lowest of them in each number."""
_COPIED_BYTES = 256 * 2**20
Kernel = Callable[[Sequence[torch.Tensor], Sequence[tuple[int, int]], tuple[int, int, int]], torch.Tensor]
NO_KERNEL = (ImportError, OSError, RuntimeError, AttributeError, subprocess.SubprocessError)
"""Raised where Triton is not there, or cannot compile or load a kernel, such as without a C compiler or Python.h."""
logger = logging.getLogger("vllm.penstock")  # workers of vLLM show no others
_WARMING = threading.Lock()


class DeviceSums:
    """Sums many tensors of one device. `add` queues work on the device, and waits for nothing.

    A tensor's bytes, with zeros after them up to a multiple of 8 KiB, are a matrix of 8-byte integers of 1024 columns.
    Its checksum is the sum of all of them modulo 2**64, each times the weight of its place, `2048 f(row) + 2 f(column)
    + 1` (`_mixed` is f). So the sums of rows and of columns do, and order does not matter: all kinds of devices agree,
    and so do torch's operations and the one kernel that GPUs with Triton have instead (`sum_kernel.py`).

    A change of one word is always seen. Two words that change places are seen, unless they lie 2**k times an odd number
    of words apart and differ in nothing but their upper k + 1 bits. Not seen is what keeps the sum of every row and of
    every column: equal words at two opposite corners of a rectangle that change places with equal ones at the others.
    """

    def __init__(self, *, finite: bool = False) -> None:
        """`finite`: find out too whether all elements are finite; costs nothing with the kernel, else another pass."""
        self._finite = finite
        self._found: list[torch.Tensor] = []
        """int64 of shape `[2, tensors]`: sums, and not 0 for NaN or infinity."""

    def add(self, *tensors: torch.Tensor) -> None:
        """More tensors, of any shape and dtype; they may change when the device has done what is queued."""
        with torch.no_grad():
            for together in _bounded(tensors):
                self._found.append(self._of(together))

    def _of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        if devices := {tensor.device for tensor in tensors} - {tensors[0].device}:
            raise ValueError(f"tensors on {tensors[0].device} and {', '.join(map(str, devices))} have no sums together")
        flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
        if (kernel := _kernel(flat[0].device)) is not None:
            exponents = [_EXPONENTS.get(tensor.dtype, (0, 0)) for tensor in tensors]
            return kernel([_words(part) for part in flat], exponents, (_ODD, _EVEN, WIDTH))
        sums = _sums([_rows(part) for part in flat])
        bad = [_bad(tensor) if self._finite else sums.new_zeros(()) for tensor in tensors]
        return torch.stack([sums, torch.stack(bad)])

    def values(self) -> list[int]:
        """Of every tensor in the order they were added, in [0, 2**64): one wait for the device, one copy."""
        return [number for number, _ in self.found()]

    def found(self) -> list[tuple[int, bool]]:
        """The same, each with whether all elements are finite, where that was asked for."""
        if not self._found:
            return []
        sums, bad = torch.cat(self._found, dim=1).tolist()
        return [(signed % 2**64, not count) for signed, count in zip(sums, bad, strict=True)]


def device_sums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Checksums of tensors of one device; see `DeviceSums`."""
    sums = DeviceSums()
    sums.add(*tensors)
    return sums.values()


def warm_up(device: torch.device) -> None:
    """Compile and load what sums on this device, which takes seconds that no paused engine should spend."""
    try:
        with _WARMING:  # who comes second, waits for what the first compiles
            device_sums([torch.zeros(1, device=device)])
    except RuntimeError as error:  # such as no memory: when it is needed there may be
        logger.warning("nothing was compiled for the checksums of updates: %s", error)


@lru_cache(maxsize=64)
def _kernel(device: torch.device) -> Kernel | None:
    """What sums on this device, where there is better than torch's operations."""
    if device.type != "cuda":
        return None
    try:
        return plugged_in("sums.kernel")(device, (_ODD, _EVEN, WIDTH))  # Triton comes with torch for GPUs
    except torch.OutOfMemoryError:
        raise
    except NO_KERNEL as error:
        logger.warning("checksums are computed by torch, slower, since Triton cannot: %r", error)
        return None


def _bounded(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """So many at once that there is memory for those that have to be copied, being strided or between words."""
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
    """The bytes as 8-byte integers, the last one with zeros after it."""
    if rest := len(flat) % WORD:
        flat = torch.nn.functional.pad(flat, (0, WORD - rest))
    return _aligned(flat).view(torch.int64)


def _rows(flat: torch.Tensor) -> list[torch.Tensor]:
    """The bytes as rows of 8-byte integers, at most the last row a copy."""
    whole = len(flat) // _ROW * _ROW
    rest = len(flat) - whole
    parts = [_aligned(flat[:whole])] if whole else []
    if rest or not whole:
        parts.append(torch.nn.functional.pad(flat[whole:], (0, _ROW - rest)))
    return [part.view(torch.int64).view(-1, WIDTH) for part in parts]


def _sums(matrices: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """Of each matrix, given by its upper and lower part; int64 of shape `[matrices]`."""
    device = matrices[0][0].device
    lengths = [sum(len(part) for part in parts) for parts in matrices]
    numbers = torch.cat([_mixed(length, device) for length in lengths])
    running = (torch.cat([part.sum(1) for parts in matrices for part in parts]) * numbers).cumsum(0)
    until = running[torch.tensor(lengths, device=device).cumsum(0) - 1]
    rows = until - torch.cat([until.new_zeros(1), until[:-1]])
    columns = torch.stack([torch.stack([part.sum(0) for part in parts]).sum(0) for parts in matrices])
    return 2 * WIDTH * rows + (columns * (2 * _mixed(WIDTH, device) + 1)).sum(1)


def _bad(tensor: torch.Tensor) -> torch.Tensor:
    """1 where an element is NaN or infinity, else 0; without memory of the tensor's size."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    if tensor.element_size() == 1:  # torch has no minimum of float8
        tensor = tensor.to(torch.float16)
    least, most = torch.aminmax(tensor)  # NaN makes both NaN
    return (~(torch.isfinite(least) & torch.isfinite(most))).long()


def _aligned(flat: torch.Tensor) -> torch.Tensor:
    return flat if flat.data_ptr() % WORD == 0 and flat.storage_offset() % WORD == 0 else flat.clone()


@lru_cache(maxsize=64)
def _mixed(count: int, device: torch.device) -> torch.Tensor:
    """`f(x) = x * (_ODD + _EVEN * x)` of 0 to `count`, exclusive, in int64 that wraps around."""
    # f(x) - f(y) = (x - y) * (_ODD + _EVEN * (x + y)): the difference times an odd number, so f maps one to one modulo
    # every power of two (Rivest, Permutation Polynomials Modulo 2^w, 2001). Of a weight, then, the lowest 11 bits tell
    # the column and the others the row: all are distinct up to 2**53 rows, odd, and as far apart as twice their places,
    # but for an odd factor. A line would do for that too, but not see words a b b a that become b a a b.
    numbers = torch.arange(count, dtype=torch.int64, device=device)
    return numbers * (numbers * _EVEN + _ODD)
