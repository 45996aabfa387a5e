"""The last whole version in the memory of an engine, of which deltas make others; its workers map it.

It is kept only where the transport `delta` is used.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from penstock.plugin.spec import check_tensors
from penstock.weights import shared_memory
from penstock.weights.delta import apply_delta, read_delta
from penstock.weights.disk import open_version
from penstock.weights.manifest import WeightManifest


class DeltaBase:
    """A whole version in sealed memory, with at most one delta applied to it."""

    def __init__(self) -> None:
        self._fd = -1
        self._image: mmap.mmap | None = None
        self._full = ""
        """Name of the whole file that the image is made of; empty while the image is of no version."""
        self._undo: Callable[[], object] = lambda: None
        """Make the image the whole version again: a delta is its own inverse."""
        self._changed: set[int] = set()
        """Numbers of the tensors in which the image differs from the whole version."""
        self._lock = threading.Lock()

    def bring(self, manifest: WeightManifest) -> WeightManifest:
        """Make the image that version.

        Args:
            manifest: of the transport `delta`.

        Returns:
            The manifest for workers, of the transport `shared_memory`.

        Raises:
            WeightsError: a file is gone or damaged, or a tensor that resulted is not what was sent, or not finite.
        """
        with self._lock:
            self._make(manifest)
        location = {"path": f"/proc/{os.getpid()}/fd/{self._fd}"}
        return replace(manifest, transport=shared_memory.TRANSPORT, location=location)

    def _make(self, manifest: WeightManifest) -> None:
        entries, delta, full = manifest.tensors, read_delta(manifest), manifest.location.get("file", "")
        base, self._full = self._full, ""  # should anything fail, the image is of no version
        if self._image is not None and base == full and manifest.extent <= len(self._image):
            unchecked = self._changed
            self._undo()
        else:
            unchecked = set(range(len(entries)))
            self._image = self._load(manifest)
        image = memoryview(self._image)
        self._undo, self._changed = lambda: None, set()
        if delta is not None:
            self._undo = partial(apply_delta, delta, image, entries)
            self._changed = self._undo()
        check_tensors(
            [entries[number] for number in sorted(unchecked | self._changed)],
            lambda entry: image[entry.offset : entry.offset + entry.nbytes],
        )
        self._full = full

    def _load(self, manifest: WeightManifest) -> mmap.mmap:
        extent = max(manifest.extent, 1)
        with open_version(manifest) as file:
            if self._image is None or len(self._image) != extent:
                before = self._fd  # still ours if there is no memory for another
                self._fd, self._image = shared_memory.sealed_memory("penstock-delta-base", extent)
                if before >= 0:
                    os.close(before)
            file.read_into(memoryview(self._image), 0)
        return self._image
