"""The simulated engine behind vLLM's HTTP API."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, cast

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from penstock.control_server import refusal
from penstock.errors import EngineDeadError, EngineStartError, PenstockError, RequestError, UserError
from penstock.guard import DATA_PATHS, OPEN_PATHS, cross_site, has_key
from penstock.sim import control, openai
from penstock.sim.call import Call, error_answer, json_answer
from penstock.sim.config import FaultKind, SimConfig
from penstock.sim.engine import SimEngine
from penstock.sim.update import NotFoundError

CORE_DEATH_EXIT_S = 0.3
"""Seconds that vLLM's API server outlives its engine core (measured: the port closed at 0.3 s)."""

EXIT_STATUS = 1
RANK_HEADER = "X-data-parallel-rank"

KEEP_ALIVE_S = 5.0
"""vLLM closes idle connections after these seconds. A client pool that keeps them longer uses dead ones."""


class SimServer:
    """One engine on one port: `async with SimServer(SimConfig()) as server: server.url`.

    With `own_process`, its death ends the process. Otherwise its death only closes the port and the connections.
    """

    def __init__(self, config: SimConfig | None = None, *, own_process: bool = False) -> None:
        self.config = config or SimConfig()
        ranks = range(self.config.data_parallel_size)
        self.ranks = tuple(SimEngine(self.config, on_death=self._on_death) for _ in ranks)
        self.engine = self.ranks[0]
        self.gone = asyncio.Event()
        """Set once the engine has died and the port is closed."""
        self._own_process = own_process
        self._runner: web.AppRunner | None = None
        self._port = self.config.port
        self._closing: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """URL of the server. The port is known after the start."""
        host = self.config.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}"

    async def start(self) -> None:
        """Start to serve. Raises EngineStartError if the port is taken."""
        # When a client leaves, cancelling its handler aborts the request, as in vLLM.
        runner = web.AppRunner(
            _app(self.config, self.ranks),
            handler_cancellation=True,
            keepalive_timeout=KEEP_ALIVE_S,
            access_log=None,
            shutdown_timeout=0.1,
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, self.config.host, self.config.port).start()
        except OSError as error:
            await runner.cleanup()
            address = f"{self.config.host}:{self.config.port}"
            raise EngineStartError(f"cannot listen on {address}: {error.strerror}", engine=self.config.name) from error
        self._runner = runner
        self._port = runner.addresses[0][1]

    async def stop(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
        if self._runner is not None:
            self._break_connections()
            for rank in self.ranks:
                rank.close()
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _on_death(self, kind: FaultKind) -> None:
        if kind is FaultKind.EXIT:
            if self._own_process:
                os._exit(EXIT_STATUS)
            self._break_connections()
        delay = 0.0 if kind is FaultKind.EXIT else CORE_DEATH_EXIT_S
        self._closing = asyncio.get_running_loop().create_task(self._close_after(delay), name="sim-closing")

    async def _close_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self._own_process:
            os._exit(EXIT_STATUS)
        if self._runner is not None:
            for site in tuple(self._runner.sites):
                await site.stop()
            self._break_connections()
        self.gone.set()

    def _break_connections(self) -> None:
        server = self._runner.server if self._runner is not None else None
        if server is not None:
            for connection in server.connections:
                if connection.transport is not None:
                    connection.transport.abort()


def _app(config: SimConfig, ranks: tuple[SimEngine, ...]) -> web.Application:
    app = web.Application(client_max_size=config.max_body_bytes, middlewares=[_guarded(config), _errors_as_vllm])
    open_to_tokens = config.scale_out or not config.plain
    placed: dict[str, control.Handler] = {
        "POST /inference/v1/generate": openai.generate if open_to_tokens else control.no_tokens,
        "POST /v1/completions": openai.completions,
        "POST /v1/chat/completions": openai.chat_completions,
        "GET /v1/models": openai.models,
        "POST /tokenize": openai.tokenize,
        "POST /detokenize": openai.detokenize,
    }
    for route, handler in placed.items():
        method, path = route.split()
        app.router.add_route(method, path, partial(_on_one, ranks, handler))
    for route, handler in control.routes(config).items():
        method, path = route.split()
        app.router.add_route(method, path, partial(_on_all, ranks, handler))
    return app


async def _on_one(ranks: Sequence[SimEngine], handler: control.Handler, http: web.Request) -> web.StreamResponse:
    """Serve on the rank that the header names, else on the least loaded rank."""
    named = http.headers.get(RANK_HEADER, "")
    if not re.fullmatch(r"-?[0-9]+", named):  # vLLM ignores a value that is not a number
        rank = min(ranks, key=lambda rank: len(rank.scheduler.running) + len(rank.scheduler.waiting))
    elif not 0 <= int(named) < len(ranks):
        raise RequestError(f"data_parallel_rank {named} is out of range [0, {len(ranks)}).")
    else:
        rank = ranks[int(named)]
    return _answer(await handler(Call(http, rank, ranks, await _body(http))))


async def _on_all(ranks: Sequence[SimEngine], handler: control.Handler, http: web.Request) -> web.StreamResponse:
    """Call the ranks in turn (for a GET, only the first). Return the last answer, or raise the first error."""
    body, answer = await _body(http), None
    for rank in ranks[:1] if http.method == "GET" else ranks:
        answer = await handler(Call(http, rank, ranks, body))
    return _answer(answer)


def _answer(answer: Any) -> web.StreamResponse:
    return answer if isinstance(answer, web.StreamResponse) else json_answer(answer)


async def _body(http: web.Request) -> dict[str, Any]:
    """Return the body, empty without one. web.HTTPException: it is too large."""
    raw = await http.read()
    try:
        data: Any = orjson.loads(raw or b"{}")
    except orjson.JSONDecodeError as error:
        raise RequestError(f"body: JSON decode error: {error}") from error
    if not isinstance(data, dict):
        raise RequestError("body: Input should be a valid dictionary")
    return cast("dict[str, Any]", data)


@web.middleware
async def _errors_as_vllm(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn exceptions into the error answers of vLLM, or of our plugin's paths."""
    try:
        return await handler(request)
    except PenstockError as error:
        if not request.path.startswith("/penstock/"):
            return _as_vllm(error)
        status, answer = refusal(error)
        return json_answer(answer, status)
    except web.HTTPException as error:
        return error_answer(error.reason, error.reason, error.status)


def _as_vllm(error: PenstockError) -> web.Response:
    if isinstance(error, NotFoundError):
        return error_answer(str(error), "NotFoundError", 404, error.param)
    if isinstance(error, UserError):
        return error_answer(str(error), "BadRequestError", 400)
    engine = error.engine if isinstance(error, EngineDeadError) else None
    return error_answer(str(error).removeprefix(f"engine {engine}: "), "InternalServerError", 500)


def _guarded(config: SimConfig) -> Middleware:
    """Return middleware that refuses calls without a key, and control by web pages.

    Without the key the status is 401, except on `OPEN_PATHS`. The 403 for web pages comes from our plugin, not vLLM.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not config.plain and request.path not in DATA_PATHS:
            fields = [(name.lower(), value) for name, value in request.raw_headers]
            if (why := cross_site(fields, {config.host.lower()})) is not None:
                return json_answer({"error": why}, 403)
        given = request.headers.get("Authorization", "").encode()
        if config.api_key is not None and request.path not in OPEN_PATHS and not has_key(given, [config.api_key]):
            return json_answer({"error": "Unauthorized"}, 401)
        return await handler(request)

    return check
