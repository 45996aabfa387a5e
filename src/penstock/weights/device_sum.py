"""A checksum that a tensor's own device computes: whether the bytes that a peer received are those that were sent."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch

WORD = 8
"""Bytes that are summed as one integer. Sums of narrower ones have to be widened, which makes them twenty times slower
than the memory: 0.1 s for 16 GB on an H200."""
WIDTH = 1024
"""Words in a row."""
_ROW = WORD * WIDTH
_ODD, _EVEN = 0x243F6A8885A308D3, 0x13198A2E03707344
"""The first 32 hexadecimal digits of pi after the point: numbers that nobody chose to fit."""


class DeviceSums:
    """Checksums of many tensors of one device. `add` leaves two or three kernels each to it, and waits for nothing.

    A tensor's bytes, with zeros after them up to a multiple of 8 KiB, are a matrix of 8-byte integers of 1024 columns.
    Its checksum is the sum of all of them modulo 2**64, each times the weight of its place, `2048 f(row) + 2 f(column)
    + 1` (`_mixed` is f). So the sums of rows and of columns do, and order does not matter: all kinds of devices agree.

    A change of one word is always seen. Two words that change places are seen, unless they lie 2**k times an odd number
    of words apart and differ in nothing but their upper k + 1 bits. Not seen is what keeps the sum of every row and of
    every column: equal words at two opposite corners of a rectangle that change places with equal ones at the others.
    """

    def __init__(self) -> None:
        self._rows: list[torch.Tensor] = []
        self._columns: list[torch.Tensor] = []
        self._lengths: list[int] = []

    def add(self, tensor: torch.Tensor) -> None:
        """One tensor more, of any shape and dtype; it may change when the device has done what is queued."""
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        whole = len(flat) // _ROW * _ROW
        rest = len(flat) - whole
        parts = [_aligned(flat[:whole])] if whole else []
        if rest or not whole:
            parts.append(torch.nn.functional.pad(flat[whole:], (0, _ROW - rest)))
        words = [part.view(torch.int64).view(-1, WIDTH) for part in parts]
        self._rows += [part.sum(1) for part in words]
        columns = [part.sum(0) for part in words]
        self._columns.append(columns[0] if len(columns) == 1 else columns[0] + columns[1])
        self._lengths.append(sum(len(part) for part in words))

    def values(self) -> list[int]:
        """Of every tensor in the order they were added, in [0, 2**64): one wait for the device, one copy."""
        if not self._lengths:
            return []
        device = self._columns[0].device
        numbers = torch.cat([_mixed(length, device) for length in self._lengths])
        running = (torch.cat(self._rows) * numbers).cumsum(0)
        ends = torch.tensor(self._lengths, device=device).cumsum(0)
        until = running[ends - 1]
        rows = until - torch.cat([until.new_zeros(1), until[:-1]])
        columns = (torch.stack(self._columns) * (2 * _mixed(WIDTH, device) + 1)).sum(1)
        return [signed % 2**64 for signed in (2 * WIDTH * rows + columns).tolist()]


def device_sums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Checksums of tensors of one device; see `DeviceSums`."""
    sums = DeviceSums()
    for tensor in tensors:
        sums.add(tensor)
    return sums.values()


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
