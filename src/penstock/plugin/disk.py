"""The transport `disk` in an engine: the core checks a version's file, and each worker reads it."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from penstock.plugin.sources import Place
from penstock.plugin.spec import check_tensors
from penstock.weights.disk import open_version
from penstock.weights.manifest import TensorEntry, WeightManifest
from penstock.weights.pack import view


class DiskCheck:
    """Checks every byte of a file; see `core.HostBytes`."""

    def bring(self, manifest: WeightManifest) -> WeightManifest:
        """Return the manifest. WeightsError: bytes are gone, are not those that were sent, or are not finite."""
        with open_version(manifest) as file:
            check_tensors(manifest.tensors, lambda entry: file.read(entry.offset, entry.nbytes))
        return manifest


class DiskSource:
    """Reads the file; its bytes were checked before (`core.HostBytes`)."""

    compares = False

    def __init__(self, worker: Any) -> None:
        del worker

    def prepare(self, manifest: WeightManifest) -> None:
        """Open the file: a worker may be on another host than the core, which checked it."""
        open_version(manifest).close()

    def tensors(self, manifest: WeightManifest, place: Place) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """Yield all tensors in one memory, as large as the largest."""
        del place
        buffer = memoryview(bytearray(max((entry.nbytes for entry in manifest.tensors), default=0)))
        with open_version(manifest) as file:
            for entry in manifest.tensors:
                part = buffer[: entry.nbytes]
                file.read_into(part, entry.offset)
                yield entry, view(part, replace(entry, offset=0))
