"""Read the heads of requests and answers, and write those that go on.

What goes out is never a slice of what came in: an engine or a client reads what this router understood, and nothing
else. The checks beyond llhttp follow RFC 9112 (sections 2.2, 3, 5, 6) and RFC 9110 (7.6.1), in their strict reading.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from http import HTTPStatus
from typing import TypeVar

import httptools

from penstock.router.http import Hints, RefusalError, shown

CHUNKED = -1
"""Body length of a chunked message."""
UNTIL_CLOSE = -2
"""Body length of a response that ends with its connection."""

Value = bytes | int | str | None
Field = tuple[bytes, bytes]

_METHODS = {b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"}
_TARGET = re.compile(rb"/[!\"$-~]*")
"""No fragment (RFC 9112, 3.2.1), nothing outside ASCII."""
_HOST = re.compile(rb"[0-9A-Za-z._:\[\]%-]*")
_NOT_HOP_BY_HOP = {b"content-length", b"transfer-encoding", b"host", b"authorization", b"trailer"}
_LONGEST_KNOWN, _MOST_KNOWN = 1024, 1024
_PUBLIC = frozenset(b"accept accept-encoding accept-language content-type user-agent".split())
"""Fields without a role that hold no secret and do not differ from request to request."""
_MAX_DIGITS = 15
_MAX_ID = 512
_MAX_ADAPTER = 256
_STATUS_LINES: dict[int, bytes] = {
    status: b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus
}
_BODILESS = {204, 304}


def _whole_number(field: str) -> Callable[[bytes], int]:
    def make(value: bytes) -> int:
        if not value.isdigit() or len(value) > _MAX_DIGITS:
            raise RefusalError(400, "bad_request", f"{field} must be a whole number, got {shown(value, 40)}")
        return int(value)

    return make


def _text(field: str, limit: int, code: str = "bad_request") -> Callable[[bytes], str | None]:
    def make(value: bytes) -> str | None:
        if len(value) > limit:
            raise RefusalError(400, code, f"{field} has {len(value)} bytes, over the limit of {limit}")
        try:
            return value.decode() or None  # as clients send names beyond ASCII, and as the admin calls say them
        except UnicodeDecodeError:
            return value.decode("latin-1")

    return make


@functools.lru_cache(maxsize=256)
def _host(value: bytes) -> bytes:
    if not _HOST.fullmatch(value):
        raise RefusalError(400, "bad_request", f"Host {shown(value)} is not a host name with a port")
    return value


_Role = tuple[str, Callable[[bytes], Value], bool]
"""Of a field that means something to the router: its attribute, what makes the value, and whether the field goes on."""
_GOES_ON, _ENDS_HERE = True, False
_HOP_BY_HOP = b"keep-alive proxy-connection proxy-authorization te upgrade http2-settings"
_FRAMING: dict[bytes, _Role] = {
    b"content-length": ("content_length", _whole_number("Content-Length"), _ENDS_HERE),
    b"transfer-encoding": ("transfer_encoding", bytes.lower, _ENDS_HERE),
    b"connection": ("connection", bytes.lower, _ENDS_HERE),
    **dict.fromkeys(_HOP_BY_HOP.split(), ("hop_by_hop", bytes, _ENDS_HERE)),
}
_LISTS = {"connection", "hop_by_hop"}
"""What may occur more than once."""
_RESPONSE_ROLES = _FRAMING | {b"content-type": ("content_type", bytes.lower, _GOES_ON)}
_REQUEST_ROLES = _FRAMING | {
    b"host": ("host", _host, _GOES_ON),
    b"expect": ("expect", bytes.lower, _ENDS_HERE),  # the router itself says when to go on
    b"trailer": ("trailer", bytes, _ENDS_HERE),  # chunked bodies are framed anew, without trailers
    b"authorization": ("authorization", bytes, _ENDS_HERE),  # the router's key; an engine gets its own
    b"x-api-key": ("x_api_key", bytes, _ENDS_HERE),
    b"x-data-parallel-rank": ("dp_rank", bytes, _ENDS_HERE),  # the membership's to say
    b"x-session-id": ("session_id", _text("X-Session-ID", _MAX_ID, "bad_session_id"), _GOES_ON),
    b"x-group-id": ("group_id", _text("X-Group-ID", _MAX_ID), _GOES_ON),
    b"x-weight-version": ("min_weight_version", _whole_number("X-Weight-Version"), _GOES_ON),
    b"x-prompt-tokens": ("prompt_tokens", _whole_number("X-Prompt-Tokens"), _GOES_ON),
    b"x-expected-tokens": ("expected_tokens", _whole_number("X-Expected-Tokens"), _GOES_ON),
    b"x-adapter": ("adapter", _text("X-Adapter", _MAX_ADAPTER), _GOES_ON),
    b"x-prefix-hashes": ("prefix_hashes", bytes, _GOES_ON),
    b"origin": ("origin", bytes, _GOES_ON),
    b"traceparent": ("traceparent", bytes, _GOES_ON),
}


class _Head:
    """What requests and responses have in common. A field that is missing is the class's default."""

    content_length: int | None = None
    transfer_encoding: bytes | None = None
    connection: bytes | None = None
    http_1_1: bool = True
    keep_alive: bool = True
    length: int = 0
    """Bytes of body, or CHUNKED, or UNTIL_CLOSE."""
    is_public: bool = True
    """Nothing in it can be a secret or one request's own: a copy of it may be kept."""
    fields: bytes
    """Whole lines to pass on, without a word on framing and connection."""
    framing: bytes = b""
    """The line that tells the body's length, if there is one."""


class RequestHead(_Head, Hints):
    """A request's head, judged. See `parse_request`."""

    method: bytes
    target: bytes
    host: bytes | None = None
    expect: bytes | None = None
    """100-continue, or nothing."""
    authorization: bytes = b""
    x_api_key: bytes = b""
    hop_by_hop: bytes = b""
    origin: bytes | None = None
    """`Origin`: the web page that a browser sends this for."""
    traceparent: bytes = b""

    def to_engine(self, extra: bytes = b"") -> bytes:
        """The head that an engine gets; `extra`: whole lines that the router adds for that engine."""
        return b"%b %b HTTP/1.1\r\n%b%b%b\r\n" % (self.method, self.target, extra, self.fields, self.framing)


class ResponseHead(_Head):
    """A response's head, judged. See `parse_response`."""

    status: int
    content_type: bytes = b""
    """In lower case."""

    def to_client(self, *, http_1_1: bool = True, connection: bytes = b"") -> bytes:
        """The head that a client gets.

        Args:
            http_1_1: whether the client can read chunks.
            connection: `Connection` to say; empty: nothing is said.
        """
        line = _STATUS_LINES.get(self.status) or b"HTTP/1.1 %d \r\n" % self.status
        framing = self.framing if http_1_1 or self.length != CHUNKED else b""
        said = b"Connection: %b\r\n" % connection if connection else b""
        return b"%b%b%b%b\r\n" % (line, self.fields, framing, said)


def parse_request(head: bytes) -> RequestHead:
    """Judge one head, from the request line to the empty line; what is returned is never changed.

    Raises:
        RefusalError: with status 400, 417, 501 or 505.
    """
    request = _known.get(head)
    if request is None:
        request = _request(head)
        if request.is_public and len(head) <= _LONGEST_KNOWN:
            if len(_known) >= _MOST_KNOWN:
                _known.clear()
            _known[head] = request
    return request


def _request(head: bytes) -> RequestHead:
    parser, read = _feed(httptools.HttpRequestParser, head)
    request = RequestHead()
    fields = _gather(read.fields, _REQUEST_ROLES, request)
    request.method = method = parser.get_method()
    request.target = target = read.target
    if not head.startswith(b"%b %b HTTP/1.1\r\n" % (method, target)):
        if not head.startswith(b"%b %b HTTP/1.0\r\n" % (method, target)):
            raise RefusalError(505, "version_not_supported", "only HTTP/1.1 and HTTP/1.0 are served")
        request.http_1_1 = request.keep_alive = False
    if method not in _METHODS:
        raise RefusalError(501, "method_not_supported", f"method {shown(method, 40)} is not supported")
    if not _TARGET.fullmatch(target):
        raise RefusalError(400, "bad_request", f"request target {shown(target)} must be a path, /... without #")
    if request.host is None:
        if request.http_1_1:
            raise RefusalError(400, "bad_request", "header Host is missing")
        fields.append((b"Host", b"localhost"))
    if request.expect is not None and request.expect != b"100-continue":
        raise RefusalError(417, "bad_expectation", f"cannot meet Expect: {shown(request.expect)}")
    _finish(request, fields)
    secret = request.authorization or request.x_api_key or request.hop_by_hop
    clamped = request.prompt_tokens or request.expected_tokens  # by the dispatcher, for the engines of the moment
    single = request.traceparent or b"?" in target  # a trace is one request's own; a query may hold a token
    request.is_public = request.is_public and not (secret or clamped or single)
    if request.transfer_encoding is not None and not request.http_1_1:
        raise RefusalError(400, "bad_request", "Transfer-Encoding does not go with HTTP/1.0")
    return request


def parse_response(head: bytes, method: bytes) -> ResponseHead:
    """Judge an engine's head; `method` is the request's, since a HEAD has no body in its answer.

    Raises:
        RefusalError: 502, for a head that is not HTTP/1.x or whose framing is ambiguous.
    """
    known = len(head) <= _LONGEST_KNOWN and b"ookie" not in head  # no secret is kept
    try:
        return (_response if known else _response.__wrapped__)(head, method)
    except RefusalError as error:
        raise RefusalError(502, "bad_engine_response", f"the engine's answer is not valid HTTP: {error}") from error


@functools.lru_cache(maxsize=256)  # many answers of one second have one head; what it returns is never changed
def _response(head: bytes, method: bytes) -> ResponseHead:
    parser, read = _feed(httptools.HttpResponseParser, head)
    if not head.startswith(b"HTTP/1."):
        raise RefusalError(502, "bad_engine_response", "only HTTP/1.1 and HTTP/1.0 are understood")
    response = ResponseHead()
    response.status = status = parser.get_status_code()
    if status < HTTPStatus.CONTINUE:
        raise RefusalError(502, "bad_engine_response", f"status {status} is none of HTTP")
    response.http_1_1 = response.keep_alive = head.startswith(b"HTTP/1.1 ")
    response.length = UNTIL_CLOSE
    _finish(response, _gather(read.fields, _RESPONSE_ROLES, response))
    if method == b"HEAD" or status < HTTPStatus.OK or status in _BODILESS:
        response.length = 0
        if status < HTTPStatus.OK or status == HTTPStatus.NO_CONTENT:
            response.framing = b""
    return response


def _finish(head: _Head, fields: list[Field]) -> None:
    """Decide whether the connection goes on, where the body ends, and what lines go on."""
    if head.connection is not None:
        options = _options(head.connection)
        head.keep_alive = b"close" not in options and (head.http_1_1 or b"keep-alive" in options)
        fields = [field for field in fields if field[0].lower() not in options]
    head.fields = b"\r\n".join([*map(b": ".join, fields), b""])
    if head.transfer_encoding is not None:
        if head.content_length is not None:
            raise RefusalError(400, "bad_request", "Transfer-Encoding does not go with Content-Length")
        if head.transfer_encoding != b"chunked":
            what = f"Transfer-Encoding {shown(head.transfer_encoding)}"
            raise RefusalError(501, "coding_not_supported", f"{what}: only chunked is supported")
        head.length = CHUNKED
        head.framing = b"Transfer-Encoding: chunked\r\n"
    elif head.content_length is not None:
        head.length = head.content_length
        head.framing = b"Content-Length: %d\r\n" % head.length


_known: dict[bytes, RequestHead] = {}
"""Requests whose heads are equal to the byte, as those of one session can be, are read once; no secret is kept."""


class _Read:
    """What llhttp reports of one head."""

    __slots__ = ("complete", "fields", "target")

    def __init__(self) -> None:
        self.target = b""
        self.fields: list[Field] = []
        self.complete = False

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name, value))

    def on_headers_complete(self) -> None:
        self.complete = True


P = TypeVar("P", httptools.HttpRequestParser, httptools.HttpResponseParser)


def _feed(kind: type[P], head: bytes) -> tuple[P, _Read]:
    """Let llhttp read the head; RefusalError (400) for what it refuses, and for a line that is not one field."""
    read = _Read()
    parser = kind(read)
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        pass  # an offer of another protocol: declined, by passing the request on without it
    except httptools.HttpParserError as error:
        raise RefusalError(400, "bad_request", f"malformed head: {error}") from None
    if not read.complete or head.count(b"\n") != len(read.fields) + 2:
        raise RefusalError(400, "bad_request", "malformed head: a line is not one header field")
    return parser, read


def _gather(fields: list[Field], roles: Mapping[bytes, _Role], head: _Head) -> list[Field]:
    """Set the attributes of `head` that `fields` have values for; returns the fields that go on."""
    seen: dict[str, Value] = {}
    kept: list[Field] = []
    for field in fields:
        name = field[0].lower()
        if name in roles:
            attribute, make, goes_on = roles[name]
            value = make(field[1].strip(b" \t"))
            if attribute in seen:
                if attribute not in _LISTS:
                    raise RefusalError(400, "bad_request", f"header {name.decode()} occurs more than once")
                value = b"%b,%b" % (seen[attribute], value)
            seen[attribute] = value
            setattr(head, attribute, value)
            if not goes_on:
                continue
        elif name not in _PUBLIC:
            head.is_public = False
        kept.append(field)
    return kept


def _options(connection: bytes) -> AbstractSet[bytes]:
    """Connection options in lower case; empty elements of the list mean nothing (RFC 9110, 5.6.1.2)."""
    options = frozenset(option.strip(b" \t") for option in connection.split(b",")) - {b""}
    stolen = options & _NOT_HOP_BY_HOP
    if stolen:
        raise RefusalError(400, "bad_request", f"Connection must not name {min(stolen).decode()}")
    return options
