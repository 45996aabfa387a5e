"""The gateway's HTTP server: three wire formats, sessions, rewards, rows."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import orjson
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.asgi import listening, read_body, serving_app
from penstock.checks import parse_json, reading
from penstock.errors import UserError
from penstock.gateway.anthropic import AnthropicDialect
from penstock.gateway.chat import ChatDialect
from penstock.gateway.dialect import KEEPALIVE, Dialect, dumps
from penstock.gateway.graph import Limits, Row
from penstock.gateway.messages import Answer, ChatRequest, GatewayError, bare, tools_key
from penstock.gateway.responses import ResponsesDialect
from penstock.gateway.service import Gateway, PendingTurn, ServedSession, Tenant
from penstock.guard import cross_site
from penstock.options import validate
from penstock.router_settings import base_url

MOST_BODY = 64 << 20
LONG_BODY = 1 << 14
"""Bytes of a body above which a thread parses it."""
KEEPALIVE_S = 10.0
"""Seconds without an answer after which a stream starts. An earlier error gets its own HTTP status."""
NODE_HEADER = "X-Penstock-Node"
ROWS_TYPE = "application/x-ndjson"
LONG_ANSWER = 1 << 16
"""Bytes of an answer above which it is sent in pieces."""
_STEPS = 3
"""Turns of the event loop until written data is sent and a reset is noticed."""
SESSION_HEADERS = ("x-session-id", "x-claude-code-session-id", "session-id")
WIRES: dict[str, Dialect] = {
    "/v1/chat/completions": ChatDialect(),
    "/v1/responses": ResponsesDialect(),
    "/v1/messages": AnthropicDialect(),
}
Handler = Callable[[Request], Awaitable[Response]]


def build_app(gateway: Gateway, *, keepalive_s: float = KEEPALIVE_S) -> Starlette:
    """Build the ASGI application of a gateway.

    Each wire format is served at its own path, and at `/s/SESSION` before that path.
    """
    calls = _Calls(gateway, keepalive_s)
    chat, anthropic = WIRES["/v1/chat/completions"], WIRES["/v1/messages"]
    routes = [
        Route("/health", calls.health),
        Route("/sessions", calls.for_tenants(calls.open_session), methods=["POST"]),
        Route("/sessions", calls.for_tenants(calls.report), methods=["GET"]),
        Route("/sessions/{session}/reward", calls.for_tenants(calls.reward), methods=["POST"]),
        Route("/sessions/{session}/rows", calls.for_tenants(calls.rows), methods=["GET"]),
        Route("/sessions/{session}/finish", calls.for_tenants(calls.finish), methods=["POST"]),
    ]
    for prefix in ("", "/s/{session}"):
        routes += [Route(prefix + path, calls.on(wire, calls.turn), methods=["POST"]) for path, wire in WIRES.items()]
        counting = calls.on(anthropic, calls.count_tokens)
        routes.append(Route(f"{prefix}/v1/messages/count_tokens", counting, methods=["POST"]))
        routes.append(Route(f"{prefix}/v1/models", calls.on(chat, calls.models), methods=["GET"]))
    return Starlette(routes=routes, exception_handlers={404: _no_path})


@asynccontextmanager
async def serving(gateway: Gateway, *, host: str = "127.0.0.1", port: int = 0) -> AsyncGenerator[str]:
    """Serve a gateway while the block runs, and yield its base URL.

    Args:
        gateway: gateway to serve. It is closed at the end.
        host: address to listen on.
        port: port to listen on; 0 picks a free port.

    Raises:
        ConfigError: the server cannot listen on the address.
    """
    listener = listening(host, port, "the gateway")
    async with serving_app(build_app(gateway), listener, "the gateway", gateway.close):
        yield base_url(host, listener.getsockname()[1])


async def _no_path(http: Request, _: Exception) -> Response:
    path, advice = http.url.path, ""
    if "/v1/" not in path:
        advice = "; clients of OpenAI need a base URL that ends in /v1"
    elif "/v1/v1/" in path:
        advice = "; the base URL of this client must not end in /v1"
    known = ", ".join((*WIRES, "/v1/messages/count_tokens", "/v1/models"))
    why = f"there is no path {path!r}{advice}. Known, also behind /s/SESSION: {known}"
    return JSONResponse(WIRES["/v1/chat/completions"].error(GatewayError(why, code="not_found")), 404)


class _Opening(Limits):
    """The body of a call that opens a session."""

    session: str | None = None


class _Calls:
    """Handlers of the gateway's routes."""

    def __init__(self, gateway: Gateway, keepalive_s: float) -> None:
        self._gateway = gateway
        self._keepalive_s = keepalive_s

    def on(self, wire: Dialect, handler: Callable[[Request, Dialect], Awaitable[Response]]) -> Handler:
        """Wrap a handler so that it answers errors in the form of the wire."""

        async def handle(http: Request) -> Response:
            try:
                return await handler(http, wire)
            except (GatewayError, UserError) as error:
                shown = GatewayError.of(error)
                return JSONResponse(wire.error(shown), shown.status)

        return handle

    def for_tenants(self, handler: Callable[[Request, Tenant], Awaitable[Response]]) -> Handler:
        """Wrap a handler so that it requires a tenant's own key, and refuses web pages."""

        async def handle(http: Request, _: Dialect) -> Response:
            if (why := cross_site(http.headers.raw)) is not None:
                raise GatewayError(why, status=403, code="forbidden")
            if (tenant := self._gateway.tenant_of(_key(http))) is None:
                raise GatewayError("these calls need a tenant's own key", status=401, code="invalid_api_key")
            return await handler(http, tenant)

        return self.on(WIRES["/v1/chat/completions"], handle)

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(self, http: Request, _: Dialect) -> Response:
        self._session(http, keep=False)
        options = self._gateway.options
        model = {"id": options.model, "object": "model", "created": 0, "owned_by": "penstock"}
        return JSONResponse({"object": "list", "data": [{**model, "max_model_len": options.max_model_len}]})

    def _session(self, http: Request, *, keep: bool = True) -> ServedSession:
        hint = next((value for name in SESSION_HEADERS if (value := http.headers.get(name))), None)
        return self._gateway.session(_key(http), http.path_params.get("session"), hint, keep=keep)

    async def _read(self, wire: Dialect, body: bytes) -> ChatRequest:
        """Read a request of a wire. GatewayError: it is malformed or asks for something unsupported."""

        def read() -> ChatRequest:
            with reading("request", GatewayError):
                request = wire.read(_as_object(body))
                tools_key(request.tools)  # raises for parameters nested too deeply to render
                return request

        return await self._gateway.in_thread(read) if len(body) > LONG_BODY else read()

    async def turn(self, http: Request, wire: Dialect) -> Response:
        session = self._session(http)
        body = await _body(http)
        request = await self._read(wire, body)
        idempotency = http.headers.get("idempotency-key", "")
        retries = http.headers.get("x-stainless-retry-count", "0")
        digest = hashlib.sha256(b"\n".join((http.url.path.encode(), idempotency.encode(), body))).digest()
        is_retry = bool(idempotency) or retries not in {"", "0"}
        turn = self._gateway.submit(session, request, digest, is_retry=is_retry, size=len(body))
        headers = {NODE_HEADER: turn.id}
        answer = await self._wait(turn, http, self._keepalive_s if request.stream else None)
        if answer is None or request.stream:
            return _Stream(http, turn, _events(wire, turn, self._keepalive_s), headers)
        data = dumps(wire.write(answer))
        if len(data) > LONG_ANSWER:
            return _Stream(http, turn, _whole(data), headers, "application/json")
        background = BackgroundTask(_deliver, turn)
        return Response(data, media_type="application/json", headers=headers, background=background)

    async def _wait(self, turn: PendingTurn, http: Request, seconds: float | None) -> Answer | None:
        """Return the answer, or None after `seconds` without one. If the client leaves, the turn continues."""
        gone = asyncio.ensure_future(_disconnected(http))
        turn.waiters += 1
        try:
            await asyncio.wait((turn.task, gone), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():  # perhaps just when the turn ended: the client's retry reads the answer
                raise GatewayError("the client has left", status=499, code="client_left")
            return _result(turn) if turn.task.done() else None
        finally:
            turn.waiters -= 1
            gone.cancel()

    async def count_tokens(self, http: Request, wire: Dialect) -> Response:
        session = self._session(http, keep=False)
        request = await self._read(wire, await _body(http))
        parent, added, _ = await self._gateway.in_thread(lambda: self._gateway.codec.prompt_of(session, request))
        return JSONResponse({"input_tokens": (parent.length if parent else 0) + len(added)})

    async def open_session(self, http: Request, tenant: Tenant) -> Response:
        asked = validate(_Opening, _as_object(await _body(http) or b"{}"))
        limits = Limits(**asked.model_dump(exclude={"session"}))
        session = self._gateway.open_session(tenant, asked.session, None if limits == Limits() else limits)
        shown = {"session": session.id, "api_key": session.key, "base_url": str(http.base_url).rstrip("/")}
        return JSONResponse({**shown, "limits": session.limits.model_dump()})

    async def report(self, _: Request, tenant: Tenant) -> Response:
        return JSONResponse(self._gateway.report(tenant))

    async def reward(self, http: Request, tenant: Tenant) -> Response:
        session = self._gateway.find(tenant, http.path_params["session"])
        body = _as_object(await _body(http))
        if unknown := sorted(body.keys() - {"reward", "node"}):  # a misspelt `node` would reward the whole session
            raise UserError(f"unknown field {unknown[0]!r}; known: reward, node")
        reward, node = body.get("reward"), body.get("node")
        if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not math.isfinite(reward):
            raise UserError(f"reward must be a finite number, got {reward!r}")
        session.give_reward(float(reward), None if node is None else bare(str(node)))
        return JSONResponse({"session": session.id, "node": node, "reward": reward})

    async def rows(self, http: Request, tenant: Tenant) -> Response:
        rows = self._gateway.find(tenant, http.path_params["session"]).rows()
        return Response(await asyncio.to_thread(_lines, rows), media_type=ROWS_TYPE)

    async def finish(self, http: Request, tenant: Tenant) -> Response:
        session = self._gateway.finish(tenant, http.path_params["session"])
        rows = session.rows()
        data = await asyncio.to_thread(_lines, rows)

        async def forget() -> None:
            self._gateway.forget(session)

        return StreamingResponse(_watched(http, _whole(data), forget), media_type=ROWS_TYPE)


class _Stream(StreamingResponse):
    """An answer in pieces. Its client counts as waiting from now on, so an equal request is a new turn."""

    def __init__(
        self,
        http: Request,
        turn: PendingTurn,
        pieces: AsyncIterable[bytes],
        headers: Mapping[str, str],
        media_type: str = "text/event-stream",
    ) -> None:
        headers = {**headers, "Cache-Control": "no-cache"}
        super().__init__(_watched(http, pieces, partial(_deliver, turn)), headers=headers, media_type=media_type)
        self._turn = turn
        turn.waiters += 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, and count the client as waiting until the end."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._turn.waiters -= 1


async def _watched(
    http: Request, pieces: AsyncIterable[bytes], then: Callable[[], Awaitable[None]]
) -> AsyncGenerator[bytes]:
    """Yield the pieces. Call `then` if the client stayed until the end."""
    async for data in pieces:
        yield data
    for _ in range(_STEPS):
        await asyncio.sleep(0)
    yield b""  # waits until the connection has accepted the written data
    if not await http.is_disconnected():
        await then()


async def _whole(data: bytes) -> AsyncGenerator[bytes]:
    yield data


async def _events(wire: Dialect, turn: PendingTurn, keepalive_s: float) -> AsyncGenerator[bytes]:
    """Yield a turn as events, with keepalive comments until it ends. A stream without its last event is incomplete."""
    while not turn.task.done():
        await asyncio.wait((turn.task,), timeout=keepalive_s)
        if not turn.task.done():
            yield KEEPALIVE
    try:
        answer = _result(turn)
    except GatewayError as error:
        yield wire.error_event(error)
        return
    for data in wire.events(answer):
        yield data


def _result(turn: PendingTurn) -> Answer:
    """Return the answer of a finished turn. GatewayError: the turn failed."""
    if turn.task.cancelled():
        raise GatewayError("the gateway is shutting down", status=503, code="shutting_down")
    error = turn.task.exception()
    if error is None:
        return turn.task.result()
    raise GatewayError.of(error) if isinstance(error, (GatewayError, UserError)) else error


async def _deliver(turn: PendingTurn) -> None:  # async, not in a thread: the client's next request may arrive first
    turn.delivered = True


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        continue


async def _body(http: Request) -> bytes:
    codes = {413: "too_large", 408: "timeout", 499: "client_left"}
    return await read_body(http, MOST_BODY, lambda status, why: GatewayError(why, status=status, code=codes[status]))


def _as_object(body: bytes) -> dict[str, Any]:
    given = parse_json(body, "the body", GatewayError)
    if not isinstance(given, dict):
        raise GatewayError("the body is no JSON object")
    return cast("dict[str, Any]", given)


def _key(http: Request) -> str:
    given = http.headers.get("authorization", "")
    scheme, _, key = given.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else http.headers.get("x-api-key", "")


def _lines(rows: Iterable[Row]) -> bytes:
    return b"".join(orjson.dumps(row.as_json()) + b"\n" for row in rows)
