"""An ASGI middleware for vLLM's API server (`--middleware`): the access rules for all routes.

`routes.py` answers our own routes. Requests pass through `hooks.py`.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import Any

import orjson

from penstock.guard import DATA_PATHS, OPEN_PATHS, cross_site, has_key
from penstock.plugin.hooks import RequestHooks
from penstock.rooms import plugged_in

WEBSOCKET_REFUSED, WEBSOCKET_REASON = 1008, 120
"""Close code for a policy violation (RFC 6455, 7.4.1), and the bytes that a reason may have."""

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
    def _routes(self) -> Any:
        """Our routes, `routes.Routes`."""
        return plugged_in("routes")(self._hooks)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in {"http", "websocket"} and (refused := _refusal(scope)) is not None:
            status, error = refused
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": WEBSOCKET_REFUSED, "reason": error[:WEBSOCKET_REASON]})
            else:
                await answer(send, status, {"error": error})
            return
        if scope["type"] == "http" and scope["path"].startswith("/penstock/"):
            await self._routes.serve(scope, receive, send)
            return
        if scope["type"] == "http" and scope["path"] not in DATA_PATHS:
            receive = await self._routes.cores.lead(scope, receive)
        await self._hooks.pass_on(self.app, scope, receive, send)


def _refusal(scope: Scope) -> tuple[int, str] | None:
    """Return status and reason if this caller may not make this call."""
    if scope["path"] not in DATA_PATHS:
        host = getattr(getattr(scope["app"].state, "args", None), "host", None)
        if (why := cross_site(scope["headers"], {host.lower()} if host else ())) is not None:
            return 403, why
    keys = keys_of(scope)
    if not keys or scope["path"] in OPEN_PATHS or scope.get("method") == "OPTIONS":
        return None
    given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    return None if has_key(given, keys) else (401, "Unauthorized")


def keys_of(scope: Scope) -> list[str]:
    """Return the keys that vLLM accepts, from `--api-key` or its variable."""
    options = getattr(scope["app"].state, "args", None)
    keys: list[str] = [key for key in getattr(options, "api_key", None) or [] if key]
    return keys or [key for key in (os.environ.get("VLLM_API_KEY"),) if key]


async def answer(send: Send, status: int, content: dict[str, Any]) -> None:
    """Send a JSON answer."""
    body = orjson.dumps(content)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
