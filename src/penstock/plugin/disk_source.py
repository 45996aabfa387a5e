"""A worker's view of a version's safetensors file (`weights/disk.py`)."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from penstock.plugin.sources import Place
from penstock.weights.disk import open_version
from penstock.weights.manifest import TensorEntry, WeightManifest
from penstock.weights.pack import view


class DiskSource:
    """Reads the file; its bytes were checked before (`host_bytes.py`)."""

    partial = False
    compares = False

    def __init__(self, worker: Any) -> None:
        del worker

    def prepare(self, manifest: WeightManifest) -> None:
        """See that the file can be opened from here too: a worker may be on another host than who checked it."""
        open_version(manifest).close()

    def tensors(self, manifest: WeightManifest, place: Place) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """Each in the same memory, as large as the largest."""
        del place
        buffer = memoryview(bytearray(max((entry.nbytes for entry in manifest.tensors), default=0)))
        with open_version(manifest) as file:
            for entry in manifest.tensors:
                part = buffer[: entry.nbytes]
                file.read_into(part, entry.offset)
                yield entry, view(part, replace(entry, offset=0))
