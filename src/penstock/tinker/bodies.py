"""Reads request bodies with limits on size and time, and unpacks zstd."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import zstandard
from google.protobuf.message import DecodeError
from starlette.requests import Request

from penstock import asgi
from penstock.aio import in_thread
from penstock.errors import UserError
from penstock.tinker.schema import check_fields, pb

MOST_BODY = 256 << 20
"""Bytes of training data, also when unpacked. The SDK sends chunks of 5 MB."""
MOST_JSON = 1 << 20
"""Bytes of any other body except a sample's. JSON is parsed at once, and its parser blocks all threads."""
TOKEN_BYTES, SAMPLE_BYTES = 16, 1 << 16
"""Bytes of a token's id in JSON, and of everything else in a request to sample."""
SMALL = 1 << 16
"""Bytes of training data up to which it is parsed at once. A thread parses larger data."""
MOST_OF_TENANT, MOST_OF_PROCESS = 2 * MOST_BODY, 8 * MOST_BODY
"""Bytes of bodies under way. One of the largest fits, packed and unpacked; four tenants may each send one."""
_PIECE = 1 << 20
"""Bytes that are unpacked before they are counted."""


class RefusedError(UserError):
    """A refused request. The answer has the status of this error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class BodyBudget:
    """Counts the bytes of bodies under way, per tenant and for the process.

    The first `SMALL` bytes of a request are free, so small requests pass while large ones fill the process.
    """

    def __init__(self) -> None:
        self._used: Counter[str] = Counter()
        self._lock = threading.Lock()  # bodies are unpacked in threads

    @contextmanager
    def of(self, tenant: str) -> Generator[Callable[[int], None]]:
        """Yield a function that counts more bytes of one request. At the end of the block, all are returned.

        The function raises RefusedError if there is no room. The SDK then waits and sends the request again.
        """
        size = held = 0

        def take(more: int) -> None:
            nonlocal size, held
            with self._lock:
                charged = max(size + more - SMALL, 0) - held
                for whose, used, most in (
                    ("your", self._used[tenant], MOST_OF_TENANT), ("all", self._used.total(), MOST_OF_PROCESS)
                ):  # fmt: skip
                    if charged and used + charged > most:
                        raise RefusedError(
                            f"{whose} requests under way fill {most / (1 << 20):g} MiB; wait for them", 429
                        )
                self._used[tenant] += charged
                size, held = size + more, held + charged

        try:
            yield take
        finally:
            with self._lock:
                self._used[tenant] -= held
                self._used += Counter()  # removes tenants with nothing under way


def most_of_sample(context: int | None) -> int:
    """Return the maximum number of bytes in a request to sample."""
    return MOST_BODY if context is None else SAMPLE_BYTES + context * TOKEN_BYTES


async def training_request(http: Request) -> tuple[bytes, Any]:
    """Return a training request's body and its message. UserError: it is malformed or too large."""
    data = await read_body(http, MOST_BODY)
    return data, _parsed(data) if len(data) <= SMALL else await in_thread(lambda: _parsed(data))


def _parsed(data: bytes) -> Any:
    check_fields(data)
    try:
        return pb.ForwardBackwardRequest.FromString(data)
    except DecodeError as error:
        raise UserError(f"the body is no ForwardBackwardRequest: {error}") from error


async def read_body(http: Request, most: int = MOST_JSON) -> bytes:
    """Return the whole body. RefusedError: it is too large, does not arrive, or cannot be unpacked."""
    take: Callable[[int], None] = http.state.take
    data = await asgi.read_body(http, most, lambda status, why: RefusedError(why, status), take)
    encoding = http.headers.get("content-encoding", "identity")
    if encoding == "identity":
        return data
    if encoding != "zstd":
        raise RefusedError(f"Content-Encoding {encoding[:40]!r} is not known; send zstd or none", 415)
    return await in_thread(lambda: _unpacked(data, most, take))


def _unpacked(data: bytes, most: int, take: Callable[[int], None]) -> bytes:
    unpacked = bytearray()
    unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    try:
        with unpacker.stream_reader(data, read_across_frames=True) as reader:
            while len(unpacked) <= most and (piece := reader.read(_PIECE)):
                take(len(piece))
                unpacked += piece
    except zstandard.ZstdError as error:
        raise RefusedError(f"the body is no zstd: {error}", 400) from error
    if len(unpacked) > most:
        raise RefusedError(f"the unpacked body is over {most / (1 << 20):g} MiB", 413)
    return bytes(unpacked)
