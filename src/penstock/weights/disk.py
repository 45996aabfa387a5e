"""The transport `disk`: versions in a folder that engines see too.

Each version is one safetensors file: eight bytes with the length of a JSON object, the object, then the tensors without
gaps (https://github.com/huggingface/safetensors, "Format"). A file gets its name once it is whole and on the disk, and
names are never reused. The store keeps two versions: the current one, and the one before it, which an engine may still
read. The writer holds a lock, so that two trainers with one folder do not remove each other's versions.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import re
import secrets
import stat
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from penstock.control_types import TensorSpec
from penstock.errors import StateError, WeightsError
from penstock.weights.manifest import (
    ALIGNMENT,
    DTYPE_BYTES,
    Source,
    Store,
    TensorEntry,
    WeightManifest,
    entry_of,
)

if TYPE_CHECKING:
    import torch

    from penstock.weights.manifest import Place

TRANSPORT = "disk"
_FILE = re.compile(r"v\d+-[0-9a-f]{8}\.(safetensors|delta)")
_PART = ".part"
"""Suffix of a file that is not whole."""
_LOCK = "lock"
SAFETENSORS: Mapping[str, str] = {
    "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
    "bool": "BOOL",
}  # fmt: skip
"""Safetensors' names of dtypes, by torch's name."""


class DiskStore(Store):
    """Keeps versions in a folder. The store does not touch the folder before the first `publish`."""

    transport = TRANSPORT

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).absolute()
        self._lock: int | None = None
        self._before: WeightManifest | None = None

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        """Write the tensors to a new file and describe them; see `Store.publish`.

        Raises:
            StateError: also if another store keeps its versions in this folder.
        """
        from penstock.weights.pack import write  # noqa: PLC0415 - the core must import without torch

        self._own()
        tensors, specs = in_order(named_tensors)
        head, offsets = header(specs)
        size = len(head) + sum(entry_of(spec).nbytes for spec in specs)
        self.keep(self._names(self.current))
        with self._new_file(version, "safetensors", size) as (name, file):
            mapping = mmap.mmap(file.fileno(), size)
            mapping[: len(head)] = head
            entries = write(memoryview(mapping), tensors, specs, offsets)
            mapping.flush()
        return WeightManifest(version, TRANSPORT, {"folder": str(self.folder), "file": name}, entries)

    def adopt(self, manifest: WeightManifest) -> WeightManifest:
        """Take a version of another process, in any folder. No byte is copied.

        Raises:
            WeightsError: it has another transport, or one of its files is gone, too short or damaged.
        """
        self._check(super().adopt(manifest))
        return manifest

    def commit(self, manifest: WeightManifest) -> None:
        """Make a published version the current one. Its file stays until a `publish` after the next commit."""
        self._before, self.current = self.current, manifest
        if self._lock is not None:
            self.keep(self._names(self.current) | self._names(self._before))

    def close(self) -> None:
        """Release the folder for another store. The versions stay in it."""
        super().close()
        self.current = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def keep(self, names: Collection[str]) -> None:
        """Remove every version's file except `names`, and unfinished files of writers that died.

        Raises:
            WeightsError: the folder is gone, or files cannot be removed.
        """
        try:
            for file in self.folder.iterdir():
                if _FILE.fullmatch(file.name.removesuffix(_PART)) and file.name not in names:
                    file.unlink(missing_ok=True)
        except OSError as error:
            raise WeightsError(
                f"cannot keep weights in {self.folder} any more: {error.strerror}; bring the folder back, or give "
                "another"
            ) from error

    def _own(self) -> None:
        """Create the folder, and take its lock until `close`."""
        self.check_open()
        if self._lock is not None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise WeightsError(
                f"cannot keep weights in {self.folder}: {error.strerror}; give another folder"
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise StateError(
                f"another store keeps its weights in {self.folder}; end it, or give another folder"
            ) from error
        self._lock = fd

    @contextmanager
    def _new_file(self, version: int, suffix: str, nbytes: int) -> Generator[tuple[str, BinaryIO]]:
        """Yield name and file of a new version of `nbytes`, named once it is on disk.

        After an error the file is removed.
        """
        name = f"v{version}-{secrets.token_hex(4)}.{suffix}"
        free = os.statvfs(self.folder)
        if (space := free.f_bavail * free.f_frsize) < nbytes:
            raise WeightsError(
                f"weight version {version} needs {nbytes} bytes in {self.folder}, {space} are free: free space, or "
                "give another folder"
            )
        # Opened exclusively: another user of the folder may have put a link under a predictable name.
        part = self.folder / (name + _PART)
        try:
            with ExitStack() as stack:
                file = stack.enter_context(part.open("x+b"))
                stack.callback(part.unlink, missing_ok=True)
                if nbytes:
                    os.posix_fallocate(file.fileno(), 0, nbytes)  # on a full disk, the mapping would kill the process
                yield name, file
                file.flush()
                os.fsync(file.fileno())
                part.rename(self.folder / name)
                folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, folder)
                os.fsync(folder)
        except OSError as error:
            raise WeightsError(f"cannot write weight version {version} to {self.folder}: {error.strerror}") from error

    def _check(self, manifest: WeightManifest) -> None:
        """Raise WeightsError if a file of a version is missing."""
        open_version(manifest).close()

    def _names(self, manifest: WeightManifest | None) -> set[str]:
        return set() if manifest is None else {manifest.location.get("file", "")}


class VersionFile:
    """A version's file, open for reading on any host that has the folder. Close it, or use it in a `with`.

    The file is read and not mapped, because SIGBUS kills the reader of a mapping whose file shrinks.
    """

    def __init__(self, folder: str, name: str, nbytes: int) -> None:
        """Open the file. WeightsError: it is missing, or shorter than `nbytes`."""
        self._path = Path(folder) / name
        if not folder or not _FILE.fullmatch(name):
            raise WeightsError(f"malformed weight manifest: {str(self._path)!r} is no file of a store of weights")
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise WeightsError(
                f"cannot open the weights at {self._path}: {error.strerror}; trainer and engines must see the folder "
                "under the same path"
            ) from error
        found = os.fstat(self._fd)
        self.size = found.st_size
        if not stat.S_ISREG(found.st_mode) or self.size < max(nbytes, 1):
            self.close()
            raise WeightsError(f"the weights at {self._path} are {self.size} bytes, the manifest needs {nbytes}")

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` from `offset` on. WeightsError: a shrunk file or a failing disk."""
        while len(target):
            try:
                count = os.preadv(self._fd, [target], offset)
            except OSError as error:
                raise WeightsError(f"cannot read the weights at {self._path}: {error.strerror}") from error
            if not count:
                raise WeightsError(
                    f"the weights at {self._path} end at {offset}: the file has shrunk since it was opened"
                )
            target, offset = target[count:], offset + count

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Read `nbytes` bytes into new memory. Raises as `read_into`."""
        data = memoryview(bytearray(nbytes))
        self.read_into(data, offset)
        return data

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_version(manifest: WeightManifest) -> VersionFile:
    """Open the file of a version. WeightsError: it is gone, or too short."""
    return VersionFile(manifest.location.get("folder", ""), manifest.location.get("file", ""), manifest.extent)


def check_file(manifest: WeightManifest) -> WeightManifest:
    """Check every byte in the core. WeightsError: gone, changed, or not finite."""
    from penstock.weights.pack import check_tensors  # noqa: PLC0415 - the core must import without torch

    with open_version(manifest) as file:
        check_tensors(manifest.tensors, lambda entry: file.read(entry.offset, entry.nbytes))
    return manifest


class DiskSource(Source):
    """A worker's side. It reads the file, whose bytes the core has checked."""

    def prepare(self, manifest: WeightManifest) -> None:
        """Check that the file opens here: the core may be on another host."""
        open_version(manifest).close()

    def tensors(self, manifest: WeightManifest, place: Place) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """Yield all tensors in the same memory, which is as large as the largest tensor."""
        from penstock.weights.pack import view  # noqa: PLC0415 - the core must import without torch

        del place
        buffer = memoryview(bytearray(max((entry.nbytes for entry in manifest.tensors), default=0)))
        with open_version(manifest) as file:
            for entry in manifest.tensors:
                part = buffer[: entry.nbytes]
                file.read_into(part, entry.offset)
                yield entry, view(part, replace(entry, offset=0))


def in_order(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
) -> tuple[Iterable[tuple[str, torch.Tensor]], list[TensorSpec]]:
    """Return the tensors, and their specs in the order of a file's header.

    Raises:
        WeightsError: a repeated name, no tensor at all, or a dtype that no engine loads.
    """
    from penstock.weights.pack import described  # noqa: PLC0415 - the core must import without torch

    tensors, specs = described(named_tensors)
    return tensors, sorted(specs, key=lambda spec: -DTYPE_BYTES[spec.dtype])


def header(specs: Sequence[TensorSpec]) -> tuple[bytes, list[int]]:
    """Return the bytes before the first tensor, and each tensor's file offset.

    Args:
        specs: in the order of the file, with descending element size, so that each tensor is aligned to its own.
    """
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: list[int] = []
    end = 0
    for spec in specs:
        begin, end = end, end + entry_of(spec).nbytes
        fields[spec.name] = {"dtype": SAFETENSORS[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
        offsets.append(begin)
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)  # the format allows spaces after the object
    start = len(text) + 8
    return len(text).to_bytes(8, "little") + text, [start + offset for offset in offsets]
