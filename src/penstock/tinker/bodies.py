"""Read request bodies: bounded in size and time, zstd unpacked."""

from __future__ import annotations

import asyncio

import zstandard
from starlette.requests import Request

from penstock import asgi
from penstock.errors import UserError

MOST_BODY = 256 << 20
"""Bytes of training data, also unpacked; the SDK's own chunks have 5 MB."""
MOST_JSON = 1 << 20
"""Bytes of any other body but a sample's: its JSON is read where all other requests wait for it."""


TOKEN_BYTES, SAMPLE_BYTES = 16, 1 << 16
"""Of a token's id in JSON, and of all else in a request to sample."""


class RefusedError(UserError):
    """A request that is answered with a status of its own."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def most_of_sample(context: int | None) -> int:
    """Return the bytes that a request to sample may have."""
    return MOST_BODY if context is None else SAMPLE_BYTES + context * TOKEN_BYTES


MOST_PARTS = 1 << 16
"""Messages within a body of training data, each of which takes memory and time; the SDK's chunks have 1,024 data."""


def refuse_many_parts(body: bytes) -> None:
    """Raise UserError for a protobuf body of too many messages, before it is read: an empty one has two bytes."""
    parts, todo = 0, [(0, len(body), True)]
    try:
        while todo:
            at, end, whole = todo.pop()
            while at < end:
                tag, at = _varint(body, at)
                if tag & 7 in {1, 5}:
                    at += 8 if tag & 7 == 1 else 4
                    continue
                value, at = _varint(body, at)
                if tag & 7 != 2:  # noqa: PLR2004 - the kind of what has a length
                    continue
                parts += 1
                if parts > MOST_PARTS:
                    raise UserError(f"the body has more than {MOST_PARTS} data and tensors; send fewer data at once")
                if whole:
                    todo.append((at, at + value, False))
                at += value
    except IndexError:
        return  # it is no protobuf, as its reader says


def _varint(body: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (body[at] & 127) << shift
        if body[at] < 128:  # noqa: PLR2004 - the last byte has no high bit
            return value, at + 1
        at, shift = at + 1, shift + 7


async def read_body(http: Request, most: int = MOST_JSON) -> bytes:
    """Return the whole body. RefusedError: it is too large, does not come, or cannot be unpacked."""
    data = await asgi.read_body(http, most, lambda status, why: RefusedError(why, status))
    encoding = http.headers.get("content-encoding", "identity")
    if encoding == "identity":
        return data
    if encoding != "zstd":
        raise RefusedError(f"Content-Encoding {encoding[:40]!r} is not known; send zstd or none", 415)
    return await asyncio.to_thread(_unpacked, data, most)


def _unpacked(data: bytes, most: int) -> bytes:
    unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    try:
        with unpacker.stream_reader(data, read_across_frames=True) as reader:
            unpacked = reader.read(most + 1)
    except zstandard.ZstdError as error:
        raise RefusedError(f"the body is no zstd: {error}", 400) from error
    if len(unpacked) > most:
        raise RefusedError(f"the unpacked body is over {most / (1 << 20):g} MiB", 413)
    return unpacked
