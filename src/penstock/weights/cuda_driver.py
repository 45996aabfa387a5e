"""Device memory that another process maps: the CUDA driver's own calls.

torch has the same in `UntypedStorage._share_cuda_`, made for exactly one receiver of each handle: every receiver counts
down a counter that starts at one, so memory shown to two engines, or to none, is never freed by its owner. Bare handles
have no counter; who lends says when it ends (`lease.py`).

Every call needs the device's context on the calling thread: `with torch.cuda.device(d): torch.cuda.synchronize()`.
Calls as in the CUDA Driver API, "Memory Management".
"""

from __future__ import annotations

import ctypes
from functools import cache

from penstock.errors import WeightsError

HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


def block_of(pointer: int) -> tuple[int, int]:
    """Start and bytes of the allocation in which a device pointer lies."""
    start, size = ctypes.c_uint64(), ctypes.c_size_t()
    status = _driver().cuMemGetAddressRange_v2(ctypes.byref(start), ctypes.byref(size), ctypes.c_uint64(pointer))
    if status:
        raise _not_shareable(status)
    return start.value, size.value


def handle_of(start: int) -> bytes:
    """The handle by which another process maps an allocation, 64 bytes."""
    handle = _Handle()
    status = _driver().cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(start))
    if status:
        raise _not_shareable(status)
    return bytes(handle)


def open_handle(handle: bytes) -> int:
    """Map another process's allocation on the current device: where it starts here."""
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
    """Unmap what `open_handle` mapped. Nothing on the device may still read it."""
    status = _driver().cuIpcCloseMemHandle(ctypes.c_uint64(start))
    if status:
        raise WeightsError(f"cannot unmap device memory at {start:#x}: {_why(status)}")


def _not_shareable(status: int) -> WeightsError:
    return WeightsError(
        f"the trainer's device memory cannot be shared ({_why(status)}): memory of expandable segments and of "
        "cudaMallocAsync has no IPC handles; start the trainer without them in PYTORCH_CUDA_ALLOC_CONF, or use another "
        "transport"
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
