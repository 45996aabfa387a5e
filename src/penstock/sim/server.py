"""The simulated engine behind vLLM's HTTP."""

from __future__ import annotations

import asyncio
import os
from types import TracebackType
from typing import Self

from aiohttp import web

from penstock.errors import EngineStartError
from penstock.sim import control, openai
from penstock.sim.config import SimConfig
from penstock.sim.engine import SimEngine
from penstock.sim.faults import FaultKind
from penstock.sim.http import RANKS, errors_as_vllm, guarded, on_all, on_one
from penstock.wire import ADAPTERS

CORE_DEATH_EXIT_S = 0.3
"""How long vLLM's API server outlives its engine core (facts: port closed at 0.3 s)."""

EXIT_STATUS = 1

KEEP_ALIVE_S = 5.0
"""vLLM closes idle connections after this; a client pool that keeps them longer posts on dead ones."""


class SimServer:
    """One engine on one port: `async with SimServer(SimConfig()) as server: server.url`.

    Args:
        config: how it is built.
        own_process: its death ends the process; else it only closes port and connections.
    """

    def __init__(self, config: SimConfig | None = None, *, own_process: bool = False) -> None:
        self.config = config or SimConfig()
        ranks = range(self.config.data_parallel_size)
        self.ranks = tuple(SimEngine(self.config, on_death=self._on_death) for _ in ranks)
        self.engine = self.ranks[0]
        self.gone = asyncio.Event()
        """Set when the engine died and the port is closed."""
        self._own_process = own_process
        self._runner: web.AppRunner | None = None
        self._port = self.config.port
        self._closing: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where it serves; the port is known once it is started."""
        return f"http://{self.config.host}:{self._port}"

    async def start(self) -> None:
        """Serve. Raises EngineStartError where the port is taken."""
        # Cancelling a handler when its client has gone aborts the request, as vLLM does.
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
        """Close port and connections."""
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
    middlewares = [guarded(config), errors_as_vllm]
    app = web.Application(client_max_size=config.max_body_bytes, middlewares=middlewares)
    app[RANKS] = ranks
    get, post = app.router.add_get, app.router.add_post
    open_to_tokens = config.scale_out or not config.plain
    post("/inference/v1/generate", on_one(openai.generate) if open_to_tokens else control.no_tokens)
    post("/v1/completions", on_one(openai.completions))
    post("/v1/chat/completions", on_one(openai.chat_completions))
    get("/v1/models", openai.models)
    post("/tokenize", openai.tokenize)
    post("/detokenize", openai.detokenize)
    for path, handler in control.GET.items():
        if control.has(config, path):
            get(path, handler)
    for path, handler in control.POST.items():
        if control.has(config, path):
            post(path, on_all(handler))
    if not config.plain:
        get("/penstock/info", control.info)
        post("/penstock/weights/group", control.group)
        post("/penstock/weights/prepare", on_all(control.prepare))
        post("/penstock/weights/apply", on_all(control.apply))
        post("/penstock/weights/loss", on_all(control.loss))
        get(ADAPTERS, control.adapters)
        post(ADAPTERS + "/{call:load|unload|pause|resume}", on_all(control.change_adapter))
    elif config.dev_mode:
        get("/server_info", control.server_info)
    post("/sim/fault", on_all(control.set_fault))
    return app
