"""Reads tensors that lie in a trainer's memory on the worker's GPU (`weights/cuda_ipc.py`)."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from typing import Any

import torch

from penstock.errors import TransferError, WeightsError
from penstock.parsing import parse_json, reading
from penstock.plugin.sources import Place
from penstock.weights import cuda_ipc
from penstock.weights.checksum import device_sums
from penstock.weights.cuda_ipc import borrow
from penstock.weights.manifest import TensorEntry, WeightManifest, malformed


class IpcSource:
    """Maps the trainer's allocations in `prepare`, and keeps them mapped while the trainer shows the same ones."""

    compares = True

    def __init__(self, worker: Any) -> None:
        self._device = torch.device(worker.device)
        self._mapped: Mapped | None = None

    def prepare(self, manifest: WeightManifest) -> None:
        """Map what is not mapped yet, and compare the sum of every tensor with the sender's."""
        part = self._part(manifest)
        mapped = self._map(part)
        with mapped.lock:
            sums = device_sums(self._views(manifest, mapped, part))
        for entry, found in zip(manifest.tensors, sums, strict=True):
            if found != entry.checksum:
                raise WeightsError(
                    f"tensor {entry.name!r} has the sum {found:x}, its manifest says {entry.checksum:x}: the trainer "
                    "must not change its tensors before the update has ended"
                )

    def tensors(self, manifest: WeightManifest, place: Place) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """Views of the trainer's memory."""
        del place
        part = self._part(manifest)
        mapped = self._map(part)
        with mapped.lock:  # should the trainer end now, its memory stays mapped until the last view was asked for
            views = list(self._views(manifest, mapped, part))
            yield from zip(manifest.tensors, views, strict=True)
            found = device_sums(views)
        for entry, value in zip(manifest.tensors, found, strict=True):
            if value != entry.checksum:
                raise TransferError(f"tensor {entry.name!r} was changed by the trainer while the engine loaded it")

    def _part(self, manifest: WeightManifest) -> dict[str, Any]:
        """The manifest's part for this worker's GPU."""
        if self._device.type != "cuda":
            raise WeightsError(f"the transport cuda_ipc needs an engine on a GPU; this one runs on {self._device}")
        uuid = str(torch.cuda.get_device_properties(self._device).uuid)
        if uuid not in manifest.location:
            raise WeightsError(
                f"the trainer shows its weights on the GPUs {', '.join(sorted(manifest.location))}, and this engine "
                f"runs on {uuid}: give CudaIpcStore all devices of the engines, or use another transport"
            )
        with reading(f"weight manifest: the location of {uuid}", WeightsError):
            part = parse_json(manifest.location[uuid], "its text", malformed)
            given = len(part["places"])
            part = {
                "lease": str(part["lease"]),
                "blocks": [(base64.b64decode(handle, validate=True), int(size)) for handle, size in part["blocks"]],
                "places": [(int(block), int(offset)) for block, offset in part["places"]],
            }
        if given != len(manifest.tensors):
            raise WeightsError(f"malformed weight manifest: {given} places for {len(manifest.tensors)} tensors")
        return part

    def _map(self, part: dict[str, Any]) -> Mapped:
        if self._mapped is None or not self._mapped.is_of(part["lease"], part["blocks"]):
            if self._mapped is not None:
                self._mapped.close()
            self._mapped = Mapped(part["lease"], part["blocks"], self._device)
        return self._mapped

    def _views(self, manifest: WeightManifest, mapped: Mapped, part: dict[str, Any]) -> Iterator[torch.Tensor]:
        for entry, (block, offset) in zip(manifest.tensors, part["places"], strict=True):
            yield mapped.view(entry, block, offset)


class Mapped:
    """Allocations that another process lends on one device; hold `lock` while using views, since a lease may end."""

    def __init__(self, lease: str, blocks: list[tuple[bytes, int]], device: torch.device) -> None:
        """Map `blocks`, the handle and the bytes of each. WeightsError: they are not lent, or not any more."""
        self.lock = threading.Lock()
        self._of = (lease, blocks)
        self._device = device
        self._starts: list[int] = []
        self._closed = False
        borrow(lease, self.close)  # first: it can say that the trainer has ended, the driver cannot
        try:
            with self.lock, torch.cuda.device(device):
                torch.cuda.synchronize()  # binds the device's context to this thread
                for handle, _ in blocks:
                    self._starts.append(cuda_ipc.open_handle(handle))
        except WeightsError:
            self.close()
            raise

    def is_of(self, lease: str, blocks: list[tuple[bytes, int]]) -> bool:
        """Whether these are mapped here, still."""
        return not self._closed and self._of == (lease, blocks)

    def view(self, entry: TensorEntry, block: int, offset: int) -> torch.Tensor:
        """The tensor that lies there."""
        dtype = getattr(torch, entry.dtype)
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=dtype, device=self._device)
        if self._closed:
            raise WeightsError("the process that published these weights has ended, or closed its store")
        if not 0 <= block < len(self._starts) or not 0 <= offset <= self._of[1][block][1] - entry.nbytes:
            raise WeightsError(f"malformed weight manifest: {entry.name!r} does not lie in the memory that is shared")
        memory = _Memory(self._starts[block] + offset, entry.nbytes)
        return torch.as_tensor(memory, device=self._device).view(dtype).view(entry.shape)

    def close(self) -> None:
        """Unmap them, once the device has read what it was to read; closing twice is harmless."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            with torch.cuda.device(self._device):
                torch.cuda.synchronize()
                for start in self._starts:
                    cuda_ipc.close_handle(start)


class _Memory:
    """Device memory as torch takes it without a copy: Numba's array interface."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 2}
