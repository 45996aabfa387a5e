"""Read request bodies: bounded in size and time, zstd unpacked."""

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
from penstock.tinker.schema import pb

MOST_BODY = 256 << 20
"""Bytes of training data, also unpacked; the SDK's own chunks have 5 MB."""
MOST_JSON = 1 << 20
"""Bytes of any other body but a sample's. JSON is parsed at once: its parser lets no other thread run."""
TOKEN_BYTES, SAMPLE_BYTES = 16, 1 << 16
"""Of a token's id in JSON, and of all else in a request to sample."""
SMALL = 1 << 16
"""Bytes of training data that are parsed at once; more are parsed in a thread."""
MOST_OF_TENANT, MOST_OF_PROCESS = 2 * MOST_BODY, 8 * MOST_BODY
"""Bytes of bodies under way: one of the largest fits as it came and unpacked, and four tenants may send such."""
_PIECE = 1 << 20
"""Bytes that are unpacked before they are counted."""


class RefusedError(UserError):
    """A request that is answered with a status of its own."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class BodyBudget:
    """Counts the bytes of bodies that are read, unpacked or parsed, of each tenant and of the process.

    The first `SMALL` bytes of a request are free: small requests pass while large ones fill the process.
    """

    def __init__(self) -> None:
        self._used: Counter[str] = Counter()
        self._lock = threading.Lock()  # bodies are unpacked in threads

    @contextmanager
    def of(self, tenant: str) -> Generator[Callable[[int], None]]:
        """Give what counts more bytes of one request; all are given back when the block ends.

        What it gives raises RefusedError where there is no room: the SDK waits and sends the request again.
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
                self._used += Counter()  # drops the tenants that have nothing under way


def most_of_sample(context: int | None) -> int:
    """Return the bytes that a request to sample may have."""
    return MOST_BODY if context is None else SAMPLE_BYTES + context * TOKEN_BYTES


async def training_request(http: Request) -> tuple[bytes, Any]:
    """Return the body and the message of a request with training data. UserError: it is malformed, or too large."""
    data = await read_body(http, MOST_BODY)
    return data, _parsed(data) if len(data) <= SMALL else await in_thread(lambda: _parsed(data))


def _parsed(data: bytes) -> Any:
    check_fields(data)
    try:
        return pb.ForwardBackwardRequest.FromString(data)
    except DecodeError as error:
        raise UserError(f"the body is no ForwardBackwardRequest: {error}") from error


async def read_body(http: Request, most: int = MOST_JSON) -> bytes:
    """Return the whole body. RefusedError: it is too large, does not come, or cannot be unpacked."""
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


# --- fields of training data -----------------------------------------------------------------------------------------

MOST_FIELDS = 1 << 18
"""Of a body of training data; the SDK's chunks have at most 1,024 data, of about 30 fields each."""

_Fields = dict[int, Any]
"""Fields that have a length, by number: the fields of a message, or None for packed numbers; no text, no bytes."""


def check_fields(body: bytes) -> None:
    """Raise UserError for training data of too many fields, before they are parsed.

    protobuf has no bound of its own. It parses 64 MiB of empty messages in 6 s, in which no other thread runs, and
    takes 1.8 GiB for them.
    """
    left, todo = MOST_FIELDS, [(0, len(body), _FIELDS)]
    if len(body) <= 2 * left:
        return  # each has two bytes
    try:
        while todo:
            at, end, known = todo.pop()
            while at < end:
                tag, at = _varint(body, at)
                size, at = _varint(body, at) if tag & 7 in {0, 2} else (0, at + _FIXED.get(tag & 7, 0))
                left -= 1
                if tag & 7 == 2:  # noqa: PLR2004 - the kind of what has a length
                    inside = known.get(tag >> 3, _TEXT)
                    if inside is None:
                        left -= size
                    elif inside is not _TEXT:
                        todo.append((at, at + size, inside))
                    at += size
                if left < 0:
                    raise UserError(
                        f"the request has more than {MOST_FIELDS} protobuf fields, as over 8,000 data of four inputs "
                        "have; send fewer data in a request, and the tokens of each datum as one chunk"
                    )
    except IndexError:
        raise UserError("the body is no ForwardBackwardRequest: it is cut off") from None


def _varint(body: bytes, at: int) -> tuple[int, int]:
    if (value := body[at]) < 128:  # noqa: PLR2004 - the last byte has no high bit
        return value, at + 1
    value, shift = value & 127, 7
    for place in range(at + 1, at + 10):
        value |= (body[place] & 127) << shift
        if body[place] < 128:  # noqa: PLR2004
            return value, place + 1
        shift += 7
    raise IndexError


def _fields_of(message: Any) -> _Fields:
    return {
        field.number: None if field.message_type is None else _fields_of(field.message_type)
        for field in message.fields
        if field.type not in {field.TYPE_STRING, field.TYPE_BYTES}
    }


_FIELDS, _TEXT = _fields_of(pb.ForwardBackwardRequest.DESCRIPTOR), _Fields()
_FIXED = {1: 8, 5: 4}
"""Bytes of the kinds that have no length."""
