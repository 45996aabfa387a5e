"""A checksum of the weights in force on one worker: equal for engines of one layout that serve the same weights."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import hashlib
from typing import Any

import torch

_WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def weights_checksum(model: torch.nn.Module) -> str:
    """Digest over every parameter, and over what packed CPU kernels compute.

    For each parameter two sums of its bits as integers, in the second each row (of the last axis) times its number,
    so that moved rows show; both are computed on the device and only they are copied. Packed CPU kernels hide their
    weights (`cpu_linear`), so what enters is their output for a fixed input.
    """
    digest = hashlib.blake2b(digest_size=16)
    sums: list[torch.Tensor] = []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
            if parameter.numel() == 0:
                continue
            bits = parameter.detach().contiguous().view(-1).view(_WORD[parameter.element_size()])
            width = parameter.shape[-1] if parameter.dim() > 1 else 1
            rows = bits.view(-1, width).sum(1, dtype=torch.int64)
            sums += [rows.sum(), (rows * torch.arange(1, len(rows) + 1, device=rows.device)).sum()]
        if sums:
            digest.update(torch.stack(sums).cpu().numpy().tobytes())
        for name, module in model.named_modules():
            packed = getattr(module, "cpu_linear", None)
            if packed is not None:
                weight: Any = module.weight
                # A packed module may have given its own weight away; then its declared input width counts.
                width: Any = weight.shape[-1] if weight.numel() else getattr(module, "input_size_per_partition", None)
                width = width or module.input_size
                probe = torch.linspace(-1.0, 1.0, width).unsqueeze(0).to(weight.dtype)
                digest.update(name.encode())
                digest.update(packed(probe, weight, None).float().numpy().tobytes())
    return digest.hexdigest()
