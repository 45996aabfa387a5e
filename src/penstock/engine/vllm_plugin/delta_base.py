"""The whole of one version in host memory, to which deltas are applied; of an engine, for its workers.

It is kept only where the transport `delta` is used. Workers map it as they map shared memory, through `/proc/PID/fd/N`.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import json
import mmap
import os
import threading
from dataclasses import replace

from penstock.engine.vllm_plugin.spec import check_tensors
from penstock.weights import delta_format
from penstock.weights.delta import Chain
from penstock.weights.manifest import WeightManifest


class DeltaBase:
    """What `chain` makes, up to the version that was prepared last."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("penstock-delta-base", os.MFD_CLOEXEC)
        self._image: mmap.mmap | None = None
        self._files: tuple[str, ...] = ()
        """Those that were put into the image, in order; none while it is of no version."""
        self._touched: dict[str, set[int]] = {}
        """Of each delta in the image, numbers of the tensors that it changed."""
        self._versions: dict[int, tuple[str, ...]] = {}
        """Files of which the versions were made that the engine may have in force."""
        self._lock = threading.Lock()

    def bring(self, manifest: WeightManifest, in_force: int) -> WeightManifest:
        """Make the image that version, by the deltas that it lacks, or anew where it is of another chain.

        Args:
            manifest: of the transport `delta`.
            in_force: the version that the engine says it has.

        Returns:
            The manifest for workers: `path` of the image, and where what is in force was prepared here, as `base` its
            number and as `changed` the numbers of the tensors that differ from it.

        Raises:
            WeightsError: a file is gone or damaged, or a tensor that resulted is not what was sent, or not finite.
        """
        chain = Chain.of(manifest)
        with self._lock:
            self._apply(chain, manifest)
            location = {"path": f"/proc/{os.getpid()}/fd/{self._fd}"}
            files = self._versions.get(in_force)
            if files is not None and chain.files[: len(files)] == files:
                later = chain.files[len(files) :]
                changed = sorted(set[int]().union(*(self._touched[file] for file in later)))
                location |= {"base": str(in_force), "changed": json.dumps(changed)}
            # Of two versions with one number, of which the first was refused by another engine, the last counts.
            kept = {number: files for number, files in self._versions.items() if number == in_force}
            self._versions = {**kept, manifest.version: chain.files}
            return replace(manifest, location=location)

    def _apply(self, chain: Chain, manifest: WeightManifest) -> None:
        done, self._files = self._files, ()  # should anything fail, the image is of no version
        if self._image is None or not done or chain.files[: len(done)] != done:
            self._touched = {}
            self._load(chain, manifest.extent)
            done, unchecked = (chain.full,), set(range(len(manifest.tensors)))
        else:
            unchecked = set[int]()
        image = memoryview(self._image)  # pyright: ignore[reportArgumentType] - loaded above
        versions = (chain.full_version, *(link.version for link in chain.links))
        for number in range(len(done) - 1, len(chain.links)):
            link = chain.links[number]
            data = memoryview(chain.open_link(link))
            base = versions[number]
            self._touched[link.file] = delta_format.apply(data, image, manifest.tensors, base=base, to=link.version)
            unchecked |= self._touched[link.file]
        check_tensors(image, [manifest.tensors[number] for number in sorted(unchecked)])
        self._files = chain.files

    def _load(self, chain: Chain, extent: int) -> None:
        full = chain.open_full(extent)
        if self._image is None or len(self._image) != len(full):
            self._image = None
            os.ftruncate(self._fd, len(full))
            self._image = mmap.mmap(self._fd, len(full))
        self._image[:] = memoryview(full)
