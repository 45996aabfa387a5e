"""An ASGI middleware for vLLM's API server (`--middleware`): our routes, and the access rules for all routes.

The core does the control work (`core.py`), and clients call its port. `cores.py` handles control calls that come here
instead. Requests pass through `hooks.py`.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
import os
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import Any

import orjson

from penstock.control_server import MAX_BODY, RefusedError, refusal
from penstock.errors import PenstockError, WeightsError
from penstock.guard import DATA_PATHS, OPEN_PATHS, cross_site, has_key
from penstock.plugin.hooks import RequestHooks
from penstock.rooms import plugged_in
from penstock.wire import ADAPTERS, INFO

WEBSOCKET_REFUSED, WEBSOCKET_REASON = 1008, 120
"""Close code for a policy violation (RFC 6455, 7.4.1), and the bytes that a reason may have."""
_OK = 200

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class PenstockMiddleware:
    """Answers `/penstock/*` and passes on everything else. It adds the data of `progress.py` to answers.

    It requires the API key on every path except `OPEN_PATHS`. vLLM itself does so only on some prefixes, which opens
    `/collective_rpc`, `/pause` and every other control call to anyone who reaches the port. Web pages may not call
    control (every path except `DATA_PATHS`), with or without a key.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self._hooks = RequestHooks()

    @cached_property
    def _cores(self) -> Any:
        """Control calls that come here, `cores.CoreCalls`."""
        return plugged_in("control.cores")(self._hooks)

    @cached_property
    def _adapters(self) -> Any:
        """Calls for LoRA adapters, `served_adapters.ServedAdapters`."""
        return plugged_in("adapters.served")(self._hooks)

    @cached_property
    def _info(self) -> Any:
        """The answer to `GET /penstock/info`, `info.EngineInfo.answer`."""
        return plugged_in("info")(self._hooks).answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in {"http", "websocket"} and (refused := _refusal(scope)) is not None:
            status, error = refused
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": WEBSOCKET_REFUSED, "reason": error[:WEBSOCKET_REASON]})
            else:
                await _answer(send, status, {"error": error})
            return
        if scope["type"] != "http" or not scope["path"].startswith("/penstock/"):
            if scope["type"] == "http" and scope["path"] not in DATA_PATHS:
                receive = await self._cores.lead(scope, receive)
            await self._hooks.pass_on(self.app, scope, receive, send)
            return
        if (route := self._route(scope)) is None:
            await _answer(send, 404, {"error": f"no such route: {scope['method']} {scope['path']}"})
            return
        try:
            status, answer = _OK, await route(scope["app"].state.engine_client, await _body(receive))
        except RefusedError as error:
            status, answer = error.reply
        except PenstockError as error:
            status, answer = refusal(error)
        await _answer(send, status, answer)

    def _route(self, scope: Scope) -> Any:
        """Return the handler of our call, for vLLM's AsyncLLM and the body, or None."""
        method, path = scope["method"], scope["path"]
        if path == INFO:
            return functools.partial(self._info, _keys(scope)) if method == "GET" else None
        if path.startswith(ADAPTERS):
            return self._adapters.routes(scope["app"].state).get((method, path))
        return self._cores.routes.get((method, path))


def _refusal(scope: Scope) -> tuple[int, str] | None:
    """Return status and reason if this caller may not make this call."""
    if scope["path"] not in DATA_PATHS:
        host = getattr(getattr(scope["app"].state, "args", None), "host", None)
        if (why := cross_site(scope["headers"], {host.lower()} if host else ())) is not None:
            return 403, why
    keys = _keys(scope)
    if not keys or scope["path"] in OPEN_PATHS or scope.get("method") == "OPTIONS":
        return None
    given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    return None if has_key(given, keys) else (401, "Unauthorized")


def _keys(scope: Scope) -> list[str]:
    """Return the keys that vLLM accepts, from `--api-key` or its variable."""
    options = getattr(scope["app"].state, "args", None)
    keys: list[str] = [key for key in getattr(options, "api_key", None) or [] if key]
    return keys or [key for key in (os.environ.get("VLLM_API_KEY"),) if key]


async def _body(receive: Receive) -> bytes:
    data = bytearray()
    while True:
        message = await receive()
        data += message.get("body", b"")
        if len(data) > MAX_BODY:
            raise WeightsError(f"the body is larger than {MAX_BODY} bytes")
        if not message.get("more_body"):
            return bytes(data)


async def _answer(send: Send, status: int, answer: dict[str, Any]) -> None:
    body = orjson.dumps(answer)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
