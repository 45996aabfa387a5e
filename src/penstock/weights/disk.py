"""Versions in a folder that engines see too: the store of the transport `disk`, and its files.

Each version is one safetensors file: eight bytes with the length of a JSON object, the object, then the tensors without
gaps (https://github.com/huggingface/safetensors, "Format"). A file gets its name when it is whole and on the disk, and
names are never used again. Two versions are kept: the current one, and the one before it, which an engine may still
read. The writer holds a lock, so that two trainers given one folder do not remove each other's versions.
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
import re
import secrets
import stat
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from penstock.errors import StateError, WeightsError
from penstock.parsing import parse_json
from penstock.types import TensorSpec
from penstock.weights.manifest import ALIGNMENT, DTYPE_BYTES, TensorEntry, WeightManifest

if TYPE_CHECKING:
    import torch

    from penstock.weights.pack import Place

TRANSPORT = "disk"
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
    "bool": "BOOL",
}  # fmt: skip
"""Dtypes by torch's name, as the format has them."""

_FILE = re.compile(r"v\d+-[0-9a-f]{8}\.(safetensors|delta)")
_PART = re.compile(rf"({_FILE.pattern}|current\.json)(\.[0-9a-f]{{8}})?\.part")
_INDEX = "current.json"
_LOCK = "lock"
logger = logging.getLogger(__name__)


class VersionFolder:
    """The writer's side of a folder of versions."""

    def __init__(self, path: str | Path) -> None:
        """Note the path. Nothing is made, locked or changed before `own`."""
        self.path = Path(path).absolute()
        self._lock: int | None = None
        self._closed = False

    @property
    def owned(self) -> bool:
        """Whether this object holds the lock."""
        return self._lock is not None

    def own(self) -> None:
        """Make the folder and take its lock, until `close`.

        Raises:
            StateError: another store has it, or this one is closed.
            WeightsError: the folder cannot be written to.
        """
        if self._closed:
            raise StateError("the store of weights is closed: its fleet or engine was torn down")
        if self._lock is not None:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise WeightsError(f"cannot keep weights in {self.path}: {error.strerror}; give another folder") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise StateError(
                f"another store keeps its weights in {self.path}; end it, or give another folder"
            ) from error
        self._lock = fd

    @contextmanager
    def new_file(self, version: int, suffix: str, nbytes: int) -> Generator[tuple[str, BinaryIO]]:
        """Give a new file's name, and the file, open for reading and writing.

        The file has the name at the end of the block, durably; after an error nothing is left of it.

        Args:
            version: for the name.
            suffix: `safetensors` or `delta`.
            nbytes: are reserved.

        Raises:
            WeightsError: there is not so much space, or the disk fails.
        """
        name = f"v{version}-{secrets.token_hex(4)}.{suffix}"
        free = os.statvfs(self.path)
        if (space := free.f_bavail * free.f_frsize) < nbytes:
            raise WeightsError(
                f"weight version {version} needs {nbytes} bytes in {self.path}, {space} are free: free space, or give "
                "another folder"
            )
        try:
            with self._atomically(name) as file:
                if nbytes:
                    os.posix_fallocate(file.fileno(), 0, nbytes)  # a full disk would end a process that maps the file
                yield name, file
        except OSError as error:
            raise WeightsError(f"cannot write weight version {version} to {self.path}: {error.strerror}") from error

    def keep(self, names: Collection[str]) -> None:
        """Remove every version's file but these, and what a process left that died while it wrote.

        Raises:
            WeightsError: the folder is gone, or nothing can be removed from it.
        """
        try:
            for file in self.path.iterdir():
                if _PART.fullmatch(file.name) or (_FILE.fullmatch(file.name) and file.name not in names):
                    file.unlink(missing_ok=True)
        except OSError as error:
            raise WeightsError(
                f"cannot keep weights in {self.path} any more: {error.strerror}; bring the folder back, or give another"
            ) from error

    def remember(self, manifest: WeightManifest) -> None:
        """Note which version is the current one."""
        with self._atomically(_INDEX) as file:
            file.write(json.dumps(manifest.to_json()).encode())

    def remembered(self) -> WeightManifest | None:
        """Return the version noted last, by whatever process; None where there is no note, or a malformed one."""
        try:
            data = (self.path / _INDEX).read_bytes()
            manifest = WeightManifest.from_json(parse_json(data, _INDEX, WeightsError))
        except (OSError, WeightsError):
            return None
        return replace(manifest, location={**manifest.location, "folder": str(self.path)})  # it may have been moved

    def close(self) -> None:
        """Give the lock back; the files stay. Closing twice is harmless."""
        self._closed = True
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @contextmanager
    def _atomically(self, name: str) -> Generator[BinaryIO]:
        # A random name, opened exclusively: another user of the folder may have put a link under one that can be known.
        part = self.path / f"{name}.{secrets.token_hex(4)}.part"
        try:
            with part.open("x+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            part.rename(self.path / name)
        finally:
            part.unlink(missing_ok=True)
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class VersionFile:
    """A version's file, open for reading on any host that has the folder; close it, or use it in a `with`.

    It is read and not mapped: the reader of a mapping whose file shrinks is killed by SIGBUS.
    """

    def __init__(self, folder: str, name: str, nbytes: int) -> None:
        """Open it. WeightsError: it is not there, or shorter than `nbytes`."""
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
        """Fill `target` with what lies from `offset` on. WeightsError: the file has shrunk, or its disk fails."""
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
        """Read so many bytes into memory of their own; raises as `read_into`."""
        data = memoryview(bytearray(nbytes))
        self.read_into(data, offset)
        return data

    def close(self) -> None:
        """Close it."""
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DiskStore:
    """Keeps versions in a folder. `publish` is blocking; one caller at a time."""

    transport = TRANSPORT

    def __init__(self, folder: str | Path) -> None:
        """Open a folder; the version that an earlier store committed there is `current` again."""
        self._folder = VersionFolder(folder)
        self._before: WeightManifest | None = None
        self.current: WeightManifest | None = None
        found = self._folder.remembered()
        if found is not None and found.transport == self.transport:
            try:
                self._check(found)
            except WeightsError as error:
                logger.warning("weight version %d is not taken up again: %s", found.version, error)
            else:
                self.current = found

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        """Write the tensors to a new file and describe them.

        Args:
            version: what they will be served under; `current` changes only when `commit` is called.
            named_tensors: `(checkpoint name, tensor)`; any device, dense.

        Raises:
            WeightsError: a name twice, no tensor at all, a dtype no engine loads, NaN or infinity, too little space.
            StateError: the store is closed, or another one keeps its versions in this folder.
        """
        from penstock.weights.pack import write  # noqa: PLC0415 - the core must import without torch

        self._folder.own()
        tensors, specs = in_order(named_tensors)
        head, offsets = header(specs)
        size = len(head) + sum(TensorEntry(spec.name, spec.dtype, spec.shape, 0, 0).nbytes for spec in specs)
        self._folder.keep(self._names(self.current))
        with self._folder.new_file(version, "safetensors", size) as (name, file):
            mapping = mmap.mmap(file.fileno(), size)
            mapping[: len(head)] = head
            entries = write(memoryview(mapping), tensors, specs, offsets)
            mapping.flush()
        location = {"folder": str(self._folder.path), "file": name}
        return WeightManifest(version=version, transport=TRANSPORT, location=location, tensors=entries)

    def adopt(self, manifest: WeightManifest) -> WeightManifest:
        """Take a version that another process wrote, to this folder or another; no byte is copied.

        Raises:
            WeightsError: it is of another transport, or a file of it is gone, too short or damaged.
        """
        if manifest.transport != self.transport:
            raise WeightsError(
                f"weights of the transport {manifest.transport!r} cannot be adopted by a store of {self.transport!r}"
            )
        self._check(manifest)
        return manifest

    def commit(self, manifest: WeightManifest) -> None:
        """Make a published version the current one: its file stays until the one after the next is committed."""
        self._before, self.current = self.current, manifest
        if self._folder.owned:
            self._folder.remember(manifest)
            self._folder.keep(self._names(self.current) | self._names(self._before))

    def close(self) -> None:
        """Leave the folder to another store; the versions stay in it."""
        self.current = None
        self._folder.close()

    def _check(self, manifest: WeightManifest) -> None:
        """Raise WeightsError where a file of a version is not there."""
        open_version(manifest).close()

    def _names(self, manifest: WeightManifest | None) -> set[str]:
        """Names of the files of a version."""
        return set() if manifest is None else {manifest.location.get("file", "")}


def open_version(manifest: WeightManifest) -> VersionFile:
    """Open the file of a version. WeightsError: it is gone, or too short."""
    return VersionFile(manifest.location.get("folder", ""), manifest.location.get("file", ""), manifest.extent)


def check_file(manifest: WeightManifest) -> WeightManifest:
    """Read every byte in the engine's core. WeightsError: they are gone, not those that were sent, or not finite."""
    from penstock.weights.pack import check_tensors  # noqa: PLC0415 - the core must import without torch

    with open_version(manifest) as file:
        check_tensors(manifest.tensors, lambda entry: file.read(entry.offset, entry.nbytes))
    return manifest


class DiskSource:
    """A worker's side: it reads the file, whose bytes the core has checked."""

    compares = False

    def __init__(self, device: torch.device) -> None:
        del device

    def prepare(self, manifest: WeightManifest) -> None:
        """Open the file: a worker may be on another host than the core."""
        open_version(manifest).close()

    def tensors(self, manifest: WeightManifest, place: Place) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """Yield all tensors in one memory, as large as the largest."""
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
    """Return the tensors, and what a file's header says of them in the order in which it has them.

    Raises:
        WeightsError: a name twice, no tensor at all, or a dtype no engine loads.
    """
    from penstock.weights.pack import described  # noqa: PLC0415 - the core must import without torch

    tensors, specs = described(named_tensors)
    return tensors, sorted(specs, key=lambda spec: -DTYPE_BYTES[spec.dtype])


def header(specs: Sequence[TensorSpec]) -> tuple[bytes, list[int]]:
    """Return the bytes before the first tensor, and each tensor's offset from the start of the file.

    Args:
        specs: in the order they lie; of descending element size, so that each is aligned to its own.
    """
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: list[int] = []
    end = 0
    for spec in specs:
        begin, end = end, end + TensorEntry(spec.name, spec.dtype, spec.shape, 0, 0).nbytes
        fields[spec.name] = {"dtype": DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
        offsets.append(begin)
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)  # the format lets spaces follow the object
    start = len(text) + 8
    return len(text).to_bytes(8, "little") + text, [start + offset for offset in offsets]
