"""An HTTP server inside the engine core's process, for control that must not wait behind tokens.

The API server's event loop is busy with every token of every stream. This server has threads of its own. It listens
where the API server does (`PENSTOCK_CONTROL_HOST`, else 127.0.0.1), and takes the same API key.
"""

from __future__ import annotations

import io
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson

from penstock.errors import EngineError, PenstockError, StateError, TransferError, WeightsError
from penstock.guard import Strangers, cross_site, has_key

MAX_BODY = 64 * 2**20
"""A manifest of a 100k-tensor model is about 10 MB."""
IDLE_S = 300.0
"""After so many seconds without a request a connection is closed."""
REQUEST_S = 60.0
"""Deadline of one request's head and body, and of sending its answer."""
STRANGER_S, STRANGERS = 10.0, 32
"""Seconds that a connection has for its first request, and how many there may be that have not shown the key."""
WORK_S = 3600.0
"""Ends the thread of a call whose caller went away; callers have deadlines of their own."""

_PIECE = 2**16
_MOST_DIGITS = 15
_BAD_LENGTH = "a body says how many bytes it has, in one Content-Length of digits and without Transfer-Encoding"

Route = Callable[[Any], Future[Any]]


def respond(route: Route, data: bytes) -> tuple[int, Any]:
    """Status and answer of a route for a body in JSON, once its work has ended."""
    try:
        asked = route(orjson.loads(data) if data else {})
        error = asked.exception(WORK_S)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as malformed:
        return 400, {"error": f"malformed body: {malformed!r}"}
    except (PenstockError, TimeoutError) as refused:
        return refusal(refused)
    return (200, asked.result()) if error is None else refusal(error)


class RefusedError(EngineError):
    """A core's answer that is no success."""

    def __init__(self, reply: tuple[int, Any]) -> None:
        super().__init__(str(reply))
        self.reply = reply


def refusal(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Status and answer for an error. 400: nothing was changed; 409: not in this state; 500: anything."""
    if isinstance(error, WeightsError):
        return 400, {"error": str(error)}
    if isinstance(error, TransferError):
        return 409, {"error": str(error), "torn": True}
    if isinstance(error, StateError):
        return 409, {"error": str(error)}
    return 500, {"error": str(error) if isinstance(error, PenstockError) else repr(error)}


class CoreServer:
    """Answers `POST PATH` with what the route of that path returns, to callers with one of `keys`.

    Each connection has a thread of its own. One without the key has `STRANGER_S` seconds for its first request, and
    gives way to the next when there are `STRANGERS` of them.

    Raises:
        StateError: there is no key, so that the port would obey every user of the machine.
    """

    def __init__(self, routes: Mapping[str, Route], keys: Sequence[str]) -> None:
        if not keys:
            raise StateError("the engine core takes calls only with the API key, and there is none")
        strangers = Strangers(STRANGERS)
        handler = type("_Handler", (_Handler,), {"routes": dict(routes), "keys": tuple(keys), "strangers": strangers})
        host = os.environ.get("PENSTOCK_CONTROL_HOST", "127.0.0.1")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = type("_Server", (_Server,), {"address_family": family, "strangers": strangers})
        self._server: ThreadingHTTPServer = server((host, 0), handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="penstock-control", daemon=True).start()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    strangers: Strangers

    def process_request(self, request: Any, client_address: Any) -> None:
        self.strangers.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.strangers.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Pass over connections that broke."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Timed(io.RawIOBase):
    """Reads from a connection until a deadline of the whole request; `OSError` after it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._until = 0.0

    def allow(self, seconds: float) -> None:
        """Move the deadline so many seconds from now."""
        self._until = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request did not come in time")
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body in one packet: in two, the second waits 40 ms for the other end's delayed ACK.
    wbufsize = -1
    disable_nagle_algorithm = True
    routes: Mapping[str, Route]
    keys: Sequence[str]
    strangers: Strangers

    def setup(self) -> None:
        super().setup()
        self._timed = _Timed(self.connection)
        self.rfile = self._buffered = io.BufferedReader(self._timed, _PIECE)
        self._known = False

    def handle_one_request(self) -> None:
        """Read one request by a deadline that begins with its first byte."""
        try:
            self._timed.allow(IDLE_S if self._known else STRANGER_S)
            if not self._buffered.peek(1):
                self.close_connection = True
                return
            self._timed.allow(REQUEST_S if self._known else STRANGER_S)
            super().handle_one_request()
        except TimeoutError:
            self.close_connection = True

    def do_POST(self) -> None:
        given = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in self.headers.raw_items()]
        length = self._length(given)
        status, error = self._refusal(given, length)
        if status:
            self.close_connection = True
            self._skip(min(length or 0, 2 * MAX_BODY))
            self._answer(status, {"error": error})
            return
        data = self.rfile.read(length)
        if len(data) != length:
            self.close_connection = True
            self._answer(400, {"error": f"the body ended after {len(data)} bytes, and Content-Length said {length}"})
        elif (route := self.routes.get(self.path)) is None:
            self._answer(404, {"error": f"no such route: POST {self.path}"})
        else:
            self._answer(*respond(route, data))

    def _refusal(self, fields: Sequence[tuple[bytes, bytes]], length: int | None) -> tuple[int, str]:
        """Status and reason if this caller may not call, or not with such a body; 0: it may."""
        if (why := cross_site(fields)) is not None:
            return 403, why
        if not has_key(next((value for name, value in fields if name == b"authorization"), b""), self.keys):
            return 401, "Unauthorized"
        self._known = True
        self.strangers.remove(self.request)
        self._timed.allow(REQUEST_S)
        if length is None:
            return 400, _BAD_LENGTH
        return (400, f"the body is larger than {MAX_BODY} bytes") if length > MAX_BODY else (0, "")

    def _length(self, fields: Sequence[tuple[bytes, bytes]]) -> int | None:
        """Bytes of the body; None if the head does not say, or says it in two ways."""
        said = [value.strip() for name, value in fields if name == b"content-length"]
        if any(name == b"transfer-encoding" for name, _ in fields) or len(said) > 1:
            return None
        if not said:
            return 0
        return int(said[0]) if said[0].isdigit() and len(said[0]) <= _MOST_DIGITS else None

    def _skip(self, length: int) -> None:
        """Read a body and keep nothing of it: a client that is still sending may lose the answer."""
        while length > 0 and (piece := self.rfile.read(min(length, _PIECE))):
            length -= len(piece)

    def _answer(self, status: int, answer: Any) -> None:
        body = orjson.dumps(answer)
        self.connection.settimeout(REQUEST_S)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Log nothing: the caller does."""
