"""Heads of requests and responses: judged here, and passed on as they came where possible.

What is refused follows RFC 9112 (sections 2.2, 3, 5 and 6) and RFC 9110 (7.6.1, hop-by-hop fields), always the strict
reading: two parties that read one head differently are what request smuggling is made of.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import TypeVar, cast

import httptools

from penstock.router.field_lines import FieldLines, Fields, Value
from penstock.router.refusal import RefusalError, shown

CHUNKED = -1
"""Body length of a chunked message."""
UNTIL_CLOSE = -2
"""Body length of a response that ends with its connection."""

_METHODS = {b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"}
_REQUEST_LINE = re.compile(rb"([A-Z-]+) (/[!\"$-~]*) HTTP/1\.([01])")
"""No fragment (RFC 9112, 3.2.1): the router would take `/pause#x` for another path, an engine's server for `/pause`."""
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: [\t -~\x80-\xff]*)?")
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization", b"te", b"upgrade", b"http2-settings"}
)
_NOT_HOP_BY_HOP = {b"content-length", b"transfer-encoding", b"host", b"authorization", b"trailer"}
_NONE: AbstractSet[bytes] = frozenset()
_HINTS = frozenset(
    {b"x-group-id", b"x-weight-version", b"x-prompt-tokens", b"x-expected-tokens", b"x-adapter", b"x-prefix-hashes"}
)
_MAX_DIGITS = 15
_MAX_ID = 512
_MAX_ADAPTER = 256
_MOST_LINES = 1024
_LONGEST_LINE = 512
Line = TypeVar("Line")


def _whole_number(field: str) -> Callable[[bytes], int]:
    def make(value: bytes) -> int:
        if not value.isdigit() or len(value) > _MAX_DIGITS:
            raise RefusalError(400, "bad_request", f"{field} must be a whole number, got {shown(value, 40)}")
        return int(value)

    return make


def _text(field: str, limit: int, code: str = "bad_request") -> Callable[[bytes], str]:
    def make(value: bytes) -> str:
        if len(value) > limit:
            raise RefusalError(400, code, f"{field} has {len(value)} bytes, over the limit of {limit}")
        try:
            return value.decode()  # as clients send other names than ASCII, and as the admin calls say them
        except UnicodeDecodeError:
            return value.decode("latin-1")

    return make


_FRAMING: dict[bytes, Callable[[bytes], Value]] = {
    b"content-length": _whole_number("Content-Length"),
    b"transfer-encoding": bytes.lower,
    **dict.fromkeys(_HOP_BY_HOP, bytes.lower),
}
_RESPONSE_FIELDS = FieldLines(httptools.HttpResponseParser, _FRAMING, _HOP_BY_HOP)
_REQUEST_FIELDS = FieldLines(
    httptools.HttpRequestParser,
    _FRAMING
    | {
        b"host": bytes,
        b"expect": bytes.lower,
        b"authorization": bytes,
        b"x-session-id": _text("X-Session-ID", _MAX_ID, "bad_session_id"),
        b"x-group-id": _text("X-Group-ID", _MAX_ID),
        b"x-weight-version": _whole_number("X-Weight-Version"),
        b"x-prompt-tokens": _whole_number("X-Prompt-Tokens"),
        b"x-expected-tokens": _whole_number("X-Expected-Tokens"),
        b"x-adapter": _text("X-Adapter", _MAX_ADAPTER),
        b"x-prefix-hashes": bytes,
        b"origin": bytes,
    },
    _HOP_BY_HOP,
)
_request_lines: dict[bytes, tuple[bytes, bytes, bool]] = {}
_status_lines: dict[bytes, tuple[int, bool]] = {}
"""First lines that were found good; see `field_lines`."""


class RequestHead:
    """A request's head, judged. See `parse_request`."""

    # What most requests do not have is a default of the class: an attribute that is not set costs nothing.
    method: bytes
    target: bytes
    http_1_1: bool = True
    keep_alive: bool = True
    length: int = 0
    """Bytes of body, or CHUNKED."""
    expects_continue: bool = False
    authorization: bytes = b""
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
    origin: bytes = b""
    """`Origin`: the web page that a browser sends this for."""
    forward: bytes
    """The head to send to an engine."""
    as_it_came: bool = True
    """Whether `forward` is the head that was received, byte for byte."""


class ResponseHead:
    """A response's head, judged. See `parse_response`."""

    __slots__ = ("as_it_came", "forward", "keep_alive", "length", "status")

    status: int
    keep_alive: bool
    length: int
    """Bytes of body, or CHUNKED, or UNTIL_CLOSE."""
    forward: bytes
    """The head for a client, without any word on the connection."""
    as_it_came: bool
    """Whether `forward` is the head that was received, byte for byte."""


def parse_request(head: bytes) -> RequestHead:
    """Judge one head, from the request line to the empty line.

    Raises:
        RefusalError: with status 400, 417, 501 or 505.
    """
    lines = head[:-4].split(b"\r\n")
    line = lines.pop(0)
    request = RequestHead()
    request.method, request.target, http_1_1 = _request_lines.get(line) or _request_line(line, head)
    seen = _REQUEST_FIELDS.read(head, lines)
    request.forward = head
    if b"transfer-encoding" in seen:
        request.length = _chunked(seen, http_1_1=http_1_1)
    elif b"content-length" in seen:
        request.length = cast("int", seen[b"content-length"])
    if b"x-session-id" in seen:
        request.session_id = cast("str", seen[b"x-session-id"]) or None
    if b"authorization" in seen:
        request.authorization = cast("bytes", seen[b"authorization"])
    if b"origin" in seen:
        request.origin = cast("bytes", seen[b"origin"])
    if not _HINTS.isdisjoint(seen):
        _hints(request, seen)
    if not http_1_1 or b"host" not in seen or b"expect" in seen or not _HOP_BY_HOP.isdisjoint(seen):
        _rewrite(request, seen, http_1_1=http_1_1)
    return request


def _hints(request: RequestHead, seen: Fields) -> None:
    """What the client says for its placement, besides its session."""
    request.group_id = cast("str | None", seen.get(b"x-group-id")) or None
    request.min_weight_version = cast("int", seen.get(b"x-weight-version", 0))
    request.prompt_tokens = cast("int", seen.get(b"x-prompt-tokens", 0))
    request.expected_tokens = cast("int", seen.get(b"x-expected-tokens", 0))
    request.adapter = cast("str | None", seen.get(b"x-adapter")) or None
    request.prefix_hashes = cast("bytes | None", seen.get(b"x-prefix-hashes"))


def _rewrite(request: RequestHead, seen: Fields, *, http_1_1: bool) -> None:
    """Leave out what ends at this hop, and tell the engine in HTTP/1.1."""
    if http_1_1 and b"host" not in seen:
        raise RefusalError(400, "bad_request", "header Host is missing")
    request.as_it_came = False
    request.http_1_1 = http_1_1
    options, drop = _connection(seen)
    request.keep_alive = b"close" not in options if http_1_1 else b"keep-alive" in options
    if b"expect" in seen:
        if seen[b"expect"] != b"100-continue":
            raise RefusalError(417, "bad_expectation", f"cannot meet Expect: {shown(seen[b'expect'])}")
        drop = drop | {b"expect"}  # the router itself says when to go on
        request.expects_continue = http_1_1
    if drop:
        request.forward = _without(request.forward.split(b"\r\n"), drop)
    if not http_1_1:
        request.forward = request.forward.replace(b" HTTP/1.0\r\n", b" HTTP/1.1\r\n", 1)
        if b"host" not in seen:
            request.forward = request.forward[:-2] + b"Host: localhost\r\n\r\n"


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
    lines = head[:-4].split(b"\r\n")
    line = lines.pop(0)
    response = ResponseHead()
    status, http_1_1 = _status_lines.get(line) or _status_line(line, head)
    seen = _RESPONSE_FIELDS.read(head, lines)
    response.status = status
    response.length = _response_length(seen, status, method)
    response.forward = head
    if http_1_1 and _HOP_BY_HOP.isdisjoint(seen):
        response.keep_alive = response.as_it_came = True
        return response
    response.as_it_came = False
    options, drop = _connection(seen)
    response.keep_alive = b"close" not in options if http_1_1 else b"keep-alive" in options
    if drop:
        response.forward = _without(head.split(b"\r\n"), drop)
    if not http_1_1:
        response.forward = b"HTTP/1.1 " + response.forward.partition(b" ")[2]
    return response


def _request_line(line: bytes, head: bytes) -> tuple[bytes, bytes, bool]:
    """Method, target, and whether it is HTTP/1.1 and not 1.0."""
    match = _REQUEST_LINE.fullmatch(line)
    if match is None or match[1] not in _METHODS:
        raise _request_line_refusal(line)
    _REQUEST_FIELDS.check(head)
    return _keep(_request_lines, line, (match[1], match[2], match[3] == b"1"))


def _request_line_refusal(line: bytes) -> RefusalError:
    parts = line.split(b" ")
    if len(parts) != 3:  # noqa: PLR2004 - method, target, version
        return RefusalError(400, "bad_request", f"malformed request line {shown(line)}")
    method, target, version = parts
    if version not in {b"HTTP/1.1", b"HTTP/1.0"}:
        return RefusalError(505, "version_not_supported", "only HTTP/1.1 and HTTP/1.0 are served")
    if method not in _METHODS:
        return RefusalError(501, "method_not_supported", f"method {shown(method, 40)} is not supported")
    return RefusalError(400, "bad_request", f"request target {shown(target)} must be a path, /... without #")


def _status_line(line: bytes, head: bytes) -> tuple[int, bool]:
    """Status, and whether it is HTTP/1.1 and not 1.0."""
    match = _STATUS_LINE.fullmatch(line)
    if match is None:
        raise RefusalError(502, "bad_engine_response", f"malformed status line {shown(line)}")
    _RESPONSE_FIELDS.check(head)
    return _keep(_status_lines, line, (int(match[2]), match[1] == b"1"))


def _keep(known: dict[bytes, Line], line: bytes, found: Line) -> Line:
    if len(line) <= _LONGEST_LINE:
        if len(known) >= _MOST_LINES:
            known.clear()
        known[line] = found
    return found


def _chunked(seen: Fields, *, http_1_1: bool) -> int:
    coding = seen[b"transfer-encoding"]
    if b"content-length" in seen or not http_1_1:
        raise RefusalError(400, "bad_request", "Transfer-Encoding does not go with Content-Length or HTTP/1.0")
    if coding != b"chunked":
        what = f"Transfer-Encoding {shown(coding)}"
        raise RefusalError(501, "coding_not_supported", f"{what}: only chunked is supported")
    return CHUNKED


def _response_length(seen: Fields, status: int, method: bytes) -> int:
    if method == b"HEAD" or status < 200 or status in {204, 304}:  # noqa: PLR2004 - no body by definition
        return 0
    if b"transfer-encoding" in seen:
        if b"content-length" in seen or seen[b"transfer-encoding"] != b"chunked":
            what = f"Transfer-Encoding {shown(seen[b'transfer-encoding'])}"
            raise RefusalError(502, "bad_engine_response", what)
        return CHUNKED
    return cast("int", seen.get(b"content-length", UNTIL_CLOSE))


def _connection(seen: Fields) -> tuple[AbstractSet[bytes], AbstractSet[bytes]]:
    """Connection options in lower case, and the names of the fields that end at this hop."""
    drop = _HOP_BY_HOP.intersection(seen)
    if b"connection" not in drop:
        return _NONE, drop
    options = frozenset(option.strip(b" \t") for option in cast("bytes", seen[b"connection"]).split(b","))
    stolen = options & _NOT_HOP_BY_HOP
    if stolen:
        raise RefusalError(400, "bad_request", f"Connection must not name {min(stolen).decode()}")
    return options, drop | options


def _without(lines: list[bytes], names: AbstractSet[bytes]) -> bytes:
    return b"\r\n".join([line for line in lines if line.partition(b":")[0].lower() not in names])
