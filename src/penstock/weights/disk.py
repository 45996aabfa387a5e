"""The weights of the current version in a file of a folder that engines see too, on this host or on others.

Each version is one safetensors file, which engines map as they map shared memory and any other program can read. Two
are kept: the current one, and the one before it, which a reader may still be at.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import WeightsError
from penstock.types import TensorSpec
from penstock.weights.manifest import WeightManifest
from penstock.weights.safetensors_header import header
from penstock.weights.version_folder import VersionFile, VersionFolder

if TYPE_CHECKING:
    import torch

TRANSPORT = "disk"
logger = logging.getLogger(__name__)


class DiskStore:
    """Keeps versions in a folder. `publish` is blocking; one caller at a time."""

    def __init__(self, folder: str | Path) -> None:
        """Open a folder; what a store before this one had committed there is `current` again."""
        self._folder = VersionFolder(folder)
        self.current: WeightManifest | None = None
        found = self._folder.remembered()
        if found is not None and found.transport == TRANSPORT:
            try:
                open_version(found).close()
            except WeightsError as error:
                logger.warning("weight version %d is not taken up again: %s", found.version, error)
            else:
                self.current = found
        self._before: WeightManifest | None = None

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        """Write the tensors to a new file and describe them.

        Args:
            version: what they will be served under; `current` changes only when `commit` is called.
            named_tensors: `(checkpoint name, tensor)`; any device, dense.

        Raises:
            WeightsError: a name twice, no tensor at all, a dtype no engine loads, NaN or infinity, too little space.
            StateError: the store is closed, or another one keeps its versions in this folder.
        """
        from penstock.weights.pack import write  # noqa: PLC0415 - the core must import without torch

        self._folder.own()
        tensors, specs = in_order(named_tensors)
        head, offsets = header(specs)
        size = len(head) + sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
        self._folder.keep(_files(self.current))
        with self._folder.new_file(version, "safetensors", size) as (name, file):
            mapping = mmap.mmap(file.fileno(), size)
            mapping[: len(head)] = head
            entries = write(memoryview(mapping), tensors, offsets)
            mapping.flush()
        location = {"folder": str(self._folder.path), "file": name}
        return WeightManifest(version=version, transport=TRANSPORT, location=location, tensors=entries)

    def adopt(self, manifest: WeightManifest) -> WeightManifest:
        """Take a version that another process wrote, to this folder or another; no byte is copied.

        Raises:
            WeightsError: it is of another transport, gone, or shorter than the manifest says.
        """
        if manifest.transport != TRANSPORT:
            raise WeightsError(f"weights of the transport {manifest.transport!r} cannot be adopted by a store on disk")
        open_version(manifest).close()
        return manifest

    def commit(self, manifest: WeightManifest) -> None:
        """Make a published version the current one: its file stays until the one after the next is committed."""
        self._before, self.current = self.current, manifest
        if self._folder.owned:
            self._folder.remember(manifest)
            self._folder.keep(_files(self.current) | _files(self._before))

    def close(self) -> None:
        """Leave the folder to another store; the versions stay in it."""
        self.current = None
        self._folder.close()


def open_version(manifest: WeightManifest) -> VersionFile:
    """Open the file of a version. WeightsError: it is gone, or too short."""
    return VersionFile(manifest.location.get("folder", ""), manifest.location.get("file", ""), manifest.extent)


def in_order(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
) -> tuple[list[tuple[str, torch.Tensor]], list[TensorSpec]]:
    """Tensors in the order in which a file has them, and what its header says of them.

    Raises:
        WeightsError: a name twice, no tensor at all, or a dtype no engine loads.
    """
    from penstock.weights.pack import checked, dtype_name, layout  # noqa: PLC0415 - the core must import without torch

    tensors = sorted(checked(named_tensors), key=lambda named: -named[1].element_size())
    layout(tensors)
    return tensors, [TensorSpec(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors]


def _files(manifest: WeightManifest | None) -> set[str]:
    return set() if manifest is None else {manifest.location.get("file", "")}
