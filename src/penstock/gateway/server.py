"""Serve a gateway over HTTP, within a running event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress

import uvicorn

from penstock.aio import cancelled
from penstock.errors import ConfigError
from penstock.gateway.app import build_app
from penstock.gateway.service import Gateway

STOP_S = 5
"""Time for answers under way when the server ends."""
_BACKLOG = 2048


class _Server(uvicorn.Server):
    """A server that leaves signals to its process, and says when it serves."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


@asynccontextmanager
async def serving(gateway: Gateway, *, host: str = "127.0.0.1", port: int = 0) -> AsyncGenerator[str]:
    """Serve a gateway while the block runs, and give its base URL; port 0 is any free one.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"the gateway cannot listen on {host} port {port}: {error.strerror or error}") from None
    config = uvicorn.Config(
        build_app(gateway),
        lifespan="off",
        log_level="warning",
        access_log=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=STOP_S,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    ready = asyncio.create_task(server.ready.wait())
    try:
        await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
            raise ConfigError("the gateway's server ended as it began")
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{listener.getsockname()[1]}"
    finally:
        ready.cancel()
        await gateway.close()
        server.should_exit = True
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(task), 2 * STOP_S)
        await cancelled(task)
        listener.close()
