"""A worker's view of a version's safetensors file (`weights/disk.py`)."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from penstock.engine.vllm_plugin.sources import Place
from penstock.weights.disk import open_version
from penstock.weights.manifest import TensorEntry, WeightManifest
from penstock.weights.pack import view


class DiskSource:
    """Maps the file; its bytes were checked before (`host_bytes.py`)."""

    partial = False
    compares = False

    def __init__(self, worker: Any) -> None:
        del worker

    def prepare(self, manifest: WeightManifest) -> None:
        """See that the file can be mapped from here too: a worker may be on another host than who checked it."""
        open_version(manifest).close()

    def tensors(self, manifest: WeightManifest, place: Place) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """Views of the mapping."""
        del place
        buffer = memoryview(open_version(manifest))
        for entry in manifest.tensors:
            yield entry, view(buffer, entry)
