"""An HTTP server inside the engine core's process, for control that must not wait behind tokens.

The API server's event loop is busy with every token of every stream. This one has a thread of its own, and hands what
it is asked to the core's loop. It listens where the API server does (`PENSTOCK_CONTROL_HOST`, else 127.0.0.1), on a
port that `/penstock/info` tells, and takes the same API key.
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

from penstock.errors import PenstockError, StateError, TransferError, WeightsError
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
"""Who asks has a deadline of its own; this one ends the thread of one that went away."""

_PIECE = 2**16
_MOST_DIGITS = 15
_BAD_LENGTH = "a body says how many bytes it has, in one Content-Length of digits and without Transfer-Encoding"

Route = Callable[[Any], Future[Any]]


def refusal(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and answer that say what went wrong. 400: nothing was changed; 409: not in this state; 500: anything."""
    if isinstance(error, WeightsError):
        return 400, {"error": str(error)}
    if isinstance(error, TransferError):
        return 409, {"error": str(error), "torn": True}
    if isinstance(error, StateError):
        return 409, {"error": str(error)}
    return 500, {"error": str(error) if isinstance(error, PenstockError) else repr(error)}


class CoreServer:
    """Answers `POST PATH` with what the route's future brings, or `refusal`.

    Each connection has a thread of its own, in which a route may take its time. One that has not shown the key has
    `STRANGER_S` seconds for its first request, and gives way to the next when there are `STRANGERS` of them.

    Args:
        routes: path to what is called with the body.
        keys: one of them is asked for.

    Raises:
        StateError: there is no key, so that the port would obey every user of the machine.
    """

    def __init__(self, routes: Mapping[str, Route], keys: Sequence[str]) -> None:
        if not keys:
            raise StateError("the engine core takes calls only from who has the API key, and there is none")
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
        """A connection that broke says nothing of us."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Timed(io.RawIOBase):
    """A connection to read from, until a time that holds for a whole request; `OSError` after it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._until = 0.0

    def allow(self, seconds: float) -> None:
        """From now on."""
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
        """One request, all of it by one deadline that begins with its first byte."""
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
        status, error = self._may(given)
        if status == 0:
            self._known = True
            self.strangers.remove(self.request)
            self._timed.allow(REQUEST_S)
        length = self._length(given)
        if status == 0 and (length is None or length > MAX_BODY):
            status, error = 400, _BAD_LENGTH if length is None else f"the body is larger than {MAX_BODY} bytes"
        if status:
            self.close_connection = True
            self._skip(min(length or 0, 2 * MAX_BODY))
            self._answer(status, {"error": error})
            return
        data = self.rfile.read(length)
        if len(data) != length:
            self.close_connection = True
            self._answer(400, {"error": f"the body ended after {len(data)} bytes, and Content-Length said {length}"})
            return
        self._do(data)

    def _do(self, data: bytes) -> None:
        route = self.routes.get(self.path)
        if route is None:
            self._answer(404, {"error": f"no such route: POST {self.path}"})
            return
        try:
            body: Any = orjson.loads(data) if data else {}
            asked = route(body)
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            self._answer(400, {"error": f"malformed body: {error!r}"})
            return
        try:
            answer = asked.result(WORK_S)
        except Exception as error:  # noqa: BLE001 - whatever went wrong in the core, who asked has to know
            self._answer(*refusal(error))
        else:
            self._answer(200, answer)

    def _may(self, fields: Sequence[tuple[bytes, bytes]]) -> tuple[int, str]:
        """Status and reason where this caller may not call; 0: it may."""
        if (why := cross_site(fields)) is not None:
            return 403, why
        given = next((value for name, value in fields if name == b"authorization"), b"")
        return (0, "") if has_key(given, self.keys) else (401, "Unauthorized")

    def _length(self, fields: Sequence[tuple[bytes, bytes]]) -> int | None:
        """Bytes of the body; None where that is not said, or in two ways."""
        said = [value.strip() for name, value in fields if name == b"content-length"]
        if any(name == b"transfer-encoding" for name, _ in fields) or len(said) > 1:
            return None
        if not said:
            return 0
        return int(said[0]) if said[0].isdigit() and len(said[0]) <= _MOST_DIGITS else None

    def _skip(self, length: int) -> None:
        """Read a body and keep nothing of it: to one that is still being sent, an answer may get lost."""
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
        """Silent: the one who asks logs."""
