"""What the router answers itself: an error a client can tell from an engine's by its `X-Penstock-Error` header.

A request's chunks are framed anew for the engine (`chunk`). An answer's chunks go to the client as they came: a token
of a stream must cost next to nothing. The chunked reader is stricter than the RFC, so that a peer behind us finds no
other end than we do: a bare LF, white space around a chunk size or in an extension, and a size over 15 digits are
errors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from http import HTTPStatus

import orjson

from penstock.errors import PenstockError

_TYPES = {401: "authentication_error", 403: "permission_error", 408: "timeout_error", 409: "conflict_error"}
RETRY_AFTER_S = 5
"""What a 503 asks a client to wait."""


def shown(given: object, most: int = 80) -> str:
    """What somebody sent, in quotes, as a message has it: of bytes the characters."""
    text = given.decode(errors="replace") if isinstance(given, bytes) else str(given)
    return repr(text[:most])


class RefusalError(PenstockError):
    """The router answers this request itself.

    Attributes:
        status: HTTP status.
        code: short machine-readable reason, the value of `X-Penstock-Error`.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def response(self, *, close: bool, head_only: bool = False) -> bytes:
        """The whole HTTP response, with a JSON body in OpenAI's form; `head_only` answers a HEAD request."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "")
        content = orjson.dumps(
            {"error": {"message": str(self), "type": kind or "invalid_request_error", "code": self.code}}
        )
        extra = f"X-Penstock-Error: {self.code}\r\n"
        if self.status == HTTPStatus.UNAUTHORIZED:
            extra += "WWW-Authenticate: Bearer\r\n"
        if self.status == HTTPStatus.SERVICE_UNAVAILABLE:
            extra += f"Retry-After: {RETRY_AFTER_S}\r\n"
        return response(self.status, content, extra=extra, close=close, head_only=head_only)


def response(
    status: int,
    content: bytes,
    *,
    content_type: str = "application/json",
    extra: str = "",
    close: bool = False,
    head_only: bool = False,
) -> bytes:
    """One HTTP/1.1 response of the router's own. `extra` holds whole header lines."""
    connection = "close" if close else "keep-alive"
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(content)}\r\n{extra}Connection: {connection}\r\n\r\n"
    )
    return head.encode("latin-1") + (b"" if head_only else content)


@dataclass(eq=False)
class Hints:
    """What a request's headers say, as far as placing it goes."""

    session_id: str | None = None
    """`X-Session-ID`, the conversation that this is a turn of."""
    group_id: str | None = None
    """`X-Group-ID`, the group of samples that this is one of."""
    min_weight_version: int = 0
    """`X-Weight-Version`: an engine with older weights may not answer."""
    prompt_tokens: int = 0
    """`X-Prompt-Tokens`; 0: not said."""
    expected_tokens: int = 0
    """`X-Expected-Tokens`: most that the answer may add, all samples together; 0: not said."""
    adapter: str | None = None
    """`X-Adapter`: the adapter that has to be loaded."""
    prefix_hashes: bytes | None = None
    """`X-Prefix-Hashes` as it came."""


_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_CHUNK_SIZE = re.compile(
    rb"([0-9A-Fa-f]{1,15})(?:;" + _TOKEN + rb"(?:=(?:" + _TOKEN + rb'|"[\t !#-\[\]-~]*"))?)*'  # no escapes in quotes
)
_FRAMING = rb"(?!(?i:content-length|transfer-encoding|trailer|connection|upgrade|te|host):)"
_TRAILER = re.compile(_FRAMING + _TOKEN + rb":[\t -~\x80-\xff]*")
"""No field that would say anew where the message ends (RFC 9110, 6.5.1)."""
_MAX_LINE = 4096
_MAX_TRAILERS = 8192


def _openings(limit: int) -> tuple[bytes, ...]:
    impossible = b"-" * limit
    openings = [impossible] * limit
    for size in range(1, limit):
        line = b"%x\r\n" % size
        if len(line) + size + 2 < limit:
            openings[len(line) + size + 2] = line
    return tuple(openings)


WHOLE_CHUNK_LIMIT = 4096
WHOLE_CHUNK_OPENING = _openings(WHOLE_CHUNK_LIMIT)
"""By its length in bytes, how a block begins that is exactly one chunk, with its size written as engines write it.

A block between two chunks that begins so and ends with CRLF is one whole chunk: what is in between is not looked at.
Where no chunk has that length, the entry is longer than the block.
"""


def chunk(payload: bytes, *, done: bool) -> bytes:
    """`payload` as one chunk, if there is any; with the end of the body behind it, if `done`."""
    end = b"0\r\n\r\n" if done else b""
    return b"%x\r\n%b\r\n%b" % (len(payload), payload, end) if payload else end


class FramingError(Exception):
    """The bytes are not a body of this framing."""


class BodyReader:
    """Follows one body."""

    done = False
    size: int = 0
    """Bytes so far, chunk sizes, extensions and trailers included."""
    between_chunks = False
    """Whether the next byte is the first of a chunk."""

    def feed(self, data: bytes, start: int = 0) -> int:
        """Follow `data` from `start`, and return the index behind this body's last byte in it.

        That is `len(data)` unless the body ended (`done`).
        """
        self.size += len(data) - start
        return len(data)


class LengthReader(BodyReader):
    """A body of `length` bytes; 0 is a message without one."""

    def __init__(self, length: int) -> None:
        self._left = length
        self.done = length == 0

    def feed(self, data: bytes, start: int = 0) -> int:
        """See `BodyReader`."""
        taken = min(len(data) - start, self._left)
        self._left -= taken
        self.size += taken
        self.done = not self._left
        return start + taken


class CloseReader(BodyReader):
    """A response body that ends with the connection."""


class ChunkedReader(BodyReader):
    """A chunked body with its trailers.

    Args:
        payload: where given, the payload of the chunks is appended to it, for a peer that gets other chunks or none.
    """

    _carry: bytes = b""
    _left = 0
    _after_chunk = False
    _in_trailers = False
    _trailer_bytes = 0

    def __init__(self, payload: list[bytes] | None = None) -> None:
        self._payload = payload

    def feed(self, data: bytes, start: int = 0) -> int:
        """See `BodyReader`.

        Raises:
            FramingError: for anything but a well-formed chunked body.
        """
        first = start
        carried = len(self._carry)
        if carried:
            data = self._carry + data[start:]
            carried -= start
            start = 0
            self._carry = b""
        at, end = start, len(data)
        while at < end and not self.done:
            if self._left:
                at = self._chunk(data, at, end)
            elif self._after_chunk:
                if data[at : at + 2] != b"\r\n":
                    if data[at:end] == b"\r":
                        break
                    raise FramingError("a chunk is longer than its size says")
                self._after_chunk = False
                at += 2
            else:
                line_end = self._line_end(data, at, end)
                if line_end < 0:
                    break
                self._line(data, at, line_end)
                at = line_end + 2
        if not self.done:
            self._carry = data[at:]
            at = end
        self.size += at - carried - first
        self.between_chunks = not (self._left or self._after_chunk or self._carry or self._in_trailers)
        return at - carried

    def _chunk(self, data: bytes, at: int, end: int) -> int:
        step = min(self._left, end - at)
        if self._payload is not None:
            self._payload.append(data[at : at + step])
        self._left -= step
        self._after_chunk = self._left == 0
        return at + step

    @staticmethod
    def _line_end(data: bytes, at: int, end: int) -> int:
        line_end = data.find(b"\r\n", at, at + _MAX_LINE)
        if line_end < 0 and end - at >= _MAX_LINE:
            raise FramingError(f"a chunk size or trailer line is longer than {_MAX_LINE} bytes")
        if line_end < 0 and b"\n" in data[at:end]:
            raise FramingError("a chunk size or trailer line ends without CR")
        return line_end

    def _line(self, data: bytes, at: int, line_end: int) -> None:
        if self._in_trailers:
            if at == line_end:
                self.done = True
                return
            self._trailer_bytes += line_end - at
            if self._trailer_bytes > _MAX_TRAILERS or not _TRAILER.fullmatch(data, at, line_end):
                raise FramingError(f"bad trailer line {shown(data[at:line_end])}")
            return
        size = _CHUNK_SIZE.fullmatch(data, at, line_end)
        if size is None:
            raise FramingError(f"bad chunk size line {shown(data[at:line_end])}")
        self._left = int(size[1], 16)
        self._in_trailers = self._left == 0
