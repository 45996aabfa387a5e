"""A checksum that a tensor's own device computes: whether the bytes that a peer received are those that were sent."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

_WORD = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR = 1_000_003
_POSITIVE = 2**63 - 1

_CHUNK = 4 * 2**20
"""Elements that are widened to int64 at once. torch's `sum(dtype=int64)` widens its whole input first: for the
embedding of an 8B model that is 5 GB, which a GPU that an engine has filled does not have. 32 MB stay in the cache."""


def device_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Checksum of one tensor of any shape and dtype, as an int64 scalar on its device; nothing waits for the device.

    The bits count as signed integers of the element's size. Rows (of the last axis; of one-dimensional tensors each
    element) are summed, and with them `sum(rows) * 1000003 + sum(rows * (1, 2, ...))` in int64 that wraps around, less
    its sign. Equal on every kind of device: integer sums do not depend on their order.
    """
    source = tensor.detach().contiguous()
    if source.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=source.device)
    width = source.shape[-1] if source.dim() > 1 else 1
    bits = source.view(-1).view(_WORD[source.element_size()]).view(-1, width)
    rows = torch.cat([part.sum(1, dtype=torch.int64) for part in bits.split(max(1, _CHUNK // width))])
    numbers = torch.arange(1, len(rows) + 1, dtype=torch.int64, device=rows.device)
    return (rows.sum() * _FACTOR + (rows * numbers).sum()) & _POSITIVE


def read_sums(sums: Sequence[torch.Tensor]) -> list[int]:
    """What `device_sum` gave for tensors of one device, as integers: one wait for the device, one copy."""
    return torch.stack(list(sums)).tolist() if sums else []


def device_sums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Checksums of tensors of one device, in [0, 2**63)."""
    return read_sums([device_sum(tensor) for tensor in tensors])
