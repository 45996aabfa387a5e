"""An engine's answer: its head, the end of its body, and a report of a dead core.

Chunks go to the client as they came, since a token of a stream must cost next to nothing. The chunked reader is
stricter than the RFC, so that a peer behind the router finds the same end. A bare LF, white space around a chunk size,
an extension, a trailer, and a size over 15 digits are errors. So are forms that no present engine sends: answers that
end with their connection, and informational answers. Bodies of requests are read in the same way.
"""

from __future__ import annotations

import functools
import re
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import orjson

from penstock.router.http import (
    CHUNKED,
    FRAMING,
    GOES_ON,
    LONGEST_KNOWN,
    Head,
    RefusalError,
    RequestHead,
    malformed,
    read_fields,
    shown,
)

# --- head -------------------------------------------------------------------------------------------------------------

_STATUS_LINE = re.compile(rb"HTTP/1\.1 (\d{3})(?: [\t -~\x80-\xff]*)?\r\n")
_STATUS_LINES: dict[int, bytes] = {
    status: b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus
}
_BODILESS = {204, 304}
_RESPONSE_ROLES = FRAMING | {b"content-type": ("content_type", bytes.lower, GOES_ON)}


@dataclass(frozen=True, init=False, eq=False)
class ResponseHead(Head):
    """A checked response head. See `parse_response`."""

    status: int = 0
    content_type: bytes = b""
    """In lower case."""

    def to_client(self, *, close: bool) -> bytes:
        """Return the head for a client; `close`: its connection ends with the answer."""
        line = _STATUS_LINES.get(self.status) or b"HTTP/1.1 %d \r\n" % self.status
        return b"%b%b%b%b\r\n" % (line, self.fields, self.framing, b"Connection: close\r\n" if close else b"")


def parse_response(head: bytes, method: bytes) -> ResponseHead:
    """Parse and check an engine's head; HEAD as the request's `method` has no body.

    Raises:
        RefusalError: 502, for a head that is not HTTP/1.1 or whose framing is ambiguous.
    """
    known = len(head) <= LONGEST_KNOWN and b"ookie" not in head  # no secret is kept
    try:
        return (_response if known else _response.__wrapped__)(head, method)
    except RefusalError as error:
        raise RefusalError(502, "bad_engine_response", f"the engine's answer is not valid HTTP: {error}") from error


@functools.lru_cache(maxsize=256)  # many answers within a second share one head
def _response(head: bytes, method: bytes) -> ResponseHead:
    line = _STATUS_LINE.match(head)
    status = 0 if line is None else int(line[1])
    if line is None or status < HTTPStatus.OK:  # no informational answers: the router sends no Expect
        raise malformed(f"its status line is {shown(head.splitlines()[0])}")
    read = read_fields(head, line.end(), _RESPONSE_ROLES)
    if method == b"HEAD" or status in _BODILESS:
        read["length"] = 0
        if status == HTTPStatus.NO_CONTENT:
            read["framing"] = b""
    elif "framing" not in read:
        raise malformed("it has neither Content-Length nor Transfer-Encoding")
    return ResponseHead(read | {"status": status})


# --- body -------------------------------------------------------------------------------------------------------------

_CHUNK_ENDED = b"\r\n"
_CHUNK_OPENING = re.compile(rb"\r\n(?:0{1,15}\r\n\r\n|(?!0+\r)([0-9A-Fa-f]{1,15})\r\n)")
"""The end of a chunk and the size of the next; a match without a size ends the body."""
_PART_OF_OPENING = re.compile(rb"\r(?:\n(?:[0-9A-Fa-f]{1,15}(?:\r(?:\n\r?)?)?)?)?")
WHOLE_CHUNK_LIMIT = 4096
_SIZES = {len(b"%x\r\n" % size) + size + 2: b"%x\r\n" % size for size in range(1, WHOLE_CHUNK_LIMIT)}
WHOLE_CHUNK_OPENING = tuple(_SIZES.get(length, b"-" * WHOLE_CHUNK_LIMIT) for length in range(WHOLE_CHUNK_LIMIT))
"""First bytes of a block that is exactly one chunk, by the block's length, with the size as engines write it.

A block that starts at a chunk boundary, begins with these bytes and ends with CRLF is one whole chunk; its payload is
not scanned. Where no chunk has that length, the entry is longer than the block.
"""


class FramingError(Exception):
    """The bytes do not follow the body's framing."""


class BodyReader:
    """Follows one body of `length` bytes."""

    size: int = 0
    """Bytes read so far, chunk sizes included."""
    between_chunks = False
    """Whether the next byte is the first of a chunk."""

    def __init__(self, length: int) -> None:
        self._left = length
        self.done = length == 0

    def feed(self, data: bytes, start: int = 0) -> int:
        """Read on in `data`; return the index behind the body, the end unless `done`."""
        taken = min(len(data) - start, self._left)
        self._left -= taken
        self.size += taken
        self.done = not self._left
        return start + taken


class ChunkedReader(BodyReader):
    """A chunked body.

    Args:
        payload: list to which the payload is appended, for a peer that gets other chunks or none.
    """

    def __init__(self, payload: list[bytes] | None = None) -> None:
        super().__init__(0)
        self.done = False
        self._payload = payload
        self._carry = _CHUNK_ENDED  # the first chunk has no predecessor, and each opening starts with the end of one

    def feed(self, data: bytes, start: int = 0) -> int:
        """See `BodyReader`.

        Raises:
            FramingError: for anything but a well-formed chunked body.
        """
        carried = len(self._carry)
        data = self._carry + data[start:]
        at, end = 0, len(data)
        while at < end and not self.done:
            if not self._left:
                opening = _CHUNK_OPENING.match(data, at)
                if opening is None:
                    if _PART_OF_OPENING.fullmatch(data, at):
                        break
                    found = shown(data[at : at + 20])
                    raise FramingError(f"a chunk does not end where its size says, or bad size {found}")
                at = opening.end()
                self.done = opening[1] is None
                self._left = 0 if self.done else int(opening[1], 16)
            step = min(self._left, end - at)
            if self._payload is not None:
                self._payload.append(data[at : at + step])
            self._left -= step
            at += step
        self._carry = b"" if self.done else data[at:]
        taken = (at if self.done else end) - carried
        self.size += taken
        self.between_chunks = self._carry == _CHUNK_ENDED
        return start + taken


def body_reader(length: int, payload: list[bytes] | None = None) -> BodyReader:
    """Make the reader of a body of a head's `length`."""
    return ChunkedReader(payload) if length == CHUNKED else BodyReader(length)


# --- the whole ------------------------------------------------------------------------------------------------------

_MOST_HELD_BACK = 65_536
"""Most bytes of a body that is held back until it is whole, as nearly all answers without a stream are."""
_STREAMS = (b"application/x-ndjson", b"text/event-stream")
_MAX_HEAD = 262_144
"""Most bytes of an engine's head: more than of a client's, but bounded."""
_OK, _ERROR = 200, 500
_DEAD = b"EngineCore encountered an issue"
"""First words of the message of vLLM's `EngineDeadError`."""


class Answer:
    """Reader of an engine's answer: its head, the end of its body, and a report of a dead core.

    Call `feed`, then read the attributes. vLLM's API server outlives its engine core by about a second. In vLLM 0.26
    and 0.32 it then answers 500 with the message of `EngineDeadError`. A stream has its 200 already and begins with a
    chunk that holds the same error; so do Penstock's lines of progress. The reader therefore holds back the beginning
    of such answers until it is whole. Any other error concerns the request and not the engine. A short answer without a
    stream is held back as well: an engine may die between its head and its body.
    """

    response: ResponseHead | None = None
    """The head, once it may go to the client."""
    death = ""
    """The error message of a dead core; such an answer has no `response`."""
    done = False
    between_chunks = False
    """Whether the answer is being passed on and the next byte is the first of a chunk."""
    _head: ResponseHead | None = None
    _body: BodyReader
    _held = b""
    """Bytes of a head that is not whole, then of the body until `response` is set."""

    def __init__(self, request: RequestHead) -> None:
        self._request = request

    def feed(self, data: bytes) -> bytes:
        """Return bytes of the body for the client, behind `response` if that is new.

        Raises:
            FramingError: the body is malformed, or bytes follow the answer.
            RefusalError: 502, the head is not valid HTTP.
        """
        if self._head is None:
            data = self._held + data
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:  # noqa: PLR2004 - not found
                if len(data) > _MAX_HEAD:
                    what = f"the engine's head is longer than {_MAX_HEAD} bytes"
                    raise RefusalError(502, "bad_engine_response", what)
                self._held = data
                return b""
            self._head = parse_response(data[:end], self._request.method)
            data, self._held = data[end:], b""
            if len(data) == self._head.length and self._head.status != _ERROR:  # the usual case of short answers
                self.response, self.done = self._head, True
                return data
            self._body = body_reader(self._head.length)
        body = self._body
        if data and body.feed(data) < len(data):
            # Bytes follow the answer: this answer or the next one would belong to another request.
            raise FramingError("the engine sent more than its answer")
        if self.response is None:
            data = self._held = self._held + data
            beginning = _beginning(self._head, data)
            self.death = _cause_of_death(beginning) if beginning else ""
            if beginning is None or self.death:
                return b""
            self.response, self._held = self._head, b""
        self.done, self.between_chunks = body.done, body.between_chunks
        return data


def _beginning(head: ResponseHead, body: bytes) -> bytes | None:
    """Return the body or first chunk that may report a dead core; None: wait for more of it."""
    if 0 < head.length <= _MOST_HELD_BACK:  # until it is whole, another engine can answer
        if len(body) < head.length:
            return None
        return body if head.status == _ERROR else b""
    if head.status != _OK or head.length != CHUNKED or not head.content_type.startswith(_STREAMS):
        return b""
    line, ended, chunk = body.partition(b"\r\n")
    size = int(line, 16) if ended else _MOST_HELD_BACK
    return chunk[:size] if len(chunk) >= size or size > _MOST_HELD_BACK else None


def _cause_of_death(beginning: bytes) -> str:
    """Return the error message of a dead core in a body; empty: there is none."""
    answer: Any = None
    if _DEAD in beginning:
        with suppress(orjson.JSONDecodeError):
            answer = orjson.loads(beginning.removeprefix(b"data: ").partition(b"\n")[0])
    match answer:
        case {"error": {"message": str(message)}} | {"answer": {"error": {"message": str(message)}}} if (
            message.startswith(_DEAD.decode())
        ):
            return message
        case _:
            return ""
