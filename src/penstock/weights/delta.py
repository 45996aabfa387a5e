"""The weights of the current version as what changed since the one before, in files of a folder that engines see too.

The first version is a whole safetensors file; those after it are deltas (`delta_format.py`), until after `full_every`
of them a whole file begins anew. A manifest names the whole file and every delta since: an engine that has the version
before reads one delta, and one that has nothing reads them all, so anyone can join at any time.
"""

from __future__ import annotations

import json
import mmap
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from penstock.errors import WeightsError
from penstock.types import TensorSpec
from penstock.weights.disk import in_order
from penstock.weights.manifest import WeightManifest
from penstock.weights.safetensors_header import header
from penstock.weights.version_folder import VersionFolder, map_file

if TYPE_CHECKING:
    import torch

TRANSPORT = "delta"


@dataclass(frozen=True, slots=True)
class Link:
    """One delta: the version it makes of the one before it in its chain, its file, and that file's checksum."""

    version: int
    file: str
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Chain:
    """What a version is made of."""

    folder: str
    full_version: int
    full: str
    """The whole file's name."""
    links: tuple[Link, ...]

    @property
    def files(self) -> tuple[str, ...]:
        """Every file of it, in order. Names are never used twice: equal files are the same version."""
        return (self.full, *(link.file for link in self.links))

    @classmethod
    def of(cls, manifest: WeightManifest) -> Self:
        """Read it from a manifest. WeightsError: the manifest is of another transport, or malformed."""
        if manifest.transport != TRANSPORT:
            raise WeightsError(f"weights of the transport {manifest.transport!r} are no deltas")
        where = manifest.location
        try:
            links = tuple(Link(int(v), str(file), int(n), int(crc)) for v, file, n, crc in json.loads(where["deltas"]))
            chain = cls(where["folder"], int(where["full_version"]), where["full"], links)
        except (KeyError, TypeError, ValueError) as error:
            raise WeightsError(f"malformed weight manifest: {error!r}") from error
        if (links[-1].version if links else chain.full_version) != manifest.version:
            raise WeightsError(f"malformed weight manifest: its deltas do not make version {manifest.version}")
        return chain

    def location(self) -> Mapping[str, str]:
        """As a manifest has it."""
        deltas = [[link.version, link.file, link.nbytes, link.crc32] for link in self.links]
        return {
            "folder": self.folder,
            "full": self.full,
            "full_version": str(self.full_version),
            "deltas": json.dumps(deltas),
        }

    def open_full(self, extent: int) -> mmap.mmap:
        """Map the whole file, of at least `extent` bytes. WeightsError: it is gone, or too short."""
        return map_file(self.folder, self.full, extent)

    def open_link(self, link: Link) -> mmap.mmap:
        """Map a delta and check that it is what was sent. WeightsError: it is not."""
        mapping = map_file(self.folder, link.file, link.nbytes)
        if (found := zlib.crc32(mapping)) != link.crc32:
            raise WeightsError(
                f"the delta {link.file} has crc32 {found:08x}, its manifest says {link.crc32:08x}: it was damaged"
            )
        return mapping


class DeltaStore:
    """Keeps versions in a folder, and two in this process's memory to compare. One caller at a time."""

    def __init__(self, folder: str | Path, *, full_every: int = 16) -> None:
        """Open a folder; what a store before this one had committed there is `current` again.

        Args:
            folder: seen by trainer and engines under the same path.
            full_every: after so many deltas the next version is a whole file, so that who joins reads no more.
        """
        if full_every < 0:
            raise WeightsError(f"full_every must not be negative, got {full_every}")
        self._folder = VersionFolder(folder)
        self._full_every = full_every
        self.current: WeightManifest | None = None
        found = self._folder.remembered()
        if found is not None and found.transport == TRANSPORT and _is_there(found):
            self.current = found
        self._before: WeightManifest | None = None
        self._base: _Image | None = None
        """The version that was committed last."""
        self._published: _Image | None = None
        self._spare: mmap.mmap | None = None
        """Memory for the next one."""

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        """Write what changed since the committed version, or all, and describe it.

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
        self._folder.keep(_files(self.current))
        image = self._spare
        if image is None or len(image) != size:
            image = self._spare = mmap.mmap(-1, size)
        image[: len(head)] = head
        entries = pack.write(memoryview(image), tensors, offsets)
        base = self._base_of(specs)
        if base is None:
            with self._folder.new_file(version, "safetensors", size) as (name, file):
                file.write(image)
            chain = Chain(str(self._folder.path), version, name, ())
        else:
            chain = Chain.of(base.manifest)
            with self._folder.new_file(version, "delta", 0) as (name, file):
                old, new = memoryview(base.data), memoryview(image)
                delta_format.write(file, old, new, entries, base=base.manifest.version, to=version)
            written = map_file(chain.folder, name, 1)
            link = Link(version, name, len(written), zlib.crc32(written))
            chain = replace(chain, links=(*chain.links, link))
        manifest = WeightManifest(version, TRANSPORT, chain.location(), entries)
        self._published = _Image(manifest, image)
        return manifest

    def adopt(self, manifest: WeightManifest) -> WeightManifest:
        """Take a version that another process wrote, to this folder or another; no byte is copied.

        Raises:
            WeightsError: it is of another transport, or a file of it is gone or damaged.
        """
        chain = Chain.of(manifest)
        chain.open_full(manifest.extent).close()
        for link in chain.links:
            chain.open_link(link).close()
        return manifest

    def commit(self, manifest: WeightManifest) -> None:
        """Make a published version the current one, and the base of the next."""
        self._before, self.current = self.current, manifest
        if self._published is not None and manifest == self._published.manifest:
            self._spare = self._base.data if self._base is not None else None
            self._base, self._published = self._published, None
        if self._folder.owned:
            self._folder.remember(manifest)
            self._folder.keep(_files(self.current) | _files(self._before))

    def close(self) -> None:
        """Leave the folder to another store; the versions stay in it."""
        self.current = self._base = self._published = self._spare = None
        self._folder.close()

    def _base_of(self, specs: Iterable[TensorSpec]) -> _Image | None:
        """None where a whole file has to come: the first one, tensors of another form, or a chain that is full."""
        base = self._base
        if base is None or base.manifest != self.current:
            return None
        if [TensorSpec(e.name, e.dtype, e.shape) for e in base.manifest.tensors] != list(specs):
            return None
        return base if len(Chain.of(base.manifest).links) < self._full_every else None


@dataclass(frozen=True, slots=True)
class _Image:
    """A version in memory, as its whole file would be."""

    manifest: WeightManifest
    data: mmap.mmap


def _is_there(manifest: WeightManifest) -> bool:
    try:
        chain = Chain.of(manifest)
        chain.open_full(manifest.extent).close()
        for link in chain.links:
            map_file(chain.folder, link.file, link.nbytes).close()
    except WeightsError:
        return False
    return True


def _files(manifest: WeightManifest | None) -> set[str]:
    return set() if manifest is None else set(Chain.of(manifest).files)
