"""The weights of the current version in memory that engines on this host map: the store and its transport.

The bytes lie in a memfd, a file without a name: engines open it through `/proc/PID/fd/N` of this process. When this
process ends, by any signal, and the engines have unmapped it, the kernel frees it; there is no name to clean up.

Two buffers take turns, so that a version can be written while the one before it is still being read, and a joining
engine can always be given the current one.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.errors import StateError, WeightsError
from penstock.weights.manifest import WeightManifest

if TYPE_CHECKING:
    import torch

TRANSPORT = "shared_memory"
_STORE_FILE = re.compile(r"/proc/\d+/fd/\d+")


class SharedMemoryStore:
    """Holds the current version's bytes. `publish` is blocking; one caller at a time."""

    def __init__(self) -> None:
        self.current: WeightManifest | None = None
        self._buffers: list[_Buffer] = [_Buffer("penstock-weights-0"), _Buffer("penstock-weights-1")]
        self._adopted: dict[str, int] = {}
        """Path to descriptor of files that another process published."""

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        """Copy the tensors into the buffer that is not current and describe them.

        Args:
            version: what they will be served under; `current` changes only when `commit` is called.
            named_tensors: `(checkpoint name, tensor)`; any device, dense.

        Raises:
            WeightsError: a name twice, no tensor at all, a dtype no engine loads, NaN or infinity.
            StateError: the store is closed.
        """
        from penstock.weights.pack import checked, layout, write  # noqa: PLC0415 - the core must import without torch

        tensors = list(checked(named_tensors))
        size, offsets = layout(tensors)
        buffer = self._buffers[0] if self._holds_current(self._buffers[1]) else self._buffers[1]
        view = buffer.resize(size)
        entries = write(view, tensors, offsets)
        return WeightManifest(version=version, transport=TRANSPORT, location={"path": buffer.path}, tensors=entries)

    def adopt(self, manifest: WeightManifest) -> WeightManifest:
        """Keep a version that another process of this user published, also when that process ends; no byte is copied.

        Returns:
            The manifest with the place where engines find it from now on, for `commit`.

        Raises:
            WeightsError: it is no store's file, is gone, or is shorter than the manifest says.
            StateError: the store is closed.
        """
        path = manifest.location.get("path", "")
        if manifest.transport != TRANSPORT or not _STORE_FILE.fullmatch(path):
            raise WeightsError(f"weights of the transport {manifest.transport!r} at {path!r} cannot be adopted")
        self._buffers[0].check_open()
        self._let_go(but=self.current.location.get("path") if self.current is not None else None)
        fd = _open_store(path)
        if (size := os.fstat(fd).st_size) < manifest.extent:
            os.close(fd)
            raise WeightsError(f"the weights at {path} are {size} bytes, the manifest needs {manifest.extent}")
        ours = f"/proc/{os.getpid()}/fd/{fd}"
        self._adopted[ours] = fd
        return replace(manifest, location={"path": ours})

    def commit(self, manifest: WeightManifest) -> None:
        """Make a published version the current one: its bytes stay until the one after the next is published."""
        self.current = manifest
        self._let_go(but=manifest.location.get("path"))

    def close(self) -> None:
        """Free the memory. Who still looks at it, an engine or a view in this process, keeps it until it lets go."""
        self.current = None
        self._let_go()
        for buffer in self._buffers:
            buffer.close()

    def _let_go(self, but: str | None = None) -> None:
        for path in [path for path in self._adopted if path != but]:
            os.close(self._adopted.pop(path))

    def _holds_current(self, buffer: _Buffer) -> bool:
        return self.current is not None and self.current.location.get("path") == buffer.path


class _Buffer:
    """One memfd and our mapping of it.

    A mapping that is not needed any more is dropped and not closed: closing it is an error while a view of it lives,
    as one does in the traceback of an exception that somebody keeps. Dropped, it ends with its last view.
    """

    def __init__(self, name: str) -> None:
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC)
        self._map: mmap.mmap | None = None

    @property
    def path(self) -> str:
        """Where another process of the same user finds it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def check_open(self) -> None:
        """Raise StateError after `close`."""
        if self._fd < 0:
            raise StateError("the store of weights is closed: its fleet or engine was torn down")

    def resize(self, size: int) -> memoryview:
        """A writable view of at least `size` bytes. It never shrinks: an engine may still map what was there."""
        self.check_open()
        if self._map is None or len(self._map) < size:
            os.ftruncate(self._fd, size)
            self._map = mmap.mmap(self._fd, size)
        return memoryview(self._map)

    def close(self) -> None:
        """Let go of mapping and file; closing twice is harmless."""
        self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_mapping(path: str, nbytes: int) -> mmap.mmap:
    """Map the store's file read-only, in another process.

    Raises:
        WeightsError: the file is gone (the store's process ended) or shorter than the manifest says.
    """
    fd = _open_store(path)
    try:
        size = os.fstat(fd).st_size
        if size < nbytes:
            raise WeightsError(f"the weights at {path} are {size} bytes, the manifest needs {nbytes}")
        return mmap.mmap(fd, size, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


def _open_store(path: str) -> int:
    if not _STORE_FILE.fullmatch(path):  # any other file of this host is nobody's weights
        raise WeightsError(f"cannot open the weights at {path!r}: it is no store's file (/proc/PID/fd/N)")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        raise WeightsError(f"cannot open the weights at {path}: it is no file")
    except OSError as error:
        raise WeightsError(
            f"cannot open the weights at {path}: {error.strerror}; the process that published them must be alive, on "
            "this host, and of the same user"
        ) from error
