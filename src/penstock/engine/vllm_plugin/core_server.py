"""An HTTP server inside the engine core's process, for control that must not wait behind tokens.

The API server's event loop is busy with every token of every stream. This one has a thread of its own, and hands what
it is asked to the core's loop. It listens where the API server does (`PENSTOCK_CONTROL_HOST`, else 127.0.0.1), on a
port that `/penstock/info` tells, and takes the same API key.
"""

from __future__ import annotations

import hmac
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson

from penstock.errors import PenstockError, StateError, TransferError, WeightsError

MAX_BODY = 64 * 2**20
"""A manifest of a 100k-tensor model is about 10 MB."""
IDLE_S = 300.0
"""After so many seconds without a request a connection is closed."""
WORK_S = 3600.0
"""Who asks has a deadline of its own; this one ends the thread of one that went away."""

_PIECE = 2**16

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

    Each connection has a thread of its own, in which a route may take its time.
    """

    def __init__(self, routes: Mapping[str, Route], keys: Sequence[str] = ()) -> None:
        taken = [f"Bearer {key}".encode() for key in keys]
        handler = type("_Handler", (_Handler,), {"routes": dict(routes), "keys": taken})
        host = os.environ.get("PENSTOCK_CONTROL_HOST", "127.0.0.1")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = type("_Server", (ThreadingHTTPServer,), {"address_family": family})
        self._server: ThreadingHTTPServer = server((host, 0), handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="penstock-control", daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    # Head and body in one packet: in two, the second waits 40 ms for the other end's delayed ACK.
    wbufsize = -1
    disable_nagle_algorithm = True
    routes: Mapping[str, Route]
    keys: Sequence[bytes]

    def do_POST(self) -> None:
        length = self.headers.get("content-length", "0")
        if not length.isdecimal():
            self.close_connection = True
            self._answer(400, {"error": f"a body says how many bytes it has, and not {length!r}"})
            return
        given = self.headers.get("authorization", "").encode()
        may = not self.keys or any(hmac.compare_digest(given, key) for key in self.keys)
        if not may or int(length) > MAX_BODY:
            self._skip(int(length))
            error = f"the body is larger than {MAX_BODY} bytes" if may else "Unauthorized"
            self._answer(400 if may else 401, {"error": error})
            return
        data = self.rfile.read(int(length))
        route = self.routes.get(self.path)
        if route is None:
            self._answer(404, {"error": f"no such route: POST {self.path}"})
            return
        try:
            body: Any = orjson.loads(data) if data else {}
            asked = route(body)
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            self._answer(400, {"error": f"malformed body: {error!r}"})
            return
        try:
            answer = asked.result(WORK_S)
        except Exception as error:  # noqa: BLE001 - whatever went wrong in the core, who asked has to know
            self._answer(*refusal(error))
        else:
            self._answer(200, answer)

    def _skip(self, length: int) -> None:
        """Read a body and keep nothing of it: to one that is still being sent, an answer may get lost."""
        while length > 0 and (piece := self.rfile.read(min(length, _PIECE))):
            length -= len(piece)

    def _answer(self, status: int, answer: Any) -> None:
        body = orjson.dumps(answer)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Silent: the one who asks logs."""
