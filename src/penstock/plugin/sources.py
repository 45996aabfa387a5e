"""Where a worker gets the tensors of a version from: one source for each transport."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from penstock.errors import WeightsError
from penstock.rooms import plugged_as, plugged_in
from penstock.weights.manifest import TensorEntry, WeightManifest
from penstock.weights.pack import read
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


def make_source(transport: str, worker: Any) -> Source:
    """The source of a transport, made with vLLM's Worker. WeightsError: there is none of that name."""
    if transport not in (known := plugged_as("source")):
        raise WeightsError(f"this engine has no transport {transport!r}; it has {', '.join(known)}")
    return plugged_in(f"source.{transport}")(worker)
