"""Where a worker gets the tensors of a version from: one source for each transport."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch

from penstock.errors import WeightsError
from penstock.weights.disk import open_version
from penstock.weights.manifest import TensorEntry, WeightManifest
from penstock.weights.pack import read, view
from penstock.weights.shared_memory import open_mapping

Place = Callable[[TensorEntry], torch.Tensor | None]
"""The tensor's contiguous memory in the model, of the entry's dtype and shape, or None."""


class Source(Protocol):
    """One transport, on one worker; it lives as long as the worker."""

    compares: bool
    """Every tensor is compared with its sender's checksum, on this device."""

    def prepare(self, manifest: WeightManifest) -> None:
        """Map, open and check between two steps. WeightsError: it cannot be loaded, and nothing has changed."""
        ...

    def tensors(self, manifest: WeightManifest, place: Place) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """Yield every tensor once, whole, in the manifest's order, on any device; valid until the next one.

        A source that can write to memory it is given asks `place` first, and yields what it wrote there.

        Raises:
            WeightsError: the bytes did not come, or are not those that were sent. The model may be torn.
        """
        ...


class SharedMemorySource:
    """Maps the file of `weights.shared_memory`; its bytes were checked before (`core.HostBytes`)."""

    compares = False

    def __init__(self, worker: Any) -> None:
        del worker

    def prepare(self, manifest: WeightManifest) -> None:
        """Do nothing: nothing is left to do."""

    def tensors(self, manifest: WeightManifest, place: Place) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """Yield views of the mapping."""
        del place
        mapping = open_mapping(manifest.location["path"], manifest.extent)
        for entry, (_, tensor) in zip(manifest.tensors, read(memoryview(mapping), manifest.tensors), strict=True):
            yield entry, tensor


SOURCES = {
    "broadcast": "penstock.plugin.broadcast:BroadcastSource",
    "shared_memory": "penstock.plugin.sources:SharedMemorySource",
    "cuda_ipc": "penstock.plugin.ipc:IpcSource",
    "disk": "penstock.plugin.sources:DiskSource",
    "delta": "penstock.plugin.sources:SharedMemorySource",  # workers map what `delta.py` makes
}
"""Class of each transport's source, made with vLLM's Worker and imported when it is first used."""


def make_source(transport: str, worker: Any) -> Source:
    """The source of a transport. WeightsError: there is none of that name."""
    if transport not in SOURCES:
        raise WeightsError(f"this engine has no transport {transport!r}; it has {', '.join(sorted(SOURCES))}")
    module, name = SOURCES[transport].split(":")
    return getattr(importlib.import_module(module), name)(worker)


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
