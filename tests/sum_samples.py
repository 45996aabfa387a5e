"""Tensors that checksums have to get right: each dtype, odd sizes, strides, largest numbers, NaN and infinity."""

from __future__ import annotations

import torch

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn]
SHAPES = [(), (1,), (7,), (5, 3), (0,), (8, 1024), (300, 1031)]


def samples() -> list[torch.Tensor]:
    """The same ones every time, on the CPU."""
    made = torch.Generator().manual_seed(0)
    tensors = [
        (torch.randn(shape, generator=made) * 50).to(dtype)
        for dtype in [*FLOATS, torch.int64, torch.uint8]
        for shape in SHAPES
    ]
    tensors += [torch.full((40, 1024), -(2**63), dtype=torch.int64), torch.randint(0, 255, (30_000,), generator=made)]
    tensors += [torch.randn(64, 40, generator=made).t(), torch.randn(99, generator=made)[1:]]
    tensors += [torch.arange(30_000).to(torch.uint8)[3:20_001]]
    for dtype in FLOATS:
        most = torch.finfo(dtype).max
        tensors += [torch.full((9,), value, dtype=torch.float64).to(dtype) for value in (most, -most)]
        for value in ("nan",) if dtype is torch.float8_e4m3fn else ("nan", "inf", "-inf"):
            for place in range(9):
                tensors.append(torch.ones(9).to(dtype))
                tensors[-1][place] = float(value)
    return tensors
