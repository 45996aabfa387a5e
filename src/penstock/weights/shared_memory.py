"""The transport `shared_memory`: engines on this host map the memory of the current version.

The bytes lie in a memfd, a file without a name. Engines open it through `/proc/PID/fd/N` of this process. The kernel
frees it once this process has ended, by any signal, and the engines have unmapped it. There is no name to clean up.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.errors import WeightsError
from penstock.weights.manifest import Source, Store, TensorEntry, WeightManifest

if TYPE_CHECKING:
    import torch

    from penstock.weights.manifest import Place

TRANSPORT = "shared_memory"
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_STORE_FILE = re.compile(r"/proc/\d+/fd/\d+")


class SharedMemoryStore(Store):
    """Holds the current version's bytes.

    Two buffers alternate. So the store can write a version while engines still read the one before, and a joining
    engine can always get the current one.
    """

    transport = TRANSPORT

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        """Descriptors by path: of our buffers, and of files that another process published."""
        self._buffers: dict[str, mmap.mmap] = {}
        """Our writable mappings by path. A mapping is dropped and not closed, because closing fails while a view of it
        lives, for example in the traceback of a kept exception. It ends with its last view."""

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        """Copy and describe the tensors in the other buffer; see `Store.publish`."""
        from penstock.weights.pack import described, layout, write  # noqa: PLC0415 - the core must import without torch

        tensors, specs = described(named_tensors)
        size, offsets = layout(specs)
        path = self._writable(size)
        entries = write(memoryview(self._buffers[path]), tensors, specs, offsets)
        return WeightManifest(version, TRANSPORT, {"path": path}, entries)

    def adopt(self, manifest: WeightManifest) -> WeightManifest:
        """Keep a version that another process of this user published, beyond its end. No byte is copied.

        Raises:
            WeightsError: the file is not a store's, is gone, is shorter than the manifest says, or is not sealed.
            StateError: the store is closed.
        """
        super().adopt(manifest)
        self.check_open()
        self._free_adopted()
        fd = adopted_file(manifest.location.get("path", ""), manifest.extent)
        ours = path_of(fd)
        self._files[ours] = fd
        return replace(manifest, location={"path": ours})

    def commit(self, manifest: WeightManifest) -> None:
        """Make a published version the current one. Its bytes stay until a `publish` after the next commit."""
        self.current = manifest
        self._free_adopted()

    def close(self) -> None:
        """Free the memory. An engine or a view in this process keeps its mapping."""
        super().close()
        self.current = None
        for path in tuple(self._files):
            self._free(path)

    def _writable(self, size: int) -> str:
        """Return the path of a buffer of at least `size` bytes, but not the current one. Buffers are never resized."""
        self.check_open()
        for path, buffer in tuple(self._buffers.items()):
            if path != self._current_path:
                if len(buffer) >= size:
                    return path
                self._free(path)
        fd, buffer = sealed_memory("penstock-weights", size)
        path = path_of(fd)
        self._files[path], self._buffers[path] = fd, buffer
        return path

    def _free_adopted(self) -> None:
        for path in self._files.keys() - self._buffers.keys() - {self._current_path}:
            self._free(path)

    def _free(self, path: str) -> None:
        self._buffers.pop(path, None)
        os.close(self._files.pop(path))

    @property
    def _current_path(self) -> str:
        return "" if self.current is None else self.current.location.get("path", "")


def check_mapped(manifest: WeightManifest) -> WeightManifest:
    """Check every byte in the core. WeightsError: gone, changed, or not finite."""
    from penstock.weights.pack import check_tensors  # noqa: PLC0415 - the core must import without torch

    buffer = memoryview(open_mapping(manifest.location.get("path", ""), manifest.extent))
    check_tensors(manifest.tensors, lambda entry: buffer[entry.offset : entry.offset + entry.nbytes])
    return manifest


class SharedMemorySource(Source):
    """A worker's side: views of the file, whose bytes the core has checked."""

    def tensors(self, manifest: WeightManifest, place: Place) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        from penstock.weights.pack import view  # noqa: PLC0415 - the core must import without torch

        del place
        buffer = memoryview(open_mapping(manifest.location["path"], manifest.extent))
        yield from ((entry, view(buffer, entry)) for entry in manifest.tensors)


def sealed_memory(name: str, size: int) -> tuple[int, mmap.mmap]:
    """Create a sealed memfd of `size` bytes, and a writable mapping of it.

    SIGBUS kills a reader of a mapped file that shrinks, so `open_mapping` maps only sealed files.
    """
    with ExitStack() as undo:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        undo.callback(os.close, fd)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            mapping = mmap.mmap(fd, size)
        except OSError as error:
            raise WeightsError(f"no {size} bytes of shared memory (ulimit -f?): {error}") from error
        undo.pop_all()
    return fd, mapping


def path_of(fd: int) -> str:
    """Return the path under which another process of the same user can open a file."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def open_mapping(path: str, nbytes: int) -> mmap.mmap:
    """Map a store's file read-only. Raises as `adopted_file`."""
    fd = adopted_file(path, nbytes)
    try:
        return mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


def adopted_file(path: str, nbytes: int = 0) -> int:
    """Open a store's file. The file lives as long as the descriptor.

    Raises:
        WeightsError: it is not a store's, is gone (its process has ended), is shorter than `nbytes`, or is not sealed.
    """
    if not _STORE_FILE.fullmatch(path):  # no other file of this host holds weights
        raise WeightsError(f"cannot open the weights at {path!r}: it is no store's file (/proc/PID/fd/N)")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise WeightsError(
            f"cannot open the weights at {path}: {error.strerror}; the process that published them must be alive, on "
            "this host, and of the same user"
        ) from error
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:  # it is no file, or one whose file system has no seals
        sealed = False
    if not sealed:
        why = "the file is not sealed, so its size could change"
    elif (size := os.fstat(fd).st_size) < max(nbytes, 1):
        why = f"they are {size} bytes, the manifest needs {nbytes}"
    else:
        return fd
    os.close(fd)
    raise WeightsError(f"cannot open the weights at {path}: {why}")
