"""An HTTP server with its own threads, for control calls that must not wait behind tokens.

The event loops of an API server and of a router handle every token of every stream. An engine core and each process of
a router therefore have a port of this kind. A router's change still takes one turn of its loop; reading and refusing a
call take none. Callers with the key get through whatever others do.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson

from penstock.errors import PenstockError, StateError, TransferError, UserError
from penstock.guard import Strangers, cross_site, has_key, shut

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
_NO_FILE_S = 0.02
"""Seconds until the next try to accept a connection for which there is no descriptor."""

Route = Callable[[bytes], tuple[int, Any]]
"""Returns status and answer for a body, in the thread of its connection."""


def respond(begin: Callable[[], Future[Any]]) -> tuple[int, Any]:
    """Return status and answer of the work that `begin` begins, once it has ended."""
    try:
        begun = begin()
        error = begun.exception(WORK_S)
    except (PenstockError, TimeoutError) as refused:
        return refusal(refused)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as malformed:
        return 400, {"error": f"malformed body: {malformed!r}"}
    return (200, begun.result()) if error is None else refusal(error)


def refusal(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Return status and answer. 400: no change; 409: wrong state; 500: any other."""
    if isinstance(error, TransferError):
        return 409, {"error": str(error), "torn": True}
    status = 400 if isinstance(error, UserError) else 409 if isinstance(error, StateError) else 500
    return status, {"error": str(error) if isinstance(error, PenstockError) else repr(error)}


def encoded(answer: Any) -> tuple[bytes, str]:
    """Return an answer's bytes and their type: a text as it is, for Prometheus; any other as JSON."""
    if isinstance(answer, str):
        return answer.encode(), "text/plain; version=0.0.4; charset=utf-8"
    return orjson.dumps(answer), "application/json"


def listen(host: str, port: int, *, backlog: int = 128, shared: bool = False) -> socket.socket:
    """Return a socket that listens; port 0: any free one. OSError: the address cannot be used.

    `shared`: other sockets may listen on the port (SO_REUSEPORT).
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog, reuse_port=shared)


class ControlServer(ThreadingHTTPServer):
    """Answers each call, `METHOD PATH`, with the result of its route.

    Each connection has its own thread. If many connections lack the key, a new one replaces another of them. `keys`
    returns the keys of which a call must have one; none: the call is open to every user of the machine. `refuse_page`
    is `guard.cross_site`, perhaps with further names of this server.
    """

    daemon_threads = True

    def __init__(
        self,
        listening: socket.socket,
        routes: Mapping[str, Route],
        keys: Callable[[str], Sequence[str]],
        *,
        refuse_page: Callable[[Any], str | None] = cross_site,
        max_body: int = MAX_BODY,
    ) -> None:
        self.routes, self.keys, self.refuse_page, self.max_body = routes, keys, refuse_page, max_body
        self.strangers = Strangers(STRANGERS)
        self.deadlines: dict[socket.socket, float] = {}
        """For each connection, when it is shut."""
        super().__init__(listening.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.port: int = self.server_address[1]
        threading.Thread(target=self.serve_forever, name="penstock-control", daemon=True).start()

    def close(self) -> None:
        """Stop listening within half a second, and end every connection."""
        threading.Thread(target=self.shutdown, daemon=True).start()  # it waits for the server's loop
        self.server_close()  # no more: other processes may hold this socket and go on with it
        for connection in self.deadlines.copy():
            shut(connection)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(_NO_FILE_S)  # the connection keeps the socket readable, so this loop would spin
            raise

    def service_actions(self) -> None:
        """Shut each connection whose deadline has passed. The server calls this twice a second."""
        now = time.monotonic()
        for connection, deadline in self.deadlines.copy().items():
            if deadline <= now:
                shut(connection)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.strangers.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.strangers.remove(request)
        self.deadlines.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body go in one packet. In two, the second would wait 40 ms for the other side's delayed ACK.
    wbufsize = -1
    disable_nagle_algorithm = True
    server: ControlServer  # pyright: ignore[reportIncompatibleVariableOverride] - it makes no other
    _known = False

    def handle_one_request(self) -> None:
        """Serve one request. Its head has a deadline from its first byte on."""
        self._within(IDLE_S if self._known else STRANGER_S)
        self.close_connection = not self.rfile.peek(1)  # type: ignore[attr-defined] - it is buffered
        if not self.close_connection:
            self._within(REQUEST_S if self._known else STRANGER_S)
            super().handle_one_request()

    def _within(self, seconds: float) -> None:
        """Shut the connection after `seconds`, instead of at the previous deadline."""
        self.server.deadlines[self.connection] = time.monotonic() + seconds

    def do_POST(self) -> None:
        server, call = self.server, f"{self.command} {self.path.partition('?')[0]}"
        fields = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in self.headers.raw_items()]
        lengths = self.headers.get_all("Content-Length", ["0"])
        stated = len(lengths) == 1 and lengths[0].isdecimal() and "Transfer-Encoding" not in self.headers
        length = int(lengths[0]) if stated and len(lengths[0]) <= 15 else None  # noqa: PLR2004 - digits
        given, keys = self.headers.get("Authorization", ""), server.keys(call)
        if (why := server.refuse_page(fields)) is not None:
            self._refuse(403, why, length)
        elif keys and not has_key(given.encode("latin-1"), keys):
            what = "wrong for this call" if given else "missing"
            self._refuse(401, f"the key is {what}: send Authorization: Bearer KEY", length)
        elif length is None or length > server.max_body:
            larger = f"the body is larger than {server.max_body} bytes"
            how = "a body says how many bytes it has, in one Content-Length of digits and without Transfer-Encoding"
            self._refuse(400, how if length is None else larger, length)
        else:
            if keys:  # an open port knows nobody, so its connections stay few
                self._known = True
                server.strangers.remove(self.request)
            self._serve(call, length)

    def handle_expect_100(self) -> bool:
        """Ask for the body at once: the base class leaves that in the buffer, until the client gives up waiting."""
        super().handle_expect_100()
        self.wfile.flush()
        return True

    do_GET = do_PUT = do_POST  # noqa: N815 - the base class's names

    def _serve(self, call: str, length: int) -> None:
        self._within(REQUEST_S)
        data = self.rfile.read(length)
        self._within(WORK_S + REQUEST_S)
        if len(data) != length:
            self.close_connection = True
            self._answer(400, {"error": f"the body ended after {len(data)} bytes, and Content-Length said {length}"})
        elif (route := self.server.routes.get(call)) is None:
            self._answer(404, {"error": f"no such route: {call[:200]}"})
        else:
            self._answer(*route(data))

    def _refuse(self, status: int, why: str, length: int | None) -> None:
        """Read and drop the body, then answer, since a sending client may miss answers."""
        self.close_connection = True
        left = min(length or 0, 2 * MAX_BODY)
        while left > 0 and (piece := self.rfile.read(min(left, 2**16))):
            left -= len(piece)
        self._answer(status, {"error": why})

    def _answer(self, status: int, answer: Any) -> None:
        body, kind = encoded(answer)
        self._within(REQUEST_S)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Log nothing, because the caller logs."""
