"""HTTP/1.1 of the router: its own answers, heads, and the ends of bodies.

The router writes each head from the parsed fields, so an engine or a client reads only what the router understood. The
checks follow RFC 9112 (sections 2.2, 3, 5, 6) and RFC 9110 (7.6.1), in their strict reading.

A request goes to the engine whole, with its length. An answer's chunks go to the client as they came, since a token of
a stream must cost next to nothing. The chunked reader is stricter than the RFC, so that a peer behind the router finds
the same end. A bare LF, white space around a chunk size, an extension, a trailer, and a size over 15 digits are errors.
Forms that no present client or engine sends are errors too: HTTP/1.0, requests sent ahead of an answer, answers that
end with their connection, and informational answers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from http import HTTPStatus

import orjson

from penstock.errors import PenstockError
from penstock.router.policies import Hints

_TYPES = {401: "authentication_error", 403: "permission_error", 408: "timeout_error", 409: "conflict_error"}
RETRY_AFTER_S = 5
"""Seconds that a 503 asks a client to wait."""


def shown(given: object, most: int = 80) -> str:
    """Quote a peer's text or bytes for a message."""
    text = given.decode(errors="replace") if isinstance(given, bytes) else str(given)
    return repr(text[:most])


class RefusalError(PenstockError):
    """The router refuses this request and answers it itself.

    Attributes:
        status: HTTP status.
        code: short machine-readable reason, the value of `X-Penstock-Error`.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def response(self, *, close: bool, head_only: bool = False) -> bytes:
        """Return the HTTP response with OpenAI's JSON error; `head_only`: for HEAD."""
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
    """Return an HTTP/1.1 response of the router; `extra` holds whole header lines."""
    connection = "close" if close else "keep-alive"
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(content)}\r\n{extra}Connection: {connection}\r\n\r\n"
    )
    return head.encode("latin-1") + (b"" if head_only else content)


# --- heads ------------------------------------------------------------------------------------------------------------

CHUNKED = -1
"""Body length of a chunked message."""

Value = bytes | int | str | None
Field = tuple[bytes, bytes]

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]++"  # possessive: no head is read twice
_REQUEST_LINE = re.compile(rb"(" + _TOKEN + rb") ([^\0- \x7f]+) HTTP/(\d\.\d)\r\n")
_STATUS_LINE = re.compile(rb"HTTP/1\.1 (\d{3})(?: [\t -~\x80-\xff]*)?\r\n")
_FIELD = re.compile(rb"(?<=\n)(" + _TOKEN + rb"):[ \t]*+([\t -~\x80-\xff]*+)\r\n")
_METHODS = {b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"}
_TARGET = re.compile(rb"/[!\"$-~]*")
"""No fragment (RFC 9112, 3.2.1), nothing outside ASCII."""
_HOST = re.compile(rb"[0-9A-Za-z._:\[\]%-]*")
_NOT_HOP_BY_HOP = {b"content-length", b"transfer-encoding", b"host", b"authorization", b"trailer"}
_LONGEST_KNOWN = 1024
_MAX_DIGITS = 15
_MAX_ID = 512
_STATUS_LINES: dict[int, bytes] = {
    status: b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus
}
_BODILESS = {204, 304}


def _malformed(what: str, status: int = 400, code: str = "bad_request") -> RefusalError:
    return RefusalError(status, code, what)


def _whole_number(field: str) -> Callable[[bytes], int]:
    def make(value: bytes) -> int:
        if not value.isdigit() or len(value) > _MAX_DIGITS:
            raise _malformed(f"{field} must be a whole number, got {shown(value, 40)}")
        return int(value)

    return make


def _text(field: str) -> Callable[[bytes], str | None]:
    def make(value: bytes) -> str | None:
        if len(value) > _MAX_ID:
            raise _malformed(f"{field} has {len(value)} bytes, over the limit of {_MAX_ID}")
        try:
            return value.decode() or None  # clients send non-ASCII names as UTF-8, and so do admin calls
        except UnicodeDecodeError:
            return value.decode("latin-1")

    return make


def _host(value: bytes) -> bytes:
    if not _HOST.fullmatch(value):
        raise _malformed(f"Host {shown(value)} is not a host name with a port")
    return value


_Role = tuple[str, Callable[[bytes], Value], bool]
"""A field that the router reads: its attribute, the function for its value, and whether the field goes on."""
_GOES_ON, _ENDS_HERE = True, False
_HOP_BY_HOP = b"keep-alive proxy-connection proxy-authorization te upgrade http2-settings"
_FRAMING: dict[bytes, _Role] = {
    b"content-length": ("content_length", _whole_number("Content-Length"), _ENDS_HERE),
    b"transfer-encoding": ("transfer_encoding", bytes.lower, _ENDS_HERE),
    b"connection": ("connection", bytes.lower, _ENDS_HERE),
    **dict.fromkeys(_HOP_BY_HOP.split(), ("hop_by_hop", bytes, _ENDS_HERE)),
}
_LISTS = {"connection", "hop_by_hop"}
"""Fields that may occur more than once."""
_RESPONSE_ROLES = _FRAMING | {b"content-type": ("content_type", bytes.lower, _GOES_ON)}
_REQUEST_ROLES = _FRAMING | {
    b"host": ("host", _host, _GOES_ON),
    b"expect": ("expect", bytes.lower, _ENDS_HERE),  # the router itself sends 100-continue
    b"trailer": ("trailer", bytes, _ENDS_HERE),  # chunked bodies go on whole, without trailers
    b"authorization": ("authorization", bytes, _ENDS_HERE),  # the router's key; an engine gets its own
    b"x-api-key": ("x_api_key", bytes, _ENDS_HERE),
    b"x-data-parallel-rank": ("dp_rank", bytes, _ENDS_HERE),  # the membership decides it
    b"x-session-id": ("session_id", _text("X-Session-ID"), _GOES_ON),
    b"x-group-id": ("group_id", _text("X-Group-ID"), _GOES_ON),
    b"x-weight-version": ("min_weight_version", _whole_number("X-Weight-Version"), _GOES_ON),
    b"x-prompt-tokens": ("prompt_tokens", _whole_number("X-Prompt-Tokens"), _GOES_ON),
    b"x-expected-tokens": ("expected_tokens", _whole_number("X-Expected-Tokens"), _GOES_ON),
    b"x-prefix-hashes": ("prefix_hashes", bytes, _GOES_ON),
    b"origin": ("origin", bytes, _GOES_ON),
    b"traceparent": ("traceparent", bytes, _GOES_ON),
}


class _Head:
    """The common part of requests and responses. A missing field has the class's default."""

    content_length: int | None = None
    transfer_encoding: bytes | None = None
    connection: bytes | None = None
    keep_alive: bool = True
    length: int = 0
    """Bytes of body, or CHUNKED."""
    fields: bytes
    """Whole lines to pass on, without those for framing and connection."""
    framing: bytes = b""
    """The line for the body's length, if there is one."""


class RequestHead(_Head, Hints):
    """A checked request head. See `parse_request`."""

    method: bytes
    target: bytes
    host: bytes | None = None
    expect: bytes | None = None
    """`100-continue` or None."""
    authorization: bytes = b""
    x_api_key: bytes = b""
    hop_by_hop: bytes = b""
    origin: bytes | None = None
    """`Origin`: the web page for which a browser sends this request."""
    traceparent: bytes = b""

    def __init__(self) -> None:
        """Set nothing, to save time: missing fields have the class's defaults."""

    def to_engine(self, size: int, extra: bytes = b"") -> bytes:
        """Return the head for an engine, before `size` bytes; `extra`: lines for it alone."""
        framing = self.framing if self.length != CHUNKED else b"Content-Length: %d\r\n" % size
        return b"%b %b HTTP/1.1\r\n%b%b%b\r\n" % (self.method, self.target, extra, self.fields, framing)


class ResponseHead(_Head):
    """A checked response head. See `parse_response`."""

    status: int
    content_type: bytes = b""
    """In lower case."""

    def to_client(self, *, close: bool) -> bytes:
        """Return the head for a client; `close`: its connection ends with the answer."""
        line = _STATUS_LINES.get(self.status) or b"HTTP/1.1 %d \r\n" % self.status
        return b"%b%b%b%b\r\n" % (line, self.fields, self.framing, b"Connection: close\r\n" if close else b"")


def parse_request(head: bytes) -> RequestHead:
    """Parse and check one head, from the request line to the empty line.

    Raises:
        RefusalError: with status 400, 417, 501 or 505.
    """
    low = head.lower()
    # Equal heads are parsed once. A secret is not kept, and placement may lower counts of tokens.
    own = b"auth" in low or b"key" in low or b"cookie" in low or b"tokens" in low or b"?" in low
    return (_request.__wrapped__ if own or len(head) > _LONGEST_KNOWN else _request)(head)


@functools.lru_cache(maxsize=1024)
def _request(head: bytes) -> RequestHead:
    line = _REQUEST_LINE.match(head)
    if line is None:
        raise _malformed(f"malformed head: the request line is {shown(head.splitlines()[0])}")
    request = RequestHead()
    request.method, request.target, version = line.groups()
    if version != b"1.1":
        raise _malformed("only HTTP/1.1 is served (of nginx: proxy_http_version 1.1)", 505, "version_not_supported")
    if request.method not in _METHODS:
        raise _malformed(f"method {shown(request.method, 40)} is not supported", 501, "method_not_supported")
    if not _TARGET.fullmatch(request.target):
        raise _malformed(f"request target {shown(request.target)} must be a path, /... without #")
    fields = _read_fields(head, line.end(), _REQUEST_ROLES, request)
    if request.host is None:
        raise _malformed("header Host is missing")
    if request.expect is not None and request.expect != b"100-continue":
        raise _malformed(f"cannot meet Expect: {shown(request.expect)}", 417, "bad_expectation")
    _finish(request, fields)
    return request


def parse_response(head: bytes, method: bytes) -> ResponseHead:
    """Parse and check an engine's head; HEAD as the request's `method` has no body.

    Raises:
        RefusalError: 502, for a head that is not HTTP/1.1 or whose framing is ambiguous.
    """
    known = len(head) <= _LONGEST_KNOWN and b"ookie" not in head  # no secret is kept
    try:
        return (_response if known else _response.__wrapped__)(head, method)
    except RefusalError as error:
        raise RefusalError(502, "bad_engine_response", f"the engine's answer is not valid HTTP: {error}") from error


@functools.lru_cache(maxsize=256)  # many answers within a second share one head; the result is never changed
def _response(head: bytes, method: bytes) -> ResponseHead:
    line = _STATUS_LINE.match(head)
    status = 0 if line is None else int(line[1])
    if line is None or status < HTTPStatus.OK:  # no informational answers: the router sends no Expect
        raise _malformed(f"its status line is {shown(head.splitlines()[0])}")
    response = ResponseHead()
    response.status = status
    _finish(response, _read_fields(head, line.end(), _RESPONSE_ROLES, response))
    if method == b"HEAD" or status in _BODILESS:
        response.length = 0
        if status == HTTPStatus.NO_CONTENT:
            response.framing = b""
    elif not response.framing:
        raise _malformed("it has neither Content-Length nor Transfer-Encoding")
    return response


def _read_fields(head: bytes, start: int, roles: Mapping[bytes, _Role], judged: _Head) -> list[Field]:
    """Set attributes of `judged` from the fields at `start`; return those that go on."""
    fields: list[Field] = _FIELD.findall(head, start)
    if head.count(b"\n") != len(fields) + 2:  # plus the first line and the empty one
        raise _malformed("malformed head: a line is not one header field")
    seen: set[str] = set()
    kept: list[Field] = []
    for field in fields:
        name = field[0].lower()
        if name in roles:
            attribute, make, goes_on = roles[name]
            value = make(field[1].rstrip(b" \t"))
            if attribute in seen:
                if attribute not in _LISTS:
                    raise _malformed(f"header {name.decode()} occurs more than once")
                value = b"%b,%b" % (getattr(judged, attribute), value)
            seen.add(attribute)
            setattr(judged, attribute, value)
            if not goes_on:
                continue
        kept.append(field)
    return kept


def _finish(head: _Head, fields: list[Field]) -> None:
    """Set `keep_alive`, the body's length and framing, and the lines to pass on."""
    if head.connection is not None:
        # Empty elements of the list mean nothing (RFC 9110, 5.6.1.2).
        options = {option.strip(b" \t") for option in head.connection.split(b",")} - {b""}
        if stolen := options & _NOT_HOP_BY_HOP:
            raise _malformed(f"Connection must not name {min(stolen).decode()}")
        head.keep_alive = b"close" not in options
        fields = [field for field in fields if field[0].lower() not in options]
    head.fields = b"\r\n".join([*map(b": ".join, fields), b""])
    if head.transfer_encoding is not None:
        if head.content_length is not None:
            raise _malformed("Transfer-Encoding does not go with Content-Length")
        if head.transfer_encoding != b"chunked":
            what = f"Transfer-Encoding {shown(head.transfer_encoding)}"
            raise _malformed(f"{what}: only chunked is supported", 501, "coding_not_supported")
        head.length = CHUNKED
        head.framing = b"Transfer-Encoding: chunked\r\n"
    elif head.content_length is not None:
        head.length = head.content_length
        head.framing = b"Content-Length: %d\r\n" % head.length


# --- bodies -----------------------------------------------------------------------------------------------------------

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
            if self._left:
                step = min(self._left, end - at)
                if self._payload is not None:
                    self._payload.append(data[at : at + step])
                self._left -= step
                at += step
                continue
            opening = _CHUNK_OPENING.match(data, at)
            if opening is None:
                if not _PART_OF_OPENING.fullmatch(data, at):
                    raise FramingError(
                        f"a chunk does not end where its size says, or bad size {shown(data[at : at + 20])}"
                    )
                break
            at = opening.end()
            self.done = opening[1] is None
            self._left = 0 if self.done else int(opening[1], 16)
        self._carry = b"" if self.done else data[at:]
        taken = (at if self.done else end) - carried
        self.size += taken
        self.between_chunks = self._carry == _CHUNK_ENDED
        return start + taken


def body_reader(length: int, payload: list[bytes] | None = None) -> BodyReader:
    """Make the reader of a body of a head's `length`."""
    return ChunkedReader(payload) if length == CHUNKED else BodyReader(length)
