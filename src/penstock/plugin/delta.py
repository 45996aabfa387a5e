"""The whole of one version in host memory, of which deltas make others; of an engine, for its workers.

It is kept only where the transport `delta` is used. Workers map it as they map shared memory, through `/proc/PID/fd/N`.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import json
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from penstock.errors import WeightsError
from penstock.parsing import parse_json, reading
from penstock.plugin.checksum import weights_checksum
from penstock.plugin.sources import Place
from penstock.plugin.spec import check_tensors
from penstock.weights import delta_format
from penstock.weights.delta import DeltaFiles
from penstock.weights.manifest import TensorEntry, WeightManifest
from penstock.weights.pack import view
from penstock.weights.shared_memory import open_mapping, sealed_memory


class DeltaBase:
    """The version that was prepared last."""

    def __init__(self) -> None:
        self._fd = -1
        self._image: mmap.mmap | None = None
        self._full = ""
        """Name of the whole file that the image is made of; empty while the image is of no version."""
        self._undo: Callable[[], object] = lambda: None
        """Makes the image the whole version again: a delta is its own inverse."""
        self._changed: frozenset[int] = frozenset()
        """Numbers of the tensors in which the image differs from the whole version."""
        self._versions: dict[int, tuple[str, frozenset[int]]] = {}
        """The whole file, and what differs from it, of the versions that the engine may have in force."""
        self._lock = threading.Lock()

    def bring(self, manifest: WeightManifest, in_force: int) -> WeightManifest:
        """Make the image that version.

        Args:
            manifest: of the transport `delta`.
            in_force: the version that the engine says it has.

        Returns:
            The manifest for workers: `path` of the image, and where what is in force was prepared here, as `base` its
            number and as `changed` the numbers of the tensors that differ from it.

        Raises:
            WeightsError: a file is gone or damaged, or a tensor that resulted is not what was sent, or not finite.
        """
        files = DeltaFiles.of(manifest)
        with self._lock:
            self._make(files, manifest)
            location = {"path": f"/proc/{os.getpid()}/fd/{self._fd}"}
            full, changed = self._versions.get(in_force, ("", frozenset[int]()))
            if full == files.full:
                location |= {"base": str(in_force), "changed": json.dumps(sorted(changed | self._changed))}
            # Of two versions with one number, of which the first was refused by another engine, the last counts.
            kept = {number: made for number, made in self._versions.items() if number == in_force}
            self._versions = {**kept, manifest.version: (files.full, self._changed)}
            return replace(manifest, location=location)

    def _make(self, files: DeltaFiles, manifest: WeightManifest) -> None:
        entries = manifest.tensors
        full, self._full = self._full, ""  # should anything fail, the image is of no version
        if self._image is not None and full == files.full and manifest.extent <= len(self._image):
            self._undo()
            unchecked = set(self._changed)
        else:
            self._image = self._loaded(files, manifest.extent)
            unchecked = set(range(len(entries)))
        image = memoryview(self._image)
        self._undo, self._changed = lambda: None, frozenset()
        if files.delta:
            data, base = files.read_delta(), files.full_version

            def apply() -> set[int]:
                return delta_format.apply(data, image, entries, base=base, to=manifest.version)

            self._changed = frozenset(apply())
            self._undo = apply
        check_tensors(
            [entries[number] for number in sorted(unchecked | self._changed)],
            lambda entry: image[entry.offset : entry.offset + entry.nbytes],
        )
        self._full = files.full

    def _loaded(self, files: DeltaFiles, extent: int) -> mmap.mmap:
        image, extent = self._image, max(extent, 1)
        with files.open_full(extent) as file:
            if image is None or len(image) != extent:
                if self._fd >= 0:
                    os.close(self._fd)
                self._fd, image = sealed_memory("penstock-delta-base", extent)
            file.read_into(memoryview(image), 0)
        return image


class DeltaSource:
    """Maps the whole version; brings only what changed, where what is in force is the delta's base for certain."""

    partial = False
    """Set by who loads: whether tensors may be left out that are in force as they are."""
    compares = False

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._changed: frozenset[int] | None = None

    def prepare(self, manifest: WeightManifest) -> None:
        """See whether the model has the base in force, by the checksum that it had when the base was loaded.

        A label would not do: after a sleep that dropped the weights, or a load that failed half-way, it is as before.
        And a base of the same number out of another image, that of another process, may be of another chain.
        """
        self._changed = None
        if "base" in manifest.location:
            checksum = weights_checksum(self._worker.model_runner.get_model())
            base = int(manifest.location["base"]), checksum, manifest.location.get("path")
            if base == getattr(self._worker, "penstock_in_force", None):
                self._changed = _numbers(manifest)

    def tensors(self, manifest: WeightManifest, place: Place) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """Views of the mapping; where `partial` is set and the base is in force, only of tensors that changed."""
        del place
        changed, self._changed = self._changed, None
        buffer = memoryview(open_mapping(manifest.location.get("path", ""), manifest.extent))
        for number, entry in enumerate(manifest.tensors):
            if not self.partial or changed is None or number in changed:
                yield entry, view(buffer, entry)


def _numbers(manifest: WeightManifest) -> frozenset[int]:
    with reading("weight manifest", WeightsError):
        return frozenset(parse_json(manifest.location["changed"], "malformed weight manifest: `changed`", WeightsError))
