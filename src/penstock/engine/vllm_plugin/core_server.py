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

from penstock.errors import StateError, TransferError

MAX_BODY = 2**20
IDLE_S = 300.0
"""After so many seconds without a request a connection is closed."""
WORK_S = 3600.0
"""Who asks has a deadline of its own; this one ends the thread of one that went away."""

Route = Callable[[Any], Future[Any]]


class CoreServer:
    """Answers `POST PATH` with what the route's future brings. 409: it cannot be done in this state."""

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
        if not length.isdecimal() or int(length) > MAX_BODY:
            self.close_connection = True
            self._answer(413, {"error": f"a body has at most {MAX_BODY} bytes, and says how many"})
            return
        data = self.rfile.read(int(length))
        given = self.headers.get("authorization", "").encode()
        if self.keys and not any(hmac.compare_digest(given, key) for key in self.keys):
            self._answer(401, {"error": "Unauthorized"})
            return
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
        except TransferError as error:
            self._answer(409, {"error": str(error), "torn": True})
        except StateError as error:
            self._answer(409, {"error": str(error)})
        except Exception as error:  # noqa: BLE001 - whatever went wrong in the core, who asked has to know
            self._answer(500, {"error": repr(error)})
        else:
            self._answer(200, answer)

    def _answer(self, status: int, answer: Any) -> None:
        body = orjson.dumps(answer)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Silent: the one who asks logs."""
