"""Versions in a folder that engines see too, most of them as what differs from a whole one.

The first version is a whole safetensors file. Each one after it is one delta (`delta_format.py`) against that file, so
an engine reads at most two files, whatever it has. When a delta has grown to a part of the whole, the next version is
whole again.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from penstock.errors import WeightsError
from penstock.parsing import reading
from penstock.types import TensorSpec
from penstock.weights.disk import VersionFile, VersionFolder, header, in_order
from penstock.weights.manifest import WeightManifest

if TYPE_CHECKING:
    import torch

TRANSPORT = "delta"
WHOLE_FROM = 1 / 4
"""A delta with a greater part of the whole's bytes is the last one against it: what changes adds up."""


@dataclass(frozen=True, slots=True)
class DeltaFiles:
    """The files of one version. Their names are never used twice: equal names are equal bytes."""

    folder: str
    full_version: int
    full: str
    """Name of the whole file."""
    delta: str = ""
    """Name of the delta that makes this version of the whole one; empty: the version is the whole one."""
    delta_bytes: int = 0
    delta_crc32: int = 0

    @property
    def names(self) -> set[str]:
        """Every file of it."""
        return {self.full, self.delta} - {""}

    @classmethod
    def of(cls, manifest: WeightManifest) -> Self:
        """Read it from a manifest. WeightsError: the manifest is of another transport, or malformed."""
        if manifest.transport != TRANSPORT:
            raise WeightsError(f"weights of the transport {manifest.transport!r} are no deltas")
        where = manifest.location
        with reading("weight manifest", WeightsError):
            numbers = [int(where[key]) for key in ("full_version", "delta_bytes", "delta_crc32")]
            files = cls(where["folder"], numbers[0], where["full"], where["delta"], *numbers[1:])
        if not files.delta and files.full_version != manifest.version:
            raise WeightsError(f"malformed weight manifest: its files do not make version {manifest.version}")
        return files

    def location(self) -> Mapping[str, str]:
        """As a manifest has it."""
        return {
            "folder": self.folder,
            "full_version": str(self.full_version),
            "full": self.full,
            "delta": self.delta,
            "delta_bytes": str(self.delta_bytes),
            "delta_crc32": str(self.delta_crc32),
        }

    def open_full(self, extent: int) -> VersionFile:
        """Open the whole file, of at least `extent` bytes. WeightsError: it is gone, or too short."""
        return VersionFile(self.folder, self.full, extent)

    def read_delta(self) -> memoryview:
        """The delta as it was sent. WeightsError: it is gone or damaged."""
        with VersionFile(self.folder, self.delta, self.delta_bytes) as file:
            data = file.read(0, self.delta_bytes)
        if (found := zlib.crc32(data)) != self.delta_crc32:
            raise WeightsError(
                f"the delta {self.delta} has crc32 {found:08x}, its manifest says {self.delta_crc32:08x}: it was "
                "damaged"
            )
        return data


class DeltaStore:
    """Keeps versions in a folder, and in this process's memory the whole one and the next. One caller at a time."""

    def __init__(self, folder: str | Path) -> None:
        """Open a folder, which trainer and engines see under one path; what was committed there is `current` again."""
        self._folder = VersionFolder(folder)
        self.current: WeightManifest | None = None
        found = self._folder.remembered()
        if found is not None and found.transport == TRANSPORT and _is_there(found):
            self.current = found
        self._before: WeightManifest | None = None
        self._base: _Image | None = None
        """The whole version that deltas are made against."""
        self._published: _Image | None = None
        """A whole version that may become the base."""
        self._spare: mmap.mmap | None = None
        """Memory for the next one."""

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        """Write what differs from the whole version, or all, and describe it.

        Args:
            version: what they will be served under; `current` changes only when `commit` is called.
            named_tensors: `(checkpoint name, tensor)`; any device, dense.

        Raises:
            WeightsError: a name twice, no tensor at all, a dtype no engine loads, NaN or infinity, too little space, or
                zstd is not installed.
            StateError: the store is closed, or another one keeps its versions in this folder.
        """
        from penstock.weights import delta_format, pack  # noqa: PLC0415 - the core must import without torch

        self._folder.own()
        tensors, specs = in_order(named_tensors)
        head, offsets = header(specs)
        size = len(head) + sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
        self._published = None
        self._folder.keep(_names(self.current))
        image = self._spare
        if image is None or len(image) != size:
            image = self._spare = mmap.mmap(-1, size)
        image[: len(head)] = head
        entries = pack.write(memoryview(image), tensors, offsets)
        base = self._base_of(specs)
        if base is None:
            with self._folder.new_file(version, "safetensors", size) as (name, file):
                file.write(image)
            files = DeltaFiles(str(self._folder.path), version, name)
        else:
            files = DeltaFiles.of(base.manifest)
            with self._folder.new_file(version, "delta", 0) as (name, file):
                old, new = memoryview(base.data), memoryview(image)
                delta_format.write(file, old, new, entries, base=base.manifest.version, to=version)
            with VersionFile(files.folder, name, 1) as written:
                data = written.read(0, written.size)
            files = replace(files, delta=name, delta_bytes=len(data), delta_crc32=zlib.crc32(data))
        manifest = WeightManifest(version, TRANSPORT, files.location(), entries)
        if base is None:
            self._published = _Image(manifest, image)
        return manifest

    def adopt(self, manifest: WeightManifest) -> WeightManifest:
        """Take a version that another process wrote, to this folder or another; no byte is copied.

        Raises:
            WeightsError: it is of another transport, or a file of it is gone or damaged.
        """
        files = DeltaFiles.of(manifest)
        files.open_full(manifest.extent).close()
        if files.delta:
            files.read_delta()
        return manifest

    def commit(self, manifest: WeightManifest) -> None:
        """Make a published version the current one; a whole one is what later ones are deltas against."""
        self._before, self.current = self.current, manifest
        if self._published is not None and manifest == self._published.manifest:
            self._spare = self._base.data if self._base is not None else None
            self._base, self._published = self._published, None
        if self._folder.owned:
            self._folder.remember(manifest)
            self._folder.keep(_names(self.current) | _names(self._before))

    def close(self) -> None:
        """Leave the folder to another store; the versions stay in it."""
        self.current = self._base = self._published = self._spare = None
        self._folder.close()

    def _base_of(self, specs: Iterable[TensorSpec]) -> _Image | None:
        """None where a whole file is due: the first one, tensors of another form, or a last delta that was large."""
        base = self._base
        if base is None or self.current is None or self.current.transport != TRANSPORT:
            return None
        files = DeltaFiles.of(self.current)
        if files.full not in _names(base.manifest) or files.delta_bytes > WHOLE_FROM * len(base.data):
            return None
        same = [TensorSpec(e.name, e.dtype, e.shape) for e in base.manifest.tensors] == list(specs)
        return base if same else None


@dataclass(frozen=True, slots=True)
class _Image:
    """A whole version in memory, as its file is."""

    manifest: WeightManifest
    data: mmap.mmap


def _is_there(manifest: WeightManifest) -> bool:
    try:
        files = DeltaFiles.of(manifest)
        files.open_full(manifest.extent).close()
        if files.delta:
            VersionFile(files.folder, files.delta, files.delta_bytes).close()
    except WeightsError:
        return False
    return True


def _names(manifest: WeightManifest | None) -> set[str]:
    return set() if manifest is None else DeltaFiles.of(manifest).names
