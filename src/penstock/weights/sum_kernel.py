"""The checksums of `checksum.py` on a GPU: one kernel for all tensors at hand, which reads each byte once.

With torch's own operations three kernels are launched for each tensor and two more read it again for NaN: launching
them takes longer than a small model's bytes take over NVLink.
"""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from triton.errors import TritonError

PROGRAMS = 128
"""Of each tensor, at most: each sums every 128th row. With one embedding among many small tensors the whole GPU works
on the former, and those that have no row end at once."""


def compiled(device: torch.device, mixing: tuple[int, int, int]) -> Callable[..., torch.Tensor]:
    """Return `launch`, once it has run on a device. RuntimeError and others: Triton cannot compile or load it."""
    try:
        launch([torch.zeros(1, dtype=torch.int64, device=device)], [(0, 0)], mixing)
    except TritonError as error:
        raise RuntimeError(str(error)) from error
    return launch


def launch(
    parts: Sequence[torch.Tensor], exponents: Sequence[tuple[int, int]], mixing: tuple[int, int, int]
) -> torch.Tensor:
    """Sums and NaN of many tensors, queued on the current stream.

    Args:
        parts: flat int64 tensors of one device, as `checksum.py` cuts them.
        exponents: for each, the bits of a word that are set in NaN and infinity, and the lowest of them in each number.
        mixing: the two numbers with which `checksum.py` mixes places, and the words of a row.

    Returns:
        int64 of shape `[2, parts]`: the sums, and 1 for NaN or infinity.
    """
    device = parts[0].device
    rows = [(part.data_ptr(), len(part), *bits) for part, bits in zip(parts, exponents, strict=True)]
    # Pinned: a copy from other memory waits for all that is queued, such as the bucket that is still under way.
    on_gpu = device.type == "cuda"
    table = torch.tensor(rows, dtype=torch.int64, pin_memory=on_gpu).to(device, non_blocking=True)
    # Both are passed whole: Triton compiles anew for a pointer that is not aligned as the one before it was.
    found = torch.zeros((2, len(parts)), dtype=torch.int64, device=device)
    with torch.cuda.device(device) if on_gpu else nullcontext():  # Triton's interpreter needs none
        _kernel[(len(parts), PROGRAMS)](table, found, *mixing)
    return found


@triton.jit(do_not_specialize=["odd", "even"])
def _kernel(table, found, odd, even, width: tl.constexpr):  # noqa: ANN001, ANN202 - Triton's own types
    """Program (i, j) sums row j, j + PROGRAMS and so on of tensor i."""
    of = tl.program_id(0)
    base = tl.load(table + 4 * of).to(tl.pointer_type(tl.int64))
    words = tl.load(table + 4 * of + 1)
    exponents = tl.load(table + 4 * of + 2)
    lowest = tl.load(table + 4 * of + 3)
    column = tl.arange(0, width).to(tl.int64)
    of_column = 2 * (column * (column * even + odd)) + 1
    total = tl.zeros((width,), dtype=tl.int64)
    bad = tl.zeros((width,), dtype=tl.int64)
    for row in range(tl.program_id(1).to(tl.int64), tl.cdiv(words, width), tl.num_programs(1)):
        place = row * width + column
        word = tl.load(base + place, mask=place < words, other=0)
        total += word * (2 * width * (row * (row * even + odd)) + of_column)
        # An exponent of ones alone, plus its lowest bit, carries into the sign's place, and into nothing beyond.
        bad |= ((word & exponents) + lowest) & (exponents + lowest)
    if tl.program_id(1) * width < words:
        tl.atomic_add(found + of, tl.sum(total))
        tl.atomic_max(found + tl.num_programs(0) + of, tl.max((bad != 0).to(tl.int64)))
