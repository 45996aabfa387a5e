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
_VERSIONS = (b"HTTP/1.1", b"HTTP/1.0")
_NONE: AbstractSet[bytes] = frozenset()
_MAX_DIGITS = 15
_MAX_SESSION_ID = 512


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
    _check_syntax(httptools.HttpRequestParser(None), head)
    lines = head.split(b"\r\n")
    seen = _fields(lines, _REQUEST_FIELDS)
    request = RequestHead()
    request.method, request.target, request.http_1_1 = _request_line(lines[0])
    if request.http_1_1 and b"host" not in seen:
        raise RefusalError(400, "bad_request", "header Host is missing")
    request.length = _request_length(seen, http_1_1=request.http_1_1)
    options, drop = _connection(seen)
    request.keep_alive = b"close" not in options if request.http_1_1 else b"keep-alive" in options
    request.authorization = seen.get(b"authorization", b"")
    session = request.session_id = seen.get(b"x-session-id", b"").decode("latin-1") or None
    if session is not None and len(session) > _MAX_SESSION_ID:
        raise RefusalError(400, "bad_session_id", f"X-Session-ID has {len(session)} bytes, over {_MAX_SESSION_ID}")
    version = seen.get(b"x-weight-version")
    request.min_weight_version = 0 if version is None else _whole_number("X-Weight-Version", version)
    request.expects_continue = b"expect" in seen
    if request.expects_continue:
        if seen[b"expect"].lower() != b"100-continue":
            raise RefusalError(417, "bad_expectation", f"cannot meet Expect: {seen[b'expect'][:80]!r}")
        drop = drop | {b"expect"}  # the router itself says when to go on
        request.expects_continue = request.http_1_1
    request.forward = _without(lines, drop) if drop else head
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


def without_chunked(head: bytes) -> bytes:
    """A response head for a client that cannot read chunks."""
    return _without(head.split(b"\r\n"), {b"transfer-encoding", b"trailer"})


def _response(head: bytes, method: bytes) -> ResponseHead:
    parser = httptools.HttpResponseParser(None)
    _check_syntax(parser, head)
    lines = head.split(b"\r\n")
    seen = _fields(lines, _RESPONSE_FIELDS)
    response = ResponseHead()
    response.status = parser.get_status_code()
    options, drop = _connection(seen)
    http_1_1 = head.startswith(b"HTTP/1.1 ")
    response.keep_alive = b"close" not in options if http_1_1 else b"keep-alive" in options
    response.length = _response_length(seen, response.status, method)
    response.forward = _without(lines, drop) if drop else head
    if not http_1_1:
        response.forward = b"HTTP/1.1 " + response.forward.partition(b" ")[2]
    return response


def _check_syntax(parser: httptools.HttpRequestParser | httptools.HttpResponseParser, head: bytes) -> None:
    """Let llhttp, in its strict mode, vouch for the syntax.

    It is asked for no callbacks: after it, a line is `name:value` with nothing folded, no bare CR or LF and no NUL, so
    that splitting the lines here is exact, in a third of the time of a callback for each header.
    """
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        pass  # an offer of another protocol: declined, by passing the request on without it
    except httptools.HttpParserError as error:
        raise RefusalError(400, "bad_request", f"malformed head: {error}") from None


def _fields(lines: list[bytes], wanted: AbstractSet[bytes]) -> dict[bytes, bytes]:
    """Values of the wanted fields, by name in lower case."""
    seen: dict[bytes, bytes] = {}
    for line in lines:
        name, _, value = line.partition(b":")
        name = name.lower()
        if name in wanted:
            value = value.strip(b" \t")
            if name in seen:
                if name not in _HOP_BY_HOP:
                    raise RefusalError(400, "bad_request", f"header {name.decode()} occurs more than once")
                value = seen[name] + b"," + value
            seen[name] = value
    return seen


def _request_line(line: bytes) -> tuple[bytes, bytes, bool]:
    """Method, target, and whether it is HTTP/1.1 and not 1.0."""
    parts = line.split(b" ")
    if len(parts) != 3:  # noqa: PLR2004 - method, target, version
        raise RefusalError(400, "bad_request", f"malformed request line {line[:80]!r}")
    method, target, version = parts
    if version not in _VERSIONS:
        raise RefusalError(505, "version_not_supported", "only HTTP/1.1 and HTTP/1.0 are served")
    if method in _METHODS_REFUSED:
        raise RefusalError(501, "method_not_supported", f"method {method.decode()} is not supported")
    if not _TARGET.fullmatch(target):
        raise RefusalError(400, "bad_request", f"request target {target[:80]!r} must be a path that begins with /")
    return method, target, version == b"HTTP/1.1"


def _request_length(seen: dict[bytes, bytes], *, http_1_1: bool) -> int:
    coding = seen.get(b"transfer-encoding")
    if coding is None:
        length = seen.get(b"content-length")
        return 0 if length is None else _whole_number("Content-Length", length)
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
    return UNTIL_CLOSE if length is None else _whole_number("Content-Length", length)


def _whole_number(field: str, value: bytes) -> int:
    if not value.isdigit() or len(value) > _MAX_DIGITS:
        raise RefusalError(400, "bad_request", f"{field} must be a whole number, got {value[:40]!r}")
    return int(value)


def _connection(seen: dict[bytes, bytes]) -> tuple[AbstractSet[bytes], AbstractSet[bytes]]:
    """Connection options in lower case, and the names of the fields that end at this hop."""
    if _HOP_BY_HOP.isdisjoint(seen):
        return _NONE, _NONE
    drop = _HOP_BY_HOP.intersection(seen)
    if b"connection" not in drop:
        return _NONE, drop
    options = frozenset(option.strip(b" \t") for option in seen[b"connection"].lower().split(b","))
    stolen = options & _NOT_HOP_BY_HOP
    if stolen:
        raise RefusalError(400, "bad_request", f"Connection must not name {min(stolen).decode()}")
    return options, drop | options


def _without(lines: list[bytes], names: AbstractSet[bytes]) -> bytes:
    return b"\r\n".join([line for line in lines if line.partition(b":")[0].lower() not in names])
