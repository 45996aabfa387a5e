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

_METHODS_REFUSED = {b"CONNECT", b"TRACE", b"PRI"}
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

# In each pattern a line's first letter decides on the branch: else each line is tried against every name.
_HOP_NAMES = (
    rb"[cC](?i:onnection|ontent-length)|[kK](?i:eep-alive)|[tT](?i:e|ransfer-encoding)|[uU](?i:pgrade)|"
    rb"[pP](?i:roxy-(?:connection|authorization))|[hH](?i:ttp2-settings"
)
_VALUE = rb"):[ \t]*([^\r]*[^\r \t]|)"
_REQUEST_FIELDS = re.compile(
    rb"\n(" + _HOP_NAMES + rb"|ost)|[eE](?i:xpect)|[aA](?i:uthorization)|"
    rb"[xX](?i:-(?:session-id|group-id|weight-version|prompt-tokens|expected-tokens|adapter|prefix-hashes))" + _VALUE
)
_RESPONSE_FIELDS = re.compile(rb"\n(" + _HOP_NAMES + rb")" + _VALUE)
"""Name and value of the fields that are looked at, in a head whose syntax llhttp has checked."""
_REQUEST_LINE = re.compile(rb"([A-Z-]+) (/[!-~]*) HTTP/1\.([01])\r\n")


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
    _check_syntax(httptools.HttpRequestParser(None), head)
    line = _REQUEST_LINE.match(head)
    if line is None:
        raise _request_line_refusal(head)
    seen = _fields(_REQUEST_FIELDS, head)
    request = RequestHead()
    method, request.target, minor = line.groups()
    if method in _METHODS_REFUSED:
        raise _request_line_refusal(head)
    request.method = method
    request.forward = head
    if b"transfer-encoding" in seen:
        request.length = _chunked(seen, http_1_1=minor == b"1")
    elif b"content-length" in seen:
        request.length = _whole_number("Content-Length", seen[b"content-length"])
    if b"x-session-id" in seen:
        request.session_id = _text("X-Session-ID", seen[b"x-session-id"], _MAX_ID)
    if not _HINTS.isdisjoint(seen):
        _hints(request, seen)
    if b"authorization" in seen:
        request.authorization = seen[b"authorization"]
    if minor == b"0" or b"host" not in seen or b"expect" in seen or not _HOP_BY_HOP.isdisjoint(seen):
        _rewrite(request, seen, http_1_1=minor == b"1")
    return request


def _hints(request: RequestHead, seen: dict[bytes, bytes]) -> None:
    """What the client says for its placement, besides its session."""
    if b"x-group-id" in seen:
        request.group_id = _text("X-Group-ID", seen[b"x-group-id"], _MAX_ID)
    if b"x-weight-version" in seen:
        request.min_weight_version = _whole_number("X-Weight-Version", seen[b"x-weight-version"])
    if b"x-prompt-tokens" in seen:
        request.prompt_tokens = _whole_number("X-Prompt-Tokens", seen[b"x-prompt-tokens"])
    if b"x-expected-tokens" in seen:
        request.expected_tokens = _whole_number("X-Expected-Tokens", seen[b"x-expected-tokens"])
    if b"x-adapter" in seen:
        request.adapter = _text("X-Adapter", seen[b"x-adapter"], _MAX_ADAPTER)
    if b"x-prefix-hashes" in seen:
        request.prefix_hashes = seen[b"x-prefix-hashes"]


def _rewrite(request: RequestHead, seen: dict[bytes, bytes], *, http_1_1: bool) -> None:
    """Leave out what ends at this hop, and tell the engine in HTTP/1.1."""
    if http_1_1 and b"host" not in seen:
        raise RefusalError(400, "bad_request", "header Host is missing")
    request.as_it_came = False
    request.http_1_1 = http_1_1
    options, drop = _connection(seen)
    request.keep_alive = b"close" not in options if http_1_1 else b"keep-alive" in options
    if b"expect" in seen:
        if seen[b"expect"].lower() != b"100-continue":
            raise RefusalError(417, "bad_expectation", f"cannot meet Expect: {seen[b'expect'][:80]!r}")
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
    parser = httptools.HttpResponseParser(None)
    _check_syntax(parser, head)
    seen = _fields(_RESPONSE_FIELDS, head)
    response = ResponseHead()
    status = response.status = parser.get_status_code()
    response.length = _response_length(seen, status, method)
    response.forward = head
    if head.startswith(b"HTTP/1.1 ") and _HOP_BY_HOP.isdisjoint(seen):
        response.keep_alive = response.as_it_came = True
        return response
    response.as_it_came = False
    options, drop = _connection(seen)
    http_1_1 = head.startswith(b"HTTP/1.1 ")
    response.keep_alive = b"close" not in options if http_1_1 else b"keep-alive" in options
    if drop:
        response.forward = _without(head.split(b"\r\n"), drop)
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


def _fields(pattern: re.Pattern[bytes], head: bytes) -> dict[bytes, bytes]:
    """Values of the fields that `pattern` looks for, by name in lower case."""
    found = pattern.findall(head)
    seen = {name.lower(): value for name, value in found}
    return seen if len(seen) == len(found) else _joined(found)


def _joined(found: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Fields of which one occurs more than once: only those that end at this hop may."""
    seen: dict[bytes, bytes] = {}
    for spelt, value in found:
        name = spelt.lower()
        if name in seen and name not in _HOP_BY_HOP:
            raise RefusalError(400, "bad_request", f"header {name.decode()} occurs more than once")
        seen[name] = seen[name] + b"," + value if name in seen else value
    return seen


def _text(field: str, value: bytes, limit: int) -> str | None:
    if len(value) > limit:
        code = "bad_session_id" if field == "X-Session-ID" else "bad_request"
        raise RefusalError(400, code, f"{field} has {len(value)} bytes, over the limit of {limit}")
    return value.decode("latin-1") or None


def _request_line_refusal(head: bytes) -> RefusalError:
    line = head.partition(b"\r\n")[0]
    parts = line.split(b" ")
    if len(parts) != 3:  # noqa: PLR2004 - method, target, version
        return RefusalError(400, "bad_request", f"malformed request line {line[:80]!r}")
    method, target, version = parts
    if version not in {b"HTTP/1.1", b"HTTP/1.0"}:
        return RefusalError(505, "version_not_supported", "only HTTP/1.1 and HTTP/1.0 are served")
    if method in _METHODS_REFUSED:
        return RefusalError(501, "method_not_supported", f"method {method.decode()} is not supported")
    return RefusalError(400, "bad_request", f"request target {target[:80]!r} must be a path that begins with /")


def _chunked(seen: dict[bytes, bytes], *, http_1_1: bool) -> int:
    coding = seen[b"transfer-encoding"]
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
