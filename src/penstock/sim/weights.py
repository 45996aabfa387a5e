"""Weights as the simulated engine holds them: which are in force, and whether offered ones may follow."""

from __future__ import annotations

import hashlib
import math
import os
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import WeightsError
from penstock.types import TensorSpec
from penstock.weights import delta, disk
from penstock.weights.manifest import DTYPE_BYTES, TensorEntry, WeightManifest

_HALF_EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00}
"""All exponent bits set: infinity, and NaN above it."""


def check_manifest(manifest: WeightManifest, specs: Sequence[TensorSpec] | None) -> str:
    """Everything that the real engine checks before it touches its weights.

    Args:
        manifest: the offer. Where its file exists, the bytes are mapped and checked.
        specs: what the engine's model holds; None: any tensors.

    Returns:
        The checksum that the weights will have: over the CRC-32 of every tensor in order of name.

    Raises:
        WeightsError: a tensor is missing, extra, misshapen, of another dtype, damaged, or holds NaN.
    """
    names = [t.name for t in manifest.tensors]
    if not names:
        raise WeightsError("the manifest holds no tensors")
    if twice := {n for n in names if names.count(n) > 1} if len(set(names)) < len(names) else set[str]():
        raise WeightsError(f"tensors given twice: {sorted(twice)}")
    for tensor in manifest.tensors:
        if tensor.dtype not in DTYPE_BYTES:
            raise WeightsError(f"tensor {tensor.name!r} has the unknown dtype {tensor.dtype!r}")
    if specs is not None:
        _check_specs(manifest.tensors, {spec.name: spec for spec in specs})
    if manifest.transport == "shared_memory" and "path" in manifest.location:
        _check_bytes(Path(manifest.location["path"]), manifest.tensors)
    elif manifest.transport in {disk.TRANSPORT, delta.TRANSPORT}:
        _check_files(manifest)
    return checksum(manifest.tensors)


def checksum(tensors: Sequence[TensorEntry]) -> str:
    """BLAKE2b over name and CRC-32 of every tensor, in order of name; 16 hex digits."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in sorted(tensors, key=lambda t: t.name):
        digest.update(f"{tensor.name}\0{tensor.crc32}\0".encode())
    return digest.hexdigest()


def _check_specs(tensors: Sequence[TensorEntry], specs: dict[str, TensorSpec]) -> None:
    given = {t.name for t in tensors}
    if missing := sorted(specs.keys() - given):
        raise WeightsError(f"missing tensors: {missing[:5]}{' ...' if len(missing) > 5 else ''}")  # noqa: PLR2004
    if extra := sorted(given - specs.keys()):
        raise WeightsError(f"the model has no tensors {extra[:5]}{' ...' if len(extra) > 5 else ''}")  # noqa: PLR2004
    for tensor in tensors:
        spec = specs[tensor.name]
        if tensor.shape != spec.shape:
            raise WeightsError(f"tensor {tensor.name!r} has shape {tensor.shape}, the model's has {spec.shape}")
        if tensor.dtype != spec.dtype:
            raise WeightsError(f"tensor {tensor.name!r} has dtype {tensor.dtype}, the model's has {spec.dtype}")


def _check_bytes(path: Path, tensors: Sequence[TensorEntry]) -> None:
    try:
        with path.open("rb", buffering=0) as file:
            for tensor in tensors:
                _check_tensor(os.pread(file.fileno(), tensor.nbytes, tensor.offset), tensor)
    except FileNotFoundError:
        # A simulated trainer need not have bytes; the manifest alone is then what is checked.
        return
    except (OSError, ValueError) as error:
        raise WeightsError(f"cannot read the weights at {path}: {error}") from error


def _check_files(manifest: WeightManifest) -> None:
    """Every tensor of a whole file; a delta as it was sent, since it takes torch to see what it makes."""
    if manifest.transport == disk.TRANSPORT:
        whole, delta_name = disk.open_version(manifest), ""
    else:
        files = delta.DeltaFiles.of(manifest)
        whole, delta_name = files.open_full(manifest.extent), files.delta
        if delta_name:
            files.read_delta()
    with whole:
        for tensor in () if delta_name else manifest.tensors:
            _check_tensor(whole.read(tensor.offset, tensor.nbytes), tensor)


def _check_tensor(raw: bytes | memoryview, tensor: TensorEntry) -> None:
    if len(raw) != tensor.nbytes:
        raise WeightsError(f"tensor {tensor.name!r} ends beyond the bytes that are there")
    if (found := zlib.crc32(raw)) != tensor.crc32:
        raise WeightsError(f"tensor {tensor.name!r} has the checksum {found}, the manifest says {tensor.crc32}")
    if _has_nan(bytes(raw), tensor.dtype):
        raise WeightsError(f"tensor {tensor.name!r} holds NaN or infinity")


def _has_nan(raw: bytes, dtype: str) -> bool:
    if dtype in ("float32", "float64"):
        # A sum is finite if and only if every part is, but for overflow, which the second look settles.
        values = array("f" if dtype == "float32" else "d", raw)
        return not math.isfinite(sum(values)) and not all(map(math.isfinite, values))
    exponent = _HALF_EXPONENT.get(dtype)
    return exponent is not None and any(half & exponent == exponent for half in array("H", raw))
