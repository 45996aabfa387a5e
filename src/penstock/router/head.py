"""Heads of requests and responses: parsed by llhttp, judged here, and passed on as they came where possible.

What is refused follows RFC 9112 (sections 2.2, 3, 5 and 6) and RFC 9110 (7.6.1, hop-by-hop fields), always the strict
reading: two parties that read one head differently are what request smuggling is made of.
"""

from __future__ import annotations

import re
from collections.abc import Set as AbstractSet

import httptools

from penstock.router.refusal import RefusalError

CHUNKED = -1
"""Body length of a chunked message."""
UNTIL_CLOSE = -2
"""Body length of a response that ends with its connection."""

_TARGET = re.compile(rb"/[!-~]*")
_METHODS_REFUSED = {b"CONNECT", b"TRACE", b"PRI"}
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization", b"te", b"upgrade", b"http2-settings"}
)
_NOT_HOP_BY_HOP = {b"content-length", b"transfer-encoding", b"host", b"authorization", b"trailer"}
_REQUEST_FIELDS = _HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"transfer-encoding",
    b"expect",
    b"authorization",
    b"x-session-id",
    b"x-weight-version",
}
_RESPONSE_FIELDS = _HOP_BY_HOP | {b"content-length", b"transfer-encoding"}
_MAX_DIGITS = 15
_MAX_SESSION_ID = 512


class _Fields:
    """Callbacks of llhttp: keeps the target and the few fields that are looked at."""

    __slots__ = ("complete", "seen", "url", "wanted")

    def __init__(self, wanted: AbstractSet[bytes]) -> None:
        self.wanted = wanted
        self.url = b""
        self.seen: dict[bytes, bytes] = {}
        self.complete = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in self.wanted:
            value = value.strip(b" \t")
            if name in self.seen:
                if name not in _HOP_BY_HOP:
                    raise RefusalError(400, "bad_request", f"header {name.decode('latin-1')} occurs more than once")
                value = self.seen[name] + b"," + value
            self.seen[name] = value

    def on_headers_complete(self) -> None:
        self.complete = True


class RequestHead:
    """A request's head, judged. See `parse_request`."""

    __slots__ = (
        "authorization",
        "expects_continue",
        "forward",
        "http_1_1",
        "keep_alive",
        "length",
        "method",
        "min_weight_version",
        "session_id",
        "target",
    )

    method: bytes
    target: bytes
    http_1_1: bool
    keep_alive: bool
    length: int
    """Bytes of body, or CHUNKED."""
    expects_continue: bool
    authorization: bytes
    session_id: str | None
    min_weight_version: int
    forward: bytes
    """The head to send to an engine."""


class ResponseHead:
    """A response's head, judged. See `parse_response`."""

    __slots__ = ("forward", "keep_alive", "length", "status")

    status: int
    keep_alive: bool
    length: int
    """Bytes of body, or CHUNKED, or UNTIL_CLOSE."""
    forward: bytes
    """The head for a client, without any word on the connection."""


def parse_request(head: bytes) -> RequestHead:
    """Judge one head, from the request line to the empty line.

    Raises:
        RefusalError: with status 400, 417, 501 or 505.
    """
    fields = _Fields(_REQUEST_FIELDS)
    parser = httptools.HttpRequestParser(fields)
    _feed(parser, head, fields)
    seen = fields.seen
    request = RequestHead()
    request.method, request.target = parser.get_method(), fields.url
    request.http_1_1 = _version(head, request)
    if request.method in _METHODS_REFUSED:
        raise RefusalError(501, "method_not_supported", f"method {request.method.decode()} is not supported")
    if not _TARGET.fullmatch(request.target):
        raise RefusalError(
            400, "bad_request", f"request target {request.target[:80]!r} must be a path that begins with /"
        )
    if request.http_1_1 and b"host" not in seen:
        raise RefusalError(400, "bad_request", "header Host is missing")
    request.length = _request_length(seen, http_1_1=request.http_1_1)
    options, drop = _connection(seen)
    request.keep_alive = b"close" not in options if request.http_1_1 else b"keep-alive" in options
    request.authorization = seen.get(b"authorization", b"")
    request.session_id, request.min_weight_version = _routing(seen)
    request.expects_continue = b"expect" in seen
    if request.expects_continue:
        if seen[b"expect"].lower() != b"100-continue":
            raise RefusalError(417, "bad_expectation", f"cannot meet Expect: {seen[b'expect'][:80].decode('latin-1')}")
        drop = drop | {b"expect"}  # the router itself says when to go on
        request.expects_continue = request.http_1_1
    request.forward = _without(head, drop) if drop else head
    if not request.http_1_1:
        request.forward = request.forward.replace(b" HTTP/1.0\r\n", b" HTTP/1.1\r\n", 1)
        if b"host" not in seen:
            request.forward = request.forward[:-2] + b"Host: localhost\r\n\r\n"
    return request


def parse_response(head: bytes, method: bytes) -> ResponseHead:
    """Judge an engine's head; `method` is the request's, since a HEAD has no body in its answer.

    Raises:
        RefusalError: 502, for a head that is not HTTP/1.x or whose framing is ambiguous.
    """
    try:
        return _response(head, method)
    except RefusalError as error:
        raise RefusalError(502, "bad_engine_response", f"the engine's answer is not valid HTTP: {error}") from error


def _response(head: bytes, method: bytes) -> ResponseHead:
    fields = _Fields(_RESPONSE_FIELDS)
    parser = httptools.HttpResponseParser(fields)
    _feed(parser, head, fields)
    seen = fields.seen
    response = ResponseHead()
    response.status = parser.get_status_code()
    options, drop = _connection(seen)
    http_1_1 = head.startswith(b"HTTP/1.1 ")
    response.keep_alive = b"close" not in options if http_1_1 else b"keep-alive" in options
    response.length = _response_length(seen, response.status, method)
    response.forward = _without(head, drop) if drop else head
    if not http_1_1:
        response.forward = b"HTTP/1.1 " + response.forward.partition(b" ")[2]
    return response


def without_chunked(head: bytes) -> bytes:
    """A response head for a client that cannot read chunks."""
    return _without(head, {b"transfer-encoding", b"trailer"})


def _feed(parser: httptools.HttpRequestParser | httptools.HttpResponseParser, head: bytes, fields: _Fields) -> None:
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        pass  # an offer of another protocol: declined, by passing the request on without it
    except httptools.HttpParserError as error:
        if isinstance(error.__context__, RefusalError):
            raise error.__context__ from None
        raise RefusalError(400, "bad_request", f"malformed head: {error}") from None
    if not fields.complete:
        raise RefusalError(400, "bad_request", "malformed head: it ends before its last line")


def _version(head: bytes, request: RequestHead) -> bool:
    start = b"%b %b HTTP/1." % (request.method, request.target)
    if head.startswith(start):
        minor = head[len(start) : len(start) + 3]
        if minor == b"1\r\n":
            return True
        if minor == b"0\r\n":
            return False
    line = head.partition(b"\r\n")[0]
    if re.fullmatch(rb"\S+ \S+ HTTP/[0-9.]+", line):
        raise RefusalError(505, "version_not_supported", "only HTTP/1.1 and HTTP/1.0 are served")
    raise RefusalError(400, "bad_request", f"malformed request line {line[:80]!r}")


def _request_length(seen: dict[bytes, bytes], *, http_1_1: bool) -> int:
    coding = seen.get(b"transfer-encoding")
    if coding is None:
        return _content_length(seen.get(b"content-length", b"0"))
    if b"content-length" in seen or not http_1_1:
        raise RefusalError(400, "bad_request", "Transfer-Encoding does not go with Content-Length or HTTP/1.0")
    if coding.lower() != b"chunked":
        raise RefusalError(501, "coding_not_supported", f"Transfer-Encoding {coding[:80]!r}: only chunked is supported")
    return CHUNKED


def _response_length(seen: dict[bytes, bytes], status: int, method: bytes) -> int:
    coding = seen.get(b"transfer-encoding")
    if method == b"HEAD" or status < 200 or status in {204, 304}:  # noqa: PLR2004 - no body by definition
        return 0
    if coding is not None:
        if b"content-length" in seen or coding.lower() != b"chunked":
            raise RefusalError(502, "bad_engine_response", f"Transfer-Encoding {coding[:80]!r}")
        return CHUNKED
    length = seen.get(b"content-length")
    return UNTIL_CLOSE if length is None else _content_length(length)


def _content_length(value: bytes) -> int:
    if not value.isdigit() or len(value) > _MAX_DIGITS:
        raise RefusalError(400, "bad_request", f"bad Content-Length {value[:40]!r}")
    return int(value)


def _connection(seen: dict[bytes, bytes]) -> tuple[AbstractSet[bytes], AbstractSet[bytes]]:
    """Connection options in lower case, and the names of the fields that end at this hop."""
    drop = _HOP_BY_HOP.intersection(seen)
    if b"connection" not in drop:
        return frozenset[bytes](), drop
    options = frozenset(option.strip(b" \t") for option in seen[b"connection"].lower().split(b","))
    stolen = options & _NOT_HOP_BY_HOP
    if stolen:
        raise RefusalError(400, "bad_request", f"Connection must not name {min(stolen).decode()}")
    return options, drop | options


def _routing(seen: dict[bytes, bytes]) -> tuple[str | None, int]:
    session = seen.get(b"x-session-id")
    if session is not None and not 0 < len(session) <= _MAX_SESSION_ID:
        raise RefusalError(
            400, "bad_session_id", f"X-Session-ID must have 1 to {_MAX_SESSION_ID} bytes, got {len(session)}"
        )
    version = seen.get(b"x-weight-version", b"0")
    if not version.isdigit() or len(version) > _MAX_DIGITS:
        raise RefusalError(400, "bad_weight_version", f"X-Weight-Version must be a whole number, got {version[:40]!r}")
    return None if session is None else session.decode("latin-1"), int(version)


def _without(head: bytes, names: AbstractSet[bytes]) -> bytes:
    lines = head.split(b"\r\n")
    return b"\r\n".join(line for line in lines if line.partition(b":")[0].lower() not in names)
