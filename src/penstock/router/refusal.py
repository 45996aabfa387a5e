"""What the router answers itself: an error a client can tell from an engine's by its `X-Penstock-Error` header."""

from __future__ import annotations

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
