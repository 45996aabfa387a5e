"""What is checked of a version's bytes that lie in the host's memory, before workers see it.

It is done in a thread (`preparing.py`), because it takes seconds for large models and the engine generates meanwhile.
What takes so long, checksums and the search for NaN, lets other threads of the process run.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from penstock.plugin.spec import check_bytes, check_tensors
from penstock.weights import delta, disk, shared_memory
from penstock.weights.manifest import WeightManifest


class HostBytes:
    """Checks versions; of the transport `delta` it keeps the whole of the last one."""

    def __init__(self) -> None:
        self._base = None

    def check(self, manifest: WeightManifest, in_force: int) -> WeightManifest:
        """Read every byte that the host can read. Blocking.

        Args:
            manifest: of any transport.
            in_force: the version that the engine has; of the transport `delta` alone it matters.

        Returns:
            The manifest for the workers.

        Raises:
            WeightsError: bytes are gone, are not those that were sent, or hold NaN or infinity.
        """
        if manifest.transport == shared_memory.TRANSPORT:
            check_bytes(manifest)
        elif manifest.transport == disk.TRANSPORT:
            with disk.open_version(manifest) as file:
                check_tensors(manifest.tensors, lambda entry: file.read(entry.offset, entry.nbytes))
        elif manifest.transport == delta.TRANSPORT:
            if self._base is None:
                from penstock.plugin.delta_base import DeltaBase  # noqa: PLC0415 - needs zstd

                self._base = DeltaBase()
            return self._base.bring(manifest, in_force)
        return manifest
