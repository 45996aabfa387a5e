"""An HTTP server inside the engine core's process, for control that must not wait behind tokens.

The API server's event loop is busy with every token of every stream. This server has a thread of its own, and one
for each call. It listens where the API server does (`PENSTOCK_CONTROL_HOST`, else 127.0.0.1), and takes the same API
key.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import orjson
from aiohttp import web

from penstock.errors import EngineError, PenstockError, StateError, TransferError, WeightsError
from penstock.guard import cross_site, has_key
from penstock.plugin.patches import attempt

MAX_BODY = 64 * 2**20
"""A manifest of a 100k-tensor model is about 10 MB."""
IDLE_S = 300.0
"""After so many seconds without a request a connection is closed."""
BODY_S = 60.0
"""Deadline of one request's body."""
STRANGER_S, STRANGERS = 10.0, 32
"""Seconds that a connection has for its first head, and how many there may be that have not shown the key: the oldest
gives way to the next."""

Route = Callable[[Any], Future[Any]]


class RefusedError(EngineError):
    """A core's answer that is no success: its status and body."""

    def __init__(self, reply: tuple[int, Any]) -> None:
        super().__init__(str(reply))
        self.reply = reply


def respond(route: Route, data: bytes) -> Future[tuple[int, Any]]:
    """Call a route for a body in JSON, in a thread; the future has status and answer, once the work has ended."""
    reply: Future[tuple[int, Any]] = Future()

    def over(asked: Future[Any]) -> None:
        error = asked.exception()
        reply.set_result((200, asked.result()) if error is None else refusal(error))

    def begin() -> None:
        asked, error = attempt(lambda: route(orjson.loads(data) if data else {}), "a call of the engine core")
        if error is None:
            asked.add_done_callback(over)
        elif isinstance(error, (KeyError, TypeError, ValueError, OverflowError, RecursionError)):
            reply.set_result((400, {"error": f"malformed body: {error!r}"}))
        else:
            reply.set_result(refusal(error))

    threading.Thread(target=begin, name="penstock-route", daemon=True).start()
    return reply


def refusal(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Status and answer for an error. 400: nothing was changed; 409: not in this state; 500: anything."""
    if isinstance(error, TransferError):
        return 409, {"error": str(error), "torn": True}
    status = 400 if isinstance(error, WeightsError) else 409 if isinstance(error, StateError) else 500
    return status, {"error": str(error) if isinstance(error, PenstockError) else repr(error)}


class CoreServer:
    """Answers `POST PATH` with what the route of that path returns, to callers with one of `keys`.

    Raises:
        StateError: there is no key, so that the port would obey every user of the machine.
    """

    def __init__(self, routes: Mapping[str, Route], keys: Sequence[str]) -> None:
        if not keys:
            raise StateError("the engine core takes calls only with the API key, and there is none")
        self._routes = routes
        self._keys = keys
        self._strangers: dict[Any, asyncio.TimerHandle] = {}
        """Connections that have not shown the key, and what ends each."""
        host = os.environ.get("PENSTOCK_CONTROL_HOST", "127.0.0.1")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, 0), family=family, backlog=128)
        self.port: int = listening.getsockname()[1]
        serve = self._serve(listening)
        threading.Thread(target=asyncio.run, args=(serve,), name="penstock-control", daemon=True).start()

    async def _serve(self, listening: socket.socket) -> None:
        server, loop = web.Server(self._answer, access_log=None, keepalive_timeout=IDLE_S), asyncio.get_running_loop()

        def connection() -> asyncio.Protocol:
            made = server()
            self._strangers[made] = loop.call_later(STRANGER_S, self._end, made)
            if len(self._strangers) > STRANGERS:
                self._end(next(iter(self._strangers)))
            return made

        await loop.create_server(connection, sock=listening)
        await asyncio.Event().wait()

    def _end(self, stranger: Any) -> None:
        self._strangers.pop(stranger).cancel()
        # Of many at once, the oldest has no transport before the next turn of the loop.
        asyncio.get_running_loop().call_soon(stranger.force_close)

    async def _answer(self, http: web.BaseRequest) -> web.Response:
        fields = [(name.lower(), value) for name, value in http.raw_headers]
        key = next((value for name, value in fields if name == b"authorization"), b"")
        if (why := cross_site(fields)) is not None:
            status, answer = 403, {"error": why}
        elif not has_key(key, self._keys):
            status, answer = 401, {"error": "Unauthorized"}
        else:
            if (waiting := self._strangers.pop(http.protocol, None)) is not None:
                waiting.cancel()
            status, answer = await self._called(http)
        response = web.Response(status=status, body=orjson.dumps(answer), content_type="application/json")
        if http.protocol in self._strangers:
            response.force_close()
        return response

    async def _called(self, http: web.BaseRequest) -> tuple[int, Any]:
        route = self._routes.get(http.path) if http.method == "POST" else None
        if route is None:
            return 404, {"error": f"no such route: {http.method} {http.path}"}
        data = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for piece in http.content.iter_any():
                    data += piece
                    if len(data) > MAX_BODY:
                        return 400, {"error": f"the body is larger than {MAX_BODY} bytes"}
        except TimeoutError:
            http.protocol.force_close()
            return 408, {"error": f"no whole body within {BODY_S:g} s"}
        return await asyncio.wrap_future(respond(route, bytes(data)))
