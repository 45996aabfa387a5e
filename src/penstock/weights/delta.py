"""Versions in a folder as deltas: the differences from the last version that was written whole.

An engine reads at most two files, whichever version it has. When a delta has grown to a part of the whole, the next
version is written whole. A delta file has one zstd frame per changed chunk of a tensor. The frame has one bit per
element, which marks changed elements, and then the exclusive or of old and new for those elements. Bytes of equal
significance lie together, because a training step changes few high bits.

    frame, frame, ..., JSON [[tensor, chunk, bytes of its frame], ...], length of the JSON (8 bytes)
"""

from __future__ import annotations

import importlib
import mmap
import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, BinaryIO

import orjson

from penstock.checks import parse_json, reading, whole_number
from penstock.control_types import TensorSpec
from penstock.errors import WeightsError
from penstock.weights import shared_memory
from penstock.weights.disk import DiskStore, VersionFile, in_order, open_version
from penstock.weights.manifest import DTYPE_BYTES, TensorEntry, WeightManifest

if TYPE_CHECKING:
    import torch

TRANSPORT = "delta"
WHOLE_FROM = 1 / 4
"""Largest share of the whole's bytes for a delta. After a larger one, the next version is written whole."""
CHUNK = 4 * 2**20
"""Number of elements that are compared at once and compressed as one frame."""
LEVEL = 1
"""Compression level of zstd. Higher levels save a few percent and take several times as long."""


class DeltaStore(DiskStore):
    """Keeps a whole version in a folder, and the deltas to it of the current version and the one before."""

    transport = TRANSPORT

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        """Write a delta or a whole version; see `DiskStore.publish`."""
        from penstock.weights.pack import write  # noqa: PLC0415 - the core must import without torch

        zstd()
        tensors, specs = in_order(named_tensors)
        base = self._base(specs)
        if base is None:
            whole = super().publish(version, tensors if isinstance(tensors, list) else named_tensors)
            none = {"delta": "", "delta_bytes": "0", "delta_checksum": "0"}
            return replace(whole, transport=TRANSPORT, location={**whole.location, **none})
        self._own()
        self.keep(self._names(base))
        image = memoryview(mmap.mmap(-1, base.extent))
        entries = write(image, tensors, specs, [entry.offset for entry in base.tensors])
        with open_version(base) as full, self._new_file(version, "delta", 0) as (name, file):
            nbytes, checksum = write_delta(file, full.read, image, entries)
        delta = {"delta": name, "delta_bytes": str(nbytes), "delta_checksum": str(checksum)}
        return WeightManifest(version, TRANSPORT, {**base.location, **delta}, entries)

    def _base(self, specs: Sequence[TensorSpec]) -> WeightManifest | None:
        """Return the current version; None if a whole file is due."""
        current = self.current
        if current is None or current.location.get("folder") != str(self.folder):
            return None
        try:
            open_version(current).close()
        except WeightsError:  # the file was removed
            return None
        same = [TensorSpec(e.name, e.dtype, e.shape) for e in current.tensors] == list(specs)
        return current if same and int(current.location["delta_bytes"]) <= WHOLE_FROM * current.extent else None

    def _check(self, manifest: WeightManifest) -> None:
        super()._check(manifest)
        read_delta(manifest)

    def _names(self, manifest: WeightManifest | None) -> set[str]:
        return super()._names(manifest) | ({manifest.location["delta"]} if manifest is not None else set())


def read_delta(manifest: WeightManifest) -> memoryview | None:
    """Read a version's delta; None if the whole file is that version."""
    where = manifest.location
    with reading("weight manifest", WeightsError):
        name, nbytes, checksum = where["delta"], int(where["delta_bytes"]), int(where["delta_checksum"])
    if not name:
        return None
    with VersionFile(where.get("folder", ""), name, nbytes) as file:
        data = file.read(0, nbytes)
    if (found := zlib.crc32(data)) != checksum:
        raise WeightsError(f"the delta {name} has the checksum {found:08x}, not {checksum:08x}: it was damaged")
    return data


def write_delta(
    file: BinaryIO, old: Callable[[int, int], memoryview], new: memoryview, entries: Sequence[TensorEntry]
) -> tuple[int, int]:
    """Write the differences of two versions with tensors at the same offsets.

    `old(offset, nbytes)` reads the base. Returns the bytes of the file, and their CRC-32.
    """
    size = checksum = 0
    frames: list[tuple[int, int, int]] = []

    def append(data: bytes) -> None:
        nonlocal size, checksum
        size, checksum = size + file.write(data), zlib.crc32(data, checksum)

    def encoded(entry: TensorEntry, index: int) -> bytes:
        part = _chunk(new, entry, index)
        start = entry.offset + index * CHUNK * part.itemsize
        return _encode(_chunk(old(start, part.nbytes), replace(entry, offset=0, shape=(len(part),)), 0), part)

    with ThreadPoolExecutor(_threads()) as pool:
        for number, entry in enumerate(entries):
            for index, frame in enumerate(pool.map(partial(encoded, entry), range(-(-_count(entry) // CHUNK)))):
                if frame:
                    frames.append((number, index, len(frame)))
                    append(frame)
    footer = orjson.dumps(frames)
    append(footer + len(footer).to_bytes(8, "little"))
    return size, checksum


def apply_delta(data: memoryview, buffer: memoryview, entries: Sequence[TensorEntry]) -> set[int]:
    """Turn the base in the writable `buffer` into the new version. A second call undoes the first.

    Returns:
        The numbers of the changed tensors.

    Raises:
        WeightsError: the file is malformed. Then `buffer` may hold no version at all.
    """
    length = int.from_bytes(data[-8:], "little")
    with reading("delta", WeightsError):
        rows = parse_json(data[max(0, len(data) - 8 - length) : -8], "malformed delta: its footer", WeightsError)
        frames = [(_number(tensor), _number(chunk), _number(nbytes)) for tensor, chunk, nbytes in rows]
    if sum(nbytes for _, _, nbytes in frames) + length + 8 != len(data):
        raise WeightsError(f"malformed delta: its frames are not what its {len(data)} bytes hold")
    if sorted({(tensor, chunk) for tensor, chunk, _ in frames}) != [(tensor, chunk) for tensor, chunk, _ in frames]:
        raise WeightsError("malformed delta: its chunks are not in order")

    def pieces() -> Iterator[tuple[Any, memoryview]]:
        begin = 0
        for tensor, chunk, nbytes in frames:
            if tensor >= len(entries) or chunk * CHUNK >= _count(entries[tensor]):
                raise WeightsError(f"malformed delta: there is no chunk {chunk} of tensor {tensor}")
            yield _chunk(buffer, entries[tensor], chunk), data[begin : begin + nbytes]
            begin += nbytes

    with ThreadPoolExecutor(_threads()) as pool:
        for _ in pool.map(_decode, *zip(*pieces(), strict=True)) if frames else ():
            pass
    return {tensor for tensor, _, _ in frames}


def _encode(old: Any, new: Any) -> bytes:
    """Return the frame of a chunk; empty if no element differs."""
    import numpy as np  # noqa: PLC0415 - not a core dependency

    differing = old ^ new
    mask = differing != 0
    if not mask.any():
        return b""
    planes = differing[mask].view(np.uint8).reshape(-1, differing.itemsize).T
    return zstd().compress(np.packbits(mask).tobytes() + np.ascontiguousarray(planes).tobytes(), LEVEL)


def _decode(part: Any, frame: memoryview) -> None:
    """Apply a frame to a chunk in place."""
    import numpy as np  # noqa: PLC0415 - not a core dependency

    size, bits = part.itemsize, -(-len(part) // 8)
    data = np.frombuffer(_decompressed(frame, bits + size * len(part)), np.uint8)
    mask = np.unpackbits(data[:bits], count=len(part)).view(bool) if len(data) > bits else np.zeros(0, bool)
    changed = int(np.count_nonzero(mask))
    if not changed or len(data) != bits + size * changed:
        raise WeightsError(f"malformed delta: a frame of {len(data)} bytes is not of {len(part)} elements")
    part[mask] ^= np.ascontiguousarray(data[bits:].reshape(size, changed).T).view(part.dtype).reshape(-1)


def _decompressed(frame: memoryview, most: int) -> bytes:
    """Read one zstd frame. Refuse more than `most` bytes before allocating."""
    decoder = zstd().ZstdDecompressor()
    try:
        nbytes = zstd().get_frame_info(frame).decompressed_size
        data = decoder.decompress(frame, max_length=nbytes) if nbytes is not None and nbytes <= most else b""
    except zstd().ZstdError as error:
        raise WeightsError(f"malformed delta: {error}") from error
    if not decoder.eof or decoder.unused_data:
        raise WeightsError(f"malformed delta: a frame is not one of at most {most} bytes")
    return data


def _chunk(buffer: memoryview, entry: TensorEntry, index: int) -> Any:
    """Return a chunk of a tensor as unsigned integers, `[at most CHUNK]`, no copy."""
    import numpy as np  # noqa: PLC0415 - not a core dependency

    size = DTYPE_BYTES[entry.dtype]
    count = min(CHUNK, _count(entry) - index * CHUNK)
    return np.frombuffer(buffer, f"<u{size}", count, entry.offset + index * CHUNK * size)


def _count(entry: TensorEntry) -> int:
    return entry.nbytes // DTYPE_BYTES[entry.dtype]


def _number(value: Any) -> int:
    return whole_number(value, "malformed delta: each number of its footer", error=WeightsError)


def _threads() -> int:
    return max(1, min(8, len(os.sched_getaffinity(0)) // 2))  # other work needs the other half


class DeltaBase:
    """The engine's side: a whole version in sealed memory that workers map, with at most one delta applied."""

    def __init__(self) -> None:
        self._fd = -1
        self._image: mmap.mmap | None = None
        self._full = ""
        """Name of the whole file that the image comes from. Empty while the image holds no version."""
        self._undo: Callable[[], object] = lambda: None
        """Turns the image back into the whole version. A delta is its own inverse."""
        self._changed: set[int] = set()
        """Numbers of the tensors in which the image differs from the whole version."""
        self._lock = threading.Lock()

    def bring(self, manifest: WeightManifest) -> WeightManifest:
        """Turn the image into a version. Return the manifest for shared memory.

        Raises:
            WeightsError: a file is gone or damaged, or a resulting tensor has a wrong checksum or is not finite.
        """
        with self._lock:
            self._make(manifest)
        location = {"path": shared_memory.path_of(self._fd)}
        return replace(manifest, transport=shared_memory.TRANSPORT, location=location)

    def _make(self, manifest: WeightManifest) -> None:
        from penstock.weights.pack import check_tensors  # noqa: PLC0415 - the core must import without torch

        entries, delta, full = manifest.tensors, read_delta(manifest), manifest.location.get("file", "")
        base, self._full = self._full, ""  # after an error the image holds no version
        if self._image is not None and base == full and manifest.extent <= len(self._image):
            unchecked = self._changed
            self._undo()
        else:
            unchecked = set(range(len(entries)))
            self._image = self._load(manifest)
        image = memoryview(self._image)
        self._undo, self._changed = lambda: None, set()
        if delta is not None:
            self._undo = partial(apply_delta, delta, image, entries)
            self._changed = self._undo()
        check_tensors(
            [entries[number] for number in sorted(unchecked | self._changed)],
            lambda entry: image[entry.offset : entry.offset + entry.nbytes],
        )
        self._full = full

    def _load(self, manifest: WeightManifest) -> mmap.mmap:
        extent = max(manifest.extent, 1)
        with open_version(manifest) as file:
            if self._image is None or len(self._image) != extent:
                before = self._fd  # stays ours if there is no memory for a new image
                self._fd, self._image = shared_memory.sealed_memory("penstock-delta-base", extent)
                if before >= 0:
                    os.close(before)
            file.read_into(memoryview(self._image), 0)
        return self._image


bring = DeltaBase().bring
"""Brings this process's image to a version; see `DeltaBase.bring`."""


@cache
def zstd() -> Any:
    """Import zstd: Python's from 3.14 on, else a package. WeightsError: missing."""
    try:
        return importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    except ImportError as error:
        raise WeightsError("the transport delta needs zstd: pip install 'penstock[delta]', or use disk") from error
