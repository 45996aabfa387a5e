"""The weights of the current version in memory that engines on this host map: the store and its transport.

The bytes lie in a memfd, a file without a name: engines open it through `/proc/PID/fd/N` of this process. When this
process ends, by any signal, and the engines have unmapped it, the kernel frees it; there is no name to clean up.

Two buffers take turns, so that a version can be written while the one before it is still being read, and a joining
engine can always be given the current one.
"""

from __future__ import annotations

import fcntl
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
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
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
        entries = write(buffer.resize(size), tensors, offsets)
        location = {"path": str(buffer.path)}
        return WeightManifest(version=version, transport=TRANSPORT, location=location, tensors=entries)

    def adopt(self, manifest: WeightManifest) -> WeightManifest:
        """Keep a version that another process of this user published, also when that process ends; no byte is copied.

        Returns:
            The manifest with the place where engines find it from now on, for `commit`.

        Raises:
            WeightsError: it is no store's file, is gone, is shorter than the manifest says, or is not sealed.
            StateError: the store is closed.
        """
        path = manifest.location.get("path", "")
        if manifest.transport != TRANSPORT or not _STORE_FILE.fullmatch(path):
            raise WeightsError(f"weights of the transport {manifest.transport!r} at {path!r} cannot be adopted")
        self._buffers[0].check_open()
        self._let_go(but=self.current.location.get("path") if self.current is not None else None)
        fd = _open_store(path, manifest.extent)
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
        self._name = name
        self._fd: int | None = None
        self._map: mmap.mmap | None = None
        self._closed = False

    @property
    def path(self) -> str | None:
        """Where another process of the same user finds it; None while nothing was written."""
        return None if self._fd is None else f"/proc/{os.getpid()}/fd/{self._fd}"

    def check_open(self) -> None:
        """Raise StateError after `close`."""
        if self._closed:
            raise StateError("the store of weights is closed: its fleet or engine was torn down")

    def resize(self, size: int) -> memoryview:
        """A writable view of at least `size` bytes. A larger version gets a file of its own: none changes its size."""
        self.check_open()
        if self._map is None or len(self._map) < size:
            self._free()
            self._fd, self._map = sealed_memory(self._name, size)
        return memoryview(self._map)

    def close(self) -> None:
        """Let go of mapping and file; closing twice is harmless."""
        self._closed = True
        self._free()

    def _free(self) -> None:
        self._map = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def sealed_memory(name: str, size: int) -> tuple[int, mmap.mmap]:
    """A memfd of `size` bytes that nobody can shrink or grow, and a writable mapping of it.

    A reader of a mapped file that shrinks is killed by SIGBUS; `open_mapping` maps sealed files only.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        return fd, mmap.mmap(fd, size)
    except BaseException:
        os.close(fd)
        raise


def open_mapping(path: str, nbytes: int) -> mmap.mmap:
    """Map the store's file read-only, in another process.

    Raises:
        WeightsError: the file is gone (the store's process ended), shorter than the manifest says, or not sealed.
    """
    fd = _open_store(path, nbytes)
    try:
        return mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


def _open_store(path: str, nbytes: int) -> int:
    """A descriptor of a file whose size cannot change. WeightsError: it is not one of `nbytes` bytes or more."""
    if not _STORE_FILE.fullmatch(path):  # any other file of this host is nobody's weights
        raise WeightsError(f"cannot open the weights at {path!r}: it is no store's file (/proc/PID/fd/N)")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise WeightsError(
            f"cannot open the weights at {path}: {error.strerror}; the process that published them must be alive, on "
            "this host, and of the same user"
        ) from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        why = "it is no file"
    elif not _is_sealed(fd):
        why = "the file is not sealed, so its size could change"
    elif found.st_size < max(nbytes, 1):
        why = f"they are {found.st_size} bytes, the manifest needs {nbytes}"
    else:
        return fd
    os.close(fd)
    raise WeightsError(f"cannot open the weights at {path}: {why}")


def _is_sealed(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:  # a file of a file system that knows no seals
        return False
