"""HTTP/1.1 of the router: its own answers, and heads of requests.

The router writes each head from the parsed fields, so an engine or a client reads only what the router understood. The
checks follow RFC 9112 (sections 2.2, 3, 5, 6) and RFC 9110 (7.6.1), in their strict reading.

A request goes to the engine whole, with its length. Forms that no present client sends are errors: HTTP/1.0, and
requests sent ahead of an answer. `answer.py` reads what engines send.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import orjson

from penstock.errors import PenstockError
from penstock.router.policies import Hints

_TYPES = {401: "authentication_error", 403: "permission_error", 408: "timeout_error"}
_JSON = "application/json"
_EXTRA_FIELDS = {401: "WWW-Authenticate: Bearer\r\n", 503: "Retry-After: 5\r\n"}


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
        server = self.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        kind = _TYPES.get(self.status, "server_error" if server else "invalid_request_error")
        content = orjson.dumps({"error": {"message": str(self), "type": kind, "code": self.code}})
        extra = f"X-Penstock-Error: {self.code}\r\n{_EXTRA_FIELDS.get(self.status, '')}"
        return response(self.status, content, extra=extra, close=close, head_only=head_only)


def response(
    status: int, content: bytes, *, content_type: str = _JSON, extra: str = "", close: bool, head_only: bool
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

Field = tuple[bytes, bytes]

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]++"  # possessive: no head is read twice
_REQUEST_LINE = re.compile(rb"(" + _TOKEN + rb") ([^\0- \x7f]+) HTTP/(\d\.\d)\r\n")
_FIELD = re.compile(rb"(?<=\n)(" + _TOKEN + rb"):[ \t]*+([\t -~\x80-\xff]*+)\r\n")
_METHODS = {b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"}
_TARGET = re.compile(rb"/[!\"$-~]*")
"""No fragment (RFC 9112, 3.2.1), nothing outside ASCII."""
_HOST = re.compile(rb"[0-9A-Za-z._:\[\]%-]*")
_NOT_HOP_BY_HOP = {b"content-length", b"transfer-encoding", b"host", b"authorization", b"trailer"}
LONGEST_KNOWN, _MOST_KNOWN = 1024, 1024
_known: dict[bytes, RequestHead] = {}  # equal heads are parsed once
_MAX_DIGITS = 15
_MAX_ID = 512


def malformed(what: str, status: int = 400, code: str = "bad_request") -> RefusalError:
    """Return the refusal of a head or a body that breaks a rule of HTTP."""
    return RefusalError(status, code, what)


def _whole_number(field: str, value: bytes) -> int:
    if not value.isdigit() or len(value) > _MAX_DIGITS:
        raise malformed(f"{field} must be a whole number, got {shown(value, 40)}")
    return int(value)


def _text(field: str, value: bytes) -> str | None:
    if len(value) > _MAX_ID:
        raise malformed(f"{field} has {len(value)} bytes, over the limit of {_MAX_ID}")
    try:
        return value.decode() or None  # clients send non-ASCII names as UTF-8, and so do admin calls
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _host(value: bytes) -> bytes:
    if not _HOST.fullmatch(value):
        raise malformed(f"Host {shown(value)} is not a host name with a port")
    return value


_Role = tuple[str, Callable[[bytes], bytes | int | str | None], bool]
"""A field that the router reads: its attribute, the function for its value, and whether the field goes on."""
GOES_ON, _ENDS_HERE = True, False
_HOP_BY_HOP = b"keep-alive proxy-connection proxy-authorization te upgrade http2-settings"
FRAMING: dict[bytes, _Role] = {
    b"content-length": ("content_length", partial(_whole_number, "Content-Length"), _ENDS_HERE),
    b"transfer-encoding": ("transfer_encoding", bytes.lower, _ENDS_HERE),
    b"connection": ("connection", bytes.lower, _ENDS_HERE),
    **dict.fromkeys(_HOP_BY_HOP.split(), ("hop_by_hop", bytes, _ENDS_HERE)),
}
_LISTS = {"connection", "hop_by_hop"}
"""Fields that may occur more than once."""
_REQUEST_ROLES = FRAMING | {
    b"host": ("host", _host, GOES_ON),
    b"expect": ("expect", bytes.lower, _ENDS_HERE),  # the router itself sends 100-continue
    b"trailer": ("trailer", bytes, _ENDS_HERE),  # chunked bodies go on whole, without trailers
    b"authorization": ("authorization", bytes, _ENDS_HERE),  # the router's key; an engine gets its own
    b"x-api-key": ("x_api_key", bytes, _ENDS_HERE),
    b"x-data-parallel-rank": ("dp_rank", bytes, _ENDS_HERE),  # the membership decides it
    b"x-session-id": ("session_id", partial(_text, "X-Session-ID"), GOES_ON),
    b"x-group-id": ("group_id", partial(_text, "X-Group-ID"), GOES_ON),
    b"x-weight-version": ("min_weight_version", partial(_whole_number, "X-Weight-Version"), GOES_ON),
    b"x-prompt-tokens": ("prompt_tokens", partial(_whole_number, "X-Prompt-Tokens"), GOES_ON),
    b"x-expected-tokens": ("expected_tokens", partial(_whole_number, "X-Expected-Tokens"), GOES_ON),
    b"x-prefix-hashes": ("prefix_hashes", bytes, GOES_ON),
    b"origin": ("origin", bytes, GOES_ON),
    b"traceparent": ("traceparent", bytes, GOES_ON),
}


@dataclass(frozen=True, init=False, eq=False)
class Head:
    """The common part of requests and responses. Equal messages share one, so what one request changes is elsewhere."""

    keep_alive: bool = True
    length: int = 0
    """Bytes of body, or CHUNKED."""
    fields: bytes = b""
    """Whole lines to pass on, without those for framing and connection."""
    framing: bytes = b""
    """The line for the body's length, if there is one."""

    def __init__(self, read: Mapping[str, Any]) -> None:
        """Set the attributes that the message gives; the others have the class's defaults, to save time."""
        self.__dict__.update(read)


@dataclass(frozen=True, init=False, eq=False)
class RequestHead(Head, Hints):
    """A checked request head. See `parse_request`."""

    method: bytes = b""
    target: bytes = b""
    host: bytes | None = None
    expect: bytes | None = None
    """`100-continue` or None."""
    authorization: bytes = b""
    origin: bytes | None = None
    """`Origin`: the web page for which a browser sends this request."""
    traceparent: bytes = b""

    def to_engine(self, size: int, extra: bytes = b"") -> bytes:
        """Return the head for an engine, before `size` bytes; `extra`: lines for it alone."""
        framing = self.framing if self.length != CHUNKED else b"Content-Length: %d\r\n" % size
        return b"%b %b HTTP/1.1\r\n%b%b%b\r\n" % (self.method, self.target, extra, self.fields, framing)


def parse_request(head: bytes) -> RequestHead:
    """Parse and check one head, from the request line to the empty line.

    Raises:
        RefusalError: with status 400, 417, 501 or 505.
    """
    if (known := _known.get(head)) is not None:
        return known
    request, low = _request(head), head.lower()
    # Not kept: secrets, and counts of tokens, which are seldom equal.
    own = b"auth" in low or b"key" in low or b"cookie" in low or b"tokens" in low or b"?" in low
    if not own and len(head) <= LONGEST_KNOWN:
        if len(_known) == _MOST_KNOWN:
            _known.clear()
        _known[head] = request
    return request


def _request(head: bytes) -> RequestHead:
    line = _REQUEST_LINE.match(head)
    if line is None:
        raise malformed(f"malformed head: the request line is {shown(head.splitlines()[0])}")
    method, target, version = line.groups()
    if version != b"1.1":
        raise malformed("only HTTP/1.1 is served (of nginx: proxy_http_version 1.1)", 505, "version_not_supported")
    if method not in _METHODS:
        raise malformed(f"method {shown(method, 40)} is not supported", 501, "method_not_supported")
    if not _TARGET.fullmatch(target):
        raise malformed(f"request target {shown(target)} must be a path, /... without #")
    read = read_fields(head, line.end(), _REQUEST_ROLES)
    if "host" not in read:
        raise malformed("header Host is missing")
    if (expect := read.get("expect")) is not None and expect != b"100-continue":
        raise malformed(f"cannot meet Expect: {shown(expect)}", 417, "bad_expectation")
    return RequestHead(read | {"method": method, "target": target})


def read_fields(head: bytes, start: int, roles: Mapping[bytes, _Role]) -> dict[str, Any]:
    """Return attributes of a head: those that its fields at `start` give, and those of `_finish`."""
    fields: list[Field] = _FIELD.findall(head, start)
    if head.count(b"\n") != len(fields) + 2:  # plus the first line and the empty one
        raise malformed("malformed head: a line is not one header field")
    read: dict[str, Any] = {}
    kept: list[Field] = []
    for field in fields:
        name = field[0].lower()
        if name in roles:
            attribute, make, goes_on = roles[name]
            value = make(field[1].rstrip(b" \t"))
            if attribute in read:
                if attribute not in _LISTS:
                    raise malformed(f"header {name.decode()} occurs more than once")
                value = b"%b,%b" % (read[attribute], value)
            read[attribute] = value
            if not goes_on:
                continue
        kept.append(field)
    _finish(read, kept)
    return read


def _finish(read: dict[str, Any], fields: list[Field]) -> None:
    """Add `keep_alive`, the body's length and framing, and the lines to pass on."""
    coding, length = read.get("transfer_encoding"), read.get("content_length")
    if (connection := read.get("connection")) is not None:
        # Empty elements of the list mean nothing (RFC 9110, 5.6.1.2).
        options = {option.strip(b" \t") for option in connection.split(b",")} - {b""}
        if stolen := options & _NOT_HOP_BY_HOP:
            raise malformed(f"Connection must not name {min(stolen).decode()}")
        read["keep_alive"] = b"close" not in options
        fields = [field for field in fields if field[0].lower() not in options]
    read["fields"] = b"\r\n".join([*map(b": ".join, fields), b""])
    if coding is not None:
        if length is not None:
            raise malformed("Transfer-Encoding does not go with Content-Length")
        if coding != b"chunked":
            what = f"Transfer-Encoding {shown(coding)}"
            raise malformed(f"{what}: only chunked is supported", 501, "coding_not_supported")
        read["length"], read["framing"] = CHUNKED, b"Transfer-Encoding: chunked\r\n"
    elif length is not None:
        read["length"], read["framing"] = length, b"Content-Length: %d\r\n" % length
