"""Tensors in a trainer's device memory that engines on the same GPU map: the store, its lease, the driver calls.

For each GPU (by UUID), a manifest has the IPC handles of the allocations that hold the tensors, and each tensor's
position in them: numbers and base64, nothing pickled. A trainer that updates its parameters in place always shows the
same allocations, so engines map them once.

torch's `UntypedStorage._share_cuda_` makes each handle for exactly one receiver. Memory shown to two engines, or to
none, is never freed by its owner. Bare handles have no counter, so a lease marks when the memory ends. The lender holds
both ends of a pipe; an engine opens the pipe through `/proc/PID/fd/N` and reads. The read ends when the lender closes
the pipe or its process ends, by any signal. A forked child would hold the pipe open, so it closes its copies.

Every driver call needs the device's context on the calling thread. `torch.cuda.synchronize()` provides it.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnnecessaryComparison=false

from __future__ import annotations

import base64
import ctypes
import json
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from penstock.checks import parse_json, reading
from penstock.errors import TransferError, WeightsError
from penstock.weights.checksum import device_sums
from penstock.weights.manifest import Source, Store, TensorEntry, WeightManifest, malformed
from penstock.weights.pack import checked
from penstock.weights.transfer import describe

if TYPE_CHECKING:
    from penstock.weights.manifest import Place

HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1
TRANSPORT = "cuda_ipc"


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


def block_of(pointer: int) -> tuple[int, int]:
    """Return start and size in bytes of the allocation that contains a device pointer."""
    start, size = ctypes.c_uint64(), ctypes.c_size_t()
    _check_shareable(
        _driver().cuMemGetAddressRange_v2(ctypes.byref(start), ctypes.byref(size), ctypes.c_uint64(pointer))
    )
    return start.value, size.value


def handle_of(start: int) -> bytes:
    """Return the handle by which another process maps an allocation, 64 bytes."""
    handle = _Handle()
    _check_shareable(_driver().cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(start)))
    return bytes(handle)


def open_handle(handle: bytes) -> int:
    """Map another process's allocation on the current device. Return its start."""
    if len(handle) != HANDLE_BYTES:
        raise WeightsError(f"a CUDA IPC handle has {HANDLE_BYTES} bytes, this one {len(handle)}")
    start = ctypes.c_uint64()
    status = _driver().cuIpcOpenMemHandle_v2(
        ctypes.byref(start), _Handle.from_buffer_copy(handle), ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS)
    )
    if status:
        raise WeightsError(
            f"cannot map the trainer's device memory: {_why(status)}; trainer and engine must be two processes of one "
            "host that see the same GPU, and the trainer must still have the memory"
        )
    return start.value


def close_handle(start: int) -> None:
    """Unmap an allocation of `open_handle`. The device must not be reading it."""
    status = _driver().cuIpcCloseMemHandle(ctypes.c_uint64(start))
    if status:
        raise WeightsError(f"cannot unmap device memory at {start:#x}: {_why(status)}")


def _check_shareable(status: int) -> None:
    if status:
        raise WeightsError(
            f"the trainer's device memory cannot be shared ({_why(status)}): memory of expandable segments and of "
            "cudaMallocAsync has no IPC handles; start the trainer without them in PYTORCH_CUDA_ALLOC_CONF, or use "
            "another transport"
        )


def _why(status: int) -> str:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
    return f"CUDA error {status}, {text.value.decode() if text.value else 'unknown to the driver'}"


@cache
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise WeightsError(f"no CUDA driver on this machine ({error}); use another transport") from error
    driver.cuIpcOpenMemHandle_v2.argtypes = (ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint)
    return driver


_no_fork = threading.RLock()
"""Held through every fork, so that no other thread opens or closes a pipe during the fork."""


class Lease:
    """The lender's side. It lasts until `close` or the end of the process, and is closed in a forked child."""

    def __init__(self) -> None:
        with _no_fork:
            self._ends = os.pipe()
            _open.add(self)
        self.path = f"/proc/{os.getpid()}/fd/{self._ends[0]}"
        """Path at which a process of the same user borrows."""

    def close(self) -> None:
        """Notify all borrowers. A second call is harmless."""
        with _no_fork:
            if self in _open:
                _open.remove(self)
                # The read end first: then a pipe that can be opened always has a writer, and no reader waits for one.
                for fd in self._ends:
                    os.close(fd)


_open: set[Lease] = set()
"""All open leases, even unreferenced ones, because their pipes are open."""


def _forked() -> None:
    for lease in tuple(_open):
        lease.close()
    _no_fork.release()


os.register_at_fork(before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_forked)


def borrow(path: str, ended: Callable[[], None]) -> None:
    """Call `ended` in its own thread once the lease ends. WeightsError: it has ended, or is not a lease."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise WeightsError(
            f"cannot reach the process that lends its weights at {path}: {error.strerror}; it must be alive, on this "
            "host, and of the same user"
        ) from error
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        os.close(fd)
        raise WeightsError(f"{path} is not the lease of a store of weights")
    os.set_blocking(fd, True)

    def wait() -> None:
        while os.read(fd, 1):
            pass
        os.close(fd)
        ended()

    threading.Thread(target=wait, name="penstock-lease", daemon=True).start()


class CudaIpcStore(Store):
    """Shows tensors to the engines on their GPU. The tensors must not change from `publish` to the update's end.

    `current` is always None, because after an update the trainer changes the tensors.
    """

    transport = TRANSPORT

    def __init__(self, devices: Sequence[torch.device | str] = ()) -> None:
        """Open a store for the GPUs of all engines. Default: the GPU of the first tensor.

        A tensor that is on another device or not contiguous is copied to each GPU. The memory of the copy is kept for
        the next version.
        """
        self._given = tuple(_indexed(torch.device(device)) for device in devices)
        self._copies: dict[tuple[torch.device, str], torch.Tensor] = {}
        self._names: list[str] = []
        self._shown: dict[torch.device, list[torch.Tensor]] = {}
        """Tensors that engines may be reading. This reference keeps them alive."""
        self._blocks: list[Any] = []
        self._lease: Lease | None = None

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        """Describe the location of the computed tensors; see `Store.publish`.

        Raises:
            WeightsError: also without a GPU, and for memory that cannot be shared (expandable segments).
        """
        self.check_open()
        if not torch.cuda.is_available():
            raise WeightsError("the transport cuda_ipc needs a GPU, and torch sees none here; use shared_memory")
        with torch.no_grad():
            names, shown = self._show(named_tensors)
            entries, _ = describe(list(zip(names, next(iter(shown.values()), ()), strict=True)))
        parts = {device: _part(device, tensors) for device, tensors in shown.items()}
        blocks = [part["blocks"] for part in parts.values()]
        if self._lease is None or blocks != self._blocks:
            if self._lease is not None:
                self._lease.close()  # engines unmap the old allocations, so that they can be freed here
            self._lease, self._blocks = Lease(), blocks
        self._names, self._shown = names, shown
        uuids = {device: str(torch.cuda.get_device_properties(device).uuid) for device in parts}
        location = {uuids[d]: json.dumps({"lease": self._lease.path, **part}) for d, part in parts.items()}
        return WeightManifest(version, TRANSPORT, location, entries)

    def offered(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the tensors of the last `publish`, as engines read them."""
        return list(zip(self._names, next(iter(self._shown.values()), ()), strict=True))

    def close(self) -> None:
        """Release every tensor. Engines that mapped them get notice and unmap them."""
        super().close()
        if self._lease is not None:
            self._lease.close()
        self._names, self._shown = [], {}
        self._copies = {}

    def _show(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> tuple[list[str], dict[torch.device, list[torch.Tensor]]]:
        """Return the names, and on every device one contiguous tensor per name."""
        names: list[str] = []
        shown: dict[torch.device, list[torch.Tensor]] = {device: [] for device in self._given}
        for name, tensor in checked(named_tensors):
            source = tensor.detach()
            if not shown:
                on_gpu = source.device.type == "cuda"
                shown[source.device if on_gpu else torch.device("cuda", torch.cuda.current_device())] = []
            names.append(name)
            for device, tensors in shown.items():
                as_it_is = source.device == device and source.is_contiguous()
                tensors.append(source if as_it_is else self._copied(device, name, source))
        return names, shown

    def _copied(self, device: torch.device, name: str, source: torch.Tensor) -> torch.Tensor:
        kept = self._copies.get((device, name))
        if kept is None or kept.shape != source.shape or kept.dtype != source.dtype:
            kept = self._copies[device, name] = self._room(device, name, source)
        return kept.copy_(source)

    def _room(self, device: torch.device, name: str, source: torch.Tensor) -> torch.Tensor:
        try:
            return torch.empty(source.shape, dtype=source.dtype, device=device)
        except torch.OutOfMemoryError as error:
            copied = sum(tensor.nbytes for tensor in self._copies.values())
            self._copies.clear()  # the trainer may need their memory
            raise WeightsError(
                f"{device} has no room for a copy of the tensor {name!r} ({source.nbytes} bytes, of {source.device}) "
                f"beside {copied} bytes of others: lower the engines' gpu_memory_utilization, or use the transport "
                "broadcast. Contiguous tensors on an engine's own GPU need no copy"
            ) from error


def _part(device: torch.device, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return `blocks`, `[handle, bytes]` per allocation, and `places`, `[block, offset]` per tensor."""
    numbers: dict[int, int] = {}
    blocks: list[list[str | int]] = []
    places: list[list[int]] = []
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # another process's stream does not wait for ours
        for tensor in tensors:
            if tensor.numel() == 0:
                places.append([0, 0])
                continue
            start, size = block_of(tensor.data_ptr())
            if start not in numbers:
                numbers[start] = len(blocks)
                blocks.append([base64.b64encode(handle_of(start)).decode(), size])
            places.append([numbers[start], tensor.data_ptr() - start])
    return {"blocks": blocks, "places": places}


def _indexed(device: torch.device) -> torch.device:
    """Add the index: `cuda` is the same device as `cuda:0`, but compares unequal."""
    if device.type != "cuda":
        raise WeightsError(f"the transport cuda_ipc shows memory of GPUs, not of {device}")
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


class IpcSource(Source):
    """Maps the trainer's allocations in `prepare`, and keeps them mapped while the trainer shows the same ones."""

    compares = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._mapped: Mapped | None = None

    def prepare(self, manifest: WeightManifest) -> None:
        """Map new allocations, and compare the sum of every tensor with the sender's."""
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
        del place
        part = self._part(manifest)
        mapped = self._map(part)
        with mapped.lock:  # if the trainer ends now, its memory stays mapped until the lock is released
            views = list(self._views(manifest, mapped, part))
            yield from zip(manifest.tensors, views, strict=True)
            found = device_sums(views)
        for entry, value in zip(manifest.tensors, found, strict=True):
            if value != entry.checksum:
                raise TransferError(f"tensor {entry.name!r} was changed by the trainer while the engine loaded it")

    def _part(self, manifest: WeightManifest) -> dict[str, Any]:
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
    """Allocations that another process lends on one device. Hold `lock` while using views: a lease may end."""

    def __init__(self, lease: str, blocks: list[tuple[bytes, int]], device: torch.device) -> None:
        """Map `blocks`, each with handle and bytes. WeightsError: they are not lent."""
        self.lock = threading.Lock()
        self._of = (lease, blocks)
        self._device = device
        self._starts: list[int] = []
        self._closed = False
        borrow(lease, self.close)  # first, because only the lease's error can say that the trainer has ended
        try:
            with self.lock, torch.cuda.device(device):
                torch.cuda.synchronize()  # binds the device's context to this thread
                for handle, _ in blocks:
                    self._starts.append(open_handle(handle))
        except WeightsError:
            self.close()
            raise

    def is_of(self, lease: str, blocks: list[tuple[bytes, int]]) -> bool:
        return not self._closed and self._of == (lease, blocks)

    def view(self, entry: TensorEntry, block: int, offset: int) -> torch.Tensor:
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
        """Unmap once the device has finished reading. A second call is harmless."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            with torch.cuda.device(self._device):
                torch.cuda.synchronize()
                for start in self._starts:
                    close_handle(start)


class _Memory:
    """Device memory that torch reads without a copy, through Numba's array interface."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 2}
