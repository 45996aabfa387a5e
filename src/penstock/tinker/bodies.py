"""Read request bodies: bounded in size and time, zstd unpacked."""

from __future__ import annotations

import asyncio

import zstandard
from starlette.requests import Request

from penstock import asgi
from penstock.errors import UserError

MOST_BODY = 256 << 20
"""Bytes, also unpacked; the SDK's own chunks have 5 MB."""


class RefusedError(UserError):
    """A request that is answered with a status of its own."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


async def read_body(http: Request) -> bytes:
    """Return the whole body. RefusedError: it is too large, does not come, or cannot be unpacked."""
    data = await asgi.read_body(http, MOST_BODY, lambda status, why: RefusedError(why, status))
    encoding = http.headers.get("content-encoding", "identity")
    if encoding == "identity":
        return data
    if encoding != "zstd":
        raise RefusedError(f"Content-Encoding {encoding[:40]!r} is not known; send zstd or none", 415)
    return await asyncio.to_thread(_unpacked, data)


def _unpacked(data: bytes) -> bytes:
    unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    try:
        with unpacker.stream_reader(data) as reader:
            unpacked = reader.read(MOST_BODY + 1)
    except zstandard.ZstdError as error:
        raise RefusedError(f"the body is no zstd: {error}", 400) from error
    if len(unpacked) > MOST_BODY:
        raise RefusedError(f"the unpacked body is over {MOST_BODY >> 20} MiB", 413)
    return unpacked
