"""Calls to another process of the same user: JSON over HTTP on a Unix socket, both sides.

`POST PREFIX/CALL` takes a JSON object of arguments. It answers 200 with `{"result": ...}`, or with
`{"error": {"type", "message", ...}}`, which the client raises as the same error.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Self, cast

import orjson
from aiohttp import web

from penstock.checks import parse_json, reading
from penstock.errors import EngineError, PenstockError, UserError
from penstock.http import HttpTransport
from penstock.start_report import error_from_json, error_to_json

MAX_BODY = 64 * 2**20
"""Most bytes of a body; the manifest of a model with 100,000 tensors has about 10 MB."""

Call = Callable[..., Awaitable[Any]]


CALL_S = 24 * 3600.0
"""Deadline of a call that runs an operation; each step has its own deadline in the other process."""


class CallServer:
    """Serves `calls` on a Unix socket; each takes its arguments by keyword."""

    def __init__(self, prefix: str, calls: Mapping[str, Call]) -> None:
        self._calls = calls
        self.app = web.Application(client_max_size=MAX_BODY)
        """The application; add further paths before `start`."""
        self.app.router.add_post(prefix + "/{call}", self._answer)
        # A call that has begun runs to its end, even if its caller is gone.
        self._runner = web.AppRunner(self.app, handler_cancellation=False, access_log=None, shutdown_timeout=1.0)

    async def start(self, listening: socket.socket) -> None:
        """Serve the connections of a bound socket; `close` closes it."""
        await self._runner.setup()
        await web.SockSite(self._runner, listening).start()

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _answer(self, http: web.Request) -> web.Response:
        try:
            answer = {"result": await self._run(http.match_info["call"], await http.read())}
        except PenstockError as error:
            answer = {"error": error_to_json(error)}
        return web.Response(body=orjson.dumps(answer), content_type="application/json")

    async def _run(self, name: str, body: bytes) -> Any:
        call = self._calls.get(name)
        if call is None:
            raise UserError(f"there is no call {name!r}; known: {', '.join(self._calls)}")
        arguments: Any = parse_json(body or b"{}", f"the body of the call {name!r}")
        if not isinstance(arguments, dict):
            raise UserError(f"the call {name!r} takes a JSON object, got {type(arguments).__name__}")
        with reading(f"arguments of the call {name!r}"):
            return await call(**cast("dict[str, Any]", arguments))


class CallClient:
    """Calls the process that listens at a Unix socket; errors name it `server`."""

    def __init__(self, path: Path, prefix: str, server: str) -> None:
        self._http = HttpTransport("http://localhost", server=server, unix_socket=path)
        self._prefix = prefix

    async def call(self, name: str, /, *, deadline_s: float = CALL_S, **arguments: Any) -> Any:
        """Make a call, and return its result as JSON values.

        Raises:
            UnreachableError: nothing listens there; `EngineDeadError`: the process ended during the call.
            DeadlineError: no answer within `deadline_s` seconds.
            PenstockError: the error that the call raised there.
        """
        answer: Any = await self._http.post(f"{self._prefix}/{name}", arguments, timeout_s=deadline_s)
        with reading(f"answer to {name}", EngineError):
            if "error" not in answer:
                return answer["result"]
            error = error_from_json(answer["error"])
        raise error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; calls under way fail."""
        await self._http.close()
