"""The zstd that compresses deltas: Python's own from 3.14 on, before that the same as a package.

Tensors are cut into chunks. Of each that differs the file has the exclusive or of its elements, old with new: of all of
them, or, where few changed, of those, and before them the gaps between their positions. Exclusive or makes unchanged
bits zero, and its bytes are sorted by significance, so that zstd finds them: a step of training changes few high bits.

    chunk, chunk, ..., JSON {"version", "base", "chunks": [[...], ...]}, its length (8 bytes)
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from typing import Any, BinaryIO

import orjson
import torch

from penstock.errors import WeightsError
from penstock.parsing import parse_json, reading, whole_number
from penstock.weights.manifest import TensorEntry
from penstock.weights.pack import view

try:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
except ImportError as error:
    raise WeightsError("the transport delta needs zstd: pip install 'penstock[delta]', or use disk") from error

__all__ = ["zstd"]


CHUNK = 4 * 2**20
"""Elements of a chunk: what is worked on at once, and compressed as one."""
DENSE_FROM = 1 / 4
"""Where a greater part of a chunk has changed, all of it is in the file: positions would cost more than zeros."""
LEVEL = 1
"""Of zstd: higher ones save a few percent, at several times the seconds."""

_POSITION = 8
"""Bytes of a position, before its high ones are left out."""
_WORD = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Chunk:
    """What the file says of one chunk."""

    tensor: int
    """Its number in the manifest."""
    start: int
    """Of the tensor's elements, its first."""
    count: int
    """Its elements."""
    changed: int
    """So many are in the file."""
    gap_bytes: int
    """Bytes of each gap; 0: all elements are there, and no gaps."""
    nbytes: int
    """In the file."""


def write(
    file: BinaryIO, old: memoryview, new: memoryview, entries: Sequence[TensorEntry], *, base: int, to: int
) -> None:
    """Write what differs between two buffers in which the tensors lie at the same offsets.

    Args:
        file: open for writing.
        old: the base version.
        new: the version that results.
        entries: the tensors.
        base: number of the base version.
        to: number of the version that results.
    """
    chunks: list[Chunk] = []
    with ThreadPoolExecutor(_threads()) as pool:
        for number, entry in enumerate(entries):
            pairs = zip(_words(old, entry).split(CHUNK), _words(new, entry).split(CHUNK), strict=True)
            for index, coded in enumerate(pool.map(lambda pair: _encode(*pair), pairs)):
                if coded is not None:
                    changed, gap_bytes, data = coded
                    count = min(CHUNK, _elements(entry) - index * CHUNK)
                    chunks.append(Chunk(number, index * CHUNK, count, changed, gap_bytes, len(data)))
                    file.write(data)
    footer = orjson.dumps({"version": to, "base": base, "chunks": [astuple(chunk) for chunk in chunks]})
    file.write(footer + len(footer).to_bytes(8, "little"))


def apply(data: memoryview, buffer: memoryview, entries: Sequence[TensorEntry], *, base: int, to: int) -> set[int]:
    """Make the base version in `buffer`, which is writable, the version that results; applied again, it undoes that.

    Args:
        data: the file.
        buffer: with the tensors where `entries` say.
        entries: the tensors.
        base: number of the version in `buffer`.
        to: number of the version it is to become.

    Returns:
        Numbers of the tensors that changed.

    Raises:
        WeightsError: the file is of other versions, or malformed. What is in `buffer` is of no version then.
    """
    chunks = _footer(data, base, to)
    with ThreadPoolExecutor(_threads()) as pool:
        for _ in pool.map(lambda piece: _decode(*piece), _pieces(data, chunks, buffer, entries)):
            pass
    return {chunk.tensor for chunk in chunks}


def _footer(data: memoryview, base: int, to: int) -> list[Chunk]:
    length = int.from_bytes(data[-8:], "little")
    with reading("delta", WeightsError):
        footer: Any = parse_json(data[max(0, len(data) - 8 - length) : -8], "malformed delta: its footer", WeightsError)
        rows: list[Any] = footer["chunks"]
        versions = footer["base"], footer["version"]
        chunks = [Chunk(*row) for row in rows]
    if versions != (base, to):
        raise WeightsError(f"a delta from weight version {versions[0]} to {versions[1]} cannot make {to} of {base}")
    for chunk in chunks:
        for number in astuple(chunk):
            whole_number(number, f"malformed delta: each field of {chunk}", error=WeightsError)
    if sum(chunk.nbytes for chunk in chunks) + length + 8 != len(data):
        raise WeightsError(f"malformed delta: its chunks are not what its {len(data)} bytes hold")
    return chunks


def _pieces(
    data: memoryview, chunks: Sequence[Chunk], buffer: memoryview, entries: Sequence[TensorEntry]
) -> Iterator[tuple[torch.Tensor, Chunk, memoryview]]:
    """For each chunk the part of its tensor, and its code."""
    begin, done = 0, (0, 0)
    for chunk in chunks:
        if chunk.tensor >= len(entries) or (chunk.tensor, chunk.start) < done:
            raise WeightsError(f"malformed delta: {chunk} is of no tensor, or not behind the one before it")
        words = _words(buffer, entries[chunk.tensor])
        done = chunk.tensor, chunk.start + chunk.count
        if done[1] > len(words) or chunk.count > CHUNK:
            raise WeightsError(f"malformed delta: {chunk} does not lie in {entries[chunk.tensor].name!r}")
        yield words[chunk.start : done[1]], chunk, data[begin : begin + chunk.nbytes]
        begin += chunk.nbytes


def _encode(old: torch.Tensor, new: torch.Tensor) -> tuple[int, int, bytes] | None:
    """Elements that are coded, bytes of a gap, and the code of a chunk; None where nothing differs."""
    differing = old ^ new
    changed = int(torch.count_nonzero(differing))
    if changed == 0:
        return None
    if changed > DENSE_FROM * len(differing):
        return len(differing), 0, zstd.compress(_planes(differing), LEVEL)
    positions = differing.nonzero().flatten()
    gaps = torch.diff(positions, prepend=torch.tensor([-1])) - 1
    gap_bytes = max(1, -(-int(gaps.max()).bit_length() // 8))
    coded = _planes(gaps)[: gap_bytes * changed] + _planes(differing[positions])
    return changed, gap_bytes, zstd.compress(coded, LEVEL)


def _decode(part: torch.Tensor, chunk: Chunk, coded: memoryview) -> None:
    """Change a chunk in place."""
    size = part.element_size()
    whole = chunk.gap_bytes == 0
    if not 0 < chunk.changed <= len(part) or chunk.gap_bytes > _POSITION or (whole and chunk.changed != len(part)):
        raise WeightsError(f"malformed delta: {chunk} cannot be of its {len(part)} elements")
    data = _decompressed(coded, chunk.changed * (chunk.gap_bytes + size), chunk)
    gaps, values = data[: chunk.gap_bytes * chunk.changed], data[chunk.gap_bytes * chunk.changed :]
    differing = _from_planes(values, size).view(part.dtype)
    if whole:
        part.bitwise_xor_(differing)
        return
    gaps += bytes((_POSITION - chunk.gap_bytes) * chunk.changed)
    positions = torch.cumsum(_from_planes(gaps, _POSITION).view(torch.int64) + 1, 0) - 1
    if not (int(positions[0]) >= 0 and int(positions[-1]) < len(part) and bool((positions.diff() > 0).all())):
        raise WeightsError(f"malformed delta: {chunk} has elements outside of it")
    part[positions] = part[positions] ^ differing


def _decompressed(coded: memoryview, expected: int, chunk: Chunk) -> bytearray:
    """One zstd frame of `expected` bytes; what would become more is refused before memory is taken for it."""
    decoder = zstd.ZstdDecompressor()
    try:
        says = zstd.get_frame_info(coded).decompressed_size
        data = bytearray(decoder.decompress(coded, max_length=expected + 1) if says == expected else b"")
    except zstd.ZstdError as error:
        raise WeightsError(f"malformed delta: {chunk}: {error}") from error
    if len(data) != expected or not decoder.eof or decoder.unused_data:
        raise WeightsError(f"malformed delta: {chunk} is not one zstd frame of {expected} bytes")
    return data


def _planes(words: torch.Tensor) -> bytes:
    """The lowest bytes of all words, then their second bytes, and so on."""
    planes = words.contiguous().view(torch.uint8).view(-1, words.element_size()).t().contiguous()
    return planes.numpy().tobytes()


def _from_planes(data: bytearray, size: int) -> torch.Tensor:
    """Words as bytes, in their order."""
    return torch.frombuffer(data, dtype=torch.uint8).view(size, -1).t().contiguous().view(-1)


def _words(buffer: memoryview, entry: TensorEntry) -> torch.Tensor:
    return view(buffer, entry).view(-1).view(_WORD[entry.nbytes // max(1, _elements(entry)) or 1])


def _elements(entry: TensorEntry) -> int:
    return torch.Size(entry.shape).numel()


def _threads() -> int:
    return max(1, min(8, len(os.sched_getaffinity(0)) // 2))  # the other half has work of its own
