"""A checksum of the weights in force on one worker: equal for engines of one layout that serve the same weights."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from penstock.errors import WeightsError
from penstock.weights.checksum import device_sums
from penstock.weights.manifest import SUMS, WeightManifest, kind_of


def checksum_of_sums(manifest: WeightManifest) -> str:
    """Of a version whose every tensor was compared with its sender's sum: equal for engines of any layout."""
    sums = repr([(entry.name, entry.checksum) for entry in manifest.tensors])
    return SUMS + hashlib.blake2b(sums.encode(), digest_size=16).hexdigest()


def weights_checksum(model: torch.nn.Module) -> str:
    """What the parameters are, a colon, and a digest over them and over what packed CPU kernels compute.

    Of each parameter its sum (`weights/checksum.py`) enters: only sums leave the device. Packed CPU kernels hide their
    weights (`cpu_linear`), so what enters is their output for a fixed input.
    """
    kind, digest = hashlib.blake2b(digest_size=4), hashlib.blake2b(digest_size=16)
    parameters: list[torch.Tensor] = []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            kind.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
            if parameter.numel():
                parameters.append(parameter)
        digest.update(repr(device_sums(parameters)).encode())
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
    return f"{kind.hexdigest()}:{digest.hexdigest()}"


def check_replicas(checksums: Sequence[str], replicas: int) -> None:
    """Compare the data-parallel replicas of a dense model rank by rank, like with like (`manifest.kind_of`).

    A mixture of experts must not be compared: vLLM spreads its experts over the replicas.

    Args:
        checksums: of every rank, shape `[replicas * ranks of one]`, as `patches.on_every_rank` orders them.
        replicas: how many.

    Raises:
        WeightsError: a replica has other weights than one before it; the engine must not serve.
    """
    ranks = len(checksums) // replicas
    said: dict[tuple[int, str], tuple[int, str]] = {}
    for place, own in enumerate(checksums):
        replica, rank = divmod(place, ranks)
        other, first = said.setdefault((rank, kind_of(own)), (replica, own))
        if own != first:
            raise WeightsError(
                f"data-parallel replica {replica} has on rank {rank} weights of checksum {own}, replica {other} of "
                f"{first}: they would answer differently"
            )
