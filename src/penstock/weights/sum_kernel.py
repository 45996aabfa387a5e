"""The checksums of `checksum.py` on a GPU: one kernel for all given tensors, which reads each byte once.

torch's own operations launch three kernels per tensor, and two more read the tensor again for NaN. These launches take
longer than NVLink takes for a small model's bytes.
"""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from triton.errors import TritonError

EXPONENTS = {
    torch.float64: (0x7FF0_0000_0000_0000, 0x0010_0000_0000_0000),
    torch.float32: (0x7F80_0000_7F80_0000, 0x0080_0000_0080_0000),
    torch.bfloat16: (0x7F80_7F80_7F80_7F80, 0x0080_0080_0080_0080),
    torch.float16: (0x7C00_7C00_7C00_7C00, 0x0400_0400_0400_0400),
    torch.float8_e5m2: (0x7C7C_7C7C_7C7C_7C7C, 0x0404_0404_0404_0404),
    torch.float8_e4m3fn: (0x7F7F_7F7F_7F7F_7F7F, 0x0101_0101_0101_0101),  # one NaN, all ones, and no infinity
}
"""Per dtype: a word's exponent bits (all ones in NaN and infinity), and the lowest bit of each exponent in it."""
PROGRAMS = 128
"""Most programs per tensor: each sums every 128th row. For one embedding among many small tensors, the whole GPU works
on the embedding, because programs without a row end at once."""


def compiled(device: torch.device, mixing: tuple[int, int, int]) -> Callable[..., torch.Tensor]:
    """Return `launch` after a first run. RuntimeError and others: Triton fails."""
    try:
        launch([torch.zeros(1, dtype=torch.int64, device=device)], [torch.int64], mixing)
    except TritonError as error:
        raise RuntimeError(str(error)) from error
    return launch


def launch(parts: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype], mixing: tuple[int, int, int]) -> torch.Tensor:
    """Queue sums and NaN checks of many tensors on the current stream.

    Args:
        parts: flat int64 tensors of one device, as `checksum.py` makes them.
        dtypes: of the tensors.
        mixing: the two numbers with which `checksum.py` mixes places, and the number of words in a row.

    Returns:
        int64 of shape `[2, parts]`: the sums, and 1 for NaN or infinity.
    """
    device = parts[0].device
    pairs = zip(parts, dtypes, strict=True)
    rows = [(part.data_ptr(), len(part), *EXPONENTS.get(dtype, (0, 0))) for part, dtype in pairs]
    # Pinned: a copy from other memory waits for all queued work, such as the bucket in transfer.
    on_gpu = device.type == "cuda"
    table = torch.tensor(rows, dtype=torch.int64, pin_memory=on_gpu).to(device, non_blocking=True)
    # Both are passed whole, because Triton compiles another kernel for a pointer with another alignment.
    found = torch.zeros((2, len(parts)), dtype=torch.int64, device=device)
    with torch.cuda.device(device) if on_gpu else nullcontext():  # Triton's interpreter needs no device
        _kernel[(len(parts), PROGRAMS)](table, found, *mixing)
    return found


@triton.jit(do_not_specialize=["odd", "even"])
def _kernel(table, found, odd, even, width: tl.constexpr):  # noqa: ANN001, ANN202 - Triton's own types
    """Sum rows j, j + PROGRAMS and so on of tensor i, in program (i, j)."""
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
        # If all exponent bits are ones, adding the lowest one carries into the sign's place, and no further.
        bad |= ((word & exponents) + lowest) & (exponents + lowest)
    if tl.program_id(1) * width < words:
        tl.atomic_add(found + of, tl.sum(total))
        tl.atomic_max(found + tl.num_programs(0) + of, tl.max((bad != 0).to(tl.int64)))
