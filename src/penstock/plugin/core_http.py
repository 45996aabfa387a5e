"""An HTTP server inside the engine core's process, for control calls that must not wait behind tokens.

The API server's event loop handles every token of every stream. This server has its own threads. It listens on the
API server's address (`PENSTOCK_CONTROL_HOST`, else 127.0.0.1), and takes the same API key.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, cast

import orjson

from penstock.errors import EngineError, PenstockError, StateError, TransferError, WeightsError
from penstock.guard import Strangers, cross_site, has_key, shut

if TYPE_CHECKING:
    from io import BufferedReader

MAX_BODY = 64 * 2**20
"""Most bytes of a body. The manifest of a model with 100k tensors has about 10 MB."""
IDLE_S = 300.0
"""Seconds without a request after which a connection is closed."""
REQUEST_S = 60.0
"""Deadline in seconds for a request's head, for its body, and for sending its answer."""
STRANGER_S, STRANGERS = 10.0, 32
"""Seconds that a connection has for its first request, and most connections that have not shown the key."""
WORK_S = 3600.0
"""Seconds after which the thread of an abandoned call ends. Callers have their own deadlines."""

Route = Callable[[Any], Future[Any]]


class RefusedError(EngineError):
    """A core's answer that is not a success, with status and body."""

    def __init__(self, reply: tuple[int, Any]) -> None:
        super().__init__(str(reply))
        self.reply = reply


def respond(route: Route, data: bytes) -> tuple[int, Any]:
    """Return status and answer of a route for a JSON body, once its work has ended."""
    try:
        asked = route(orjson.loads(data) if data else {})
        error = asked.exception(WORK_S)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as malformed:
        return 400, {"error": f"malformed body: {malformed!r}"}
    except (PenstockError, TimeoutError) as refused:
        return refusal(refused)
    return (200, asked.result()) if error is None else refusal(error)


def refusal(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Return status and answer. 400: no change; 409: wrong state; 500: any other."""
    if isinstance(error, TransferError):
        return 409, {"error": str(error), "torn": True}
    status = 400 if isinstance(error, WeightsError) else 409 if isinstance(error, StateError) else 500
    return status, {"error": str(error) if isinstance(error, PenstockError) else repr(error)}


class CoreServer:
    """Answers `POST PATH` with the result of the route for that path, to callers with one of `keys`.

    Each connection has its own thread. If many connections lack the key, a new one replaces another of them.

    Raises:
        StateError: there is no key, so the port would obey every user of the machine.
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
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body go in one packet. In two, the second would wait 40 ms for the other side's delayed ACK.
    wbufsize = -1
    disable_nagle_algorithm = True
    routes: Mapping[str, Route]
    keys: Sequence[str]
    strangers: Strangers

    def setup(self) -> None:
        super().setup()
        self._known = False
        self._deadline: threading.Timer | None = None

    def handle_one_request(self) -> None:
        """Serve one request. Its head has a deadline from its first byte on."""
        self.connection.settimeout(IDLE_S if self._known else STRANGER_S)
        try:
            self.close_connection = not cast("BufferedReader", self.rfile).peek(1)
            if not self.close_connection:
                self._allow(REQUEST_S if self._known else STRANGER_S)
                super().handle_one_request()
        except TimeoutError:
            self.close_connection = True
        finally:
            self._allow(None)

    def _allow(self, seconds: float | None) -> None:
        """Shut the connection after `seconds`, instead of at the previous deadline; None: never."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else threading.Timer(seconds, shut, (self.connection,))
        if self._deadline is not None:
            self._deadline.daemon = True
            self._deadline.start()

    def do_POST(self) -> None:
        fields = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in self.headers.raw_items()]
        lengths = self.headers.get_all("Content-Length", ["0"])
        stated = len(lengths) == 1 and lengths[0].isdecimal() and "Transfer-Encoding" not in self.headers
        length = int(lengths[0]) if stated and len(lengths[0]) <= 15 else None  # noqa: PLR2004 - digits
        if (why := cross_site(fields)) is not None:
            self._refuse(403, why, length)
        elif not has_key(self.headers.get("Authorization", "").encode("latin-1"), self.keys):
            self._refuse(401, "Unauthorized", length)
        elif length is None or length > MAX_BODY:
            larger = f"the body is larger than {MAX_BODY} bytes"
            how = "a body says how many bytes it has, in one Content-Length of digits and without Transfer-Encoding"
            self._refuse(400, how if length is None else larger, length)
        else:
            self._known = True
            self.strangers.remove(self.request)
            self._serve(length)

    def _serve(self, length: int) -> None:
        self._allow(REQUEST_S)
        data = self.rfile.read(length)
        self._allow(None)
        if len(data) != length:
            self.close_connection = True
            self._answer(400, {"error": f"the body ended after {len(data)} bytes, and Content-Length said {length}"})
        elif (route := self.routes.get(self.path)) is None:
            self._answer(404, {"error": f"no such route: POST {self.path}"})
        else:
            self._answer(*respond(route, data))

    def _refuse(self, status: int, why: str, length: int | None) -> None:
        """Read and drop the body, then answer, since a sending client may miss answers."""
        self.close_connection = True
        left = min(length or 0, 2 * MAX_BODY)
        while left > 0 and (piece := self.rfile.read(min(left, 2**16))):
            left -= len(piece)
        self._answer(status, {"error": why})

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
        """Log nothing, because the caller logs."""
