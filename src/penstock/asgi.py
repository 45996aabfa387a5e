"""A server of ASGI applications within a running event loop. It needs uvicorn and starlette."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.aio import cancelled
from penstock.errors import ConfigError, PenstockError
from penstock.process import most_connections

STOP_S = 5
"""Seconds for answers under way when the server ends."""
HEAD_S = 15.0
"""Deadline of a request's head, from the connection or its first byte."""
IDLE_S = 75
"""Seconds for which a connection is kept for its next request."""
BODY_S = 120.0
"""Deadline of a request's body."""
MOST_CONNECTIONS = 16_384
_BACKLOG = 2048


class _Connections:
    """Connections of one server, at most `most`. A further one closes the one idle for longest."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.without_request: dict[_Protocol, None] = {}


class _Gathering:
    """A transport that joins all writes of one loop step, so that an answer's head goes out with its body."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._written: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._written:
            self._loop.call_soon(self._send)
        self._written.append(data)

    def close(self) -> None:
        self._send()
        self._transport.close()

    def _send(self) -> None:
        if self._written:
            self._transport.write(b"".join(self._written))
            self._written.clear()


class _Protocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol plus a deadline for each head and a bound on connections."""

    def __init__(self, counted: _Connections, **given: Any) -> None:
        super().__init__(**given)
        self._counted = counted
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - uvicorn's
        super().connection_made(_Gathering(transport, self.loop))  # pyright: ignore[reportArgumentType] - it is one to uvicorn
        self._wait_for_head()
        if len(self.connections) > self._counted.most:
            next(iter(self._counted.without_request)).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head_timer is None and self.cycle is not None and self.cycle.response_complete:  # pyright: ignore[reportUnnecessaryComparison]
            self._wait_for_head()
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._end_wait()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and self.cycle.response_complete:
            self._counted.without_request[self] = None

    def _wait_for_head(self) -> None:
        self._counted.without_request.setdefault(self, None)
        self._head_timer = self.loop.call_later(HEAD_S, self.transport.abort)

    def _end_wait(self) -> None:
        self._counted.without_request.pop(self, None)
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _Server(uvicorn.Server):
    """A server that leaves signals to its process, and sets `ready` when it serves."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


def listening(host: str, port: int, what: str) -> socket.socket:
    """Bind a TCP socket; port 0 is any free one. ConfigError: the address is unusable."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY on connections of sockets that name their protocol. Without it, a body that follows its
    # head waits 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"{what} cannot listen on {host} port {port}: {error.strerror or error}") from None
    return listener


def listening_at(path: Path, what: str) -> socket.socket:
    """Bind a Unix socket that only this user can reach, in place of a leftover one."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigError(f"{what} cannot listen at {path}: {error.strerror or error}") from None
    finally:
        os.umask(before)
    return listener


@asynccontextmanager
async def serving_app(
    app: Any,
    listener: socket.socket,
    what: str,
    close: Callable[[], Awaitable[None]] | None = None,
) -> AsyncGenerator[None]:
    """Serve an application on a bound socket while the block runs, then close both.

    `what` names the application in messages. `close` is awaited before the server ends, so that no answer under way
    waits for ever. Connections are at most half the files that this process may open, since each request under way has
    a connection of its own.
    """
    counted = _Connections(min(MOST_CONNECTIONS, most_connections()))
    config = uvicorn.Config(
        app,
        http=partial(_Protocol, counted),  # pyright: ignore[reportArgumentType] - it is only called
        ws="none",
        timeout_keep_alive=IDLE_S,
        lifespan="off",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
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
            raise ConfigError(f"{what}'s server ended as it began")
        yield
    finally:
        ready.cancel()
        if close is not None:
            await close()
        server.should_exit = True
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(task), 2 * STOP_S)
        await cancelled(task)
        listener.close()


async def read_body(
    http: Request,
    most: int,
    refused: Callable[[int, str], PenstockError],
    take: Callable[[int], object] = bool,
) -> bytes:
    """Return the whole body of a request, at most `most` bytes.

    `refused` makes an error from an HTTP status and a message: 413, 408 after `BODY_S` seconds, or 499. `take` gets the
    size of each piece before it is kept, and raises if there is no room.
    """
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in http.stream():
                take(len(piece))
                data += piece
                if len(data) > most:
                    raise refused(413, f"the body is over {most / (1 << 20):g} MiB")
    except TimeoutError as error:
        raise refused(408, f"no whole body within {BODY_S:g} s") from error
    except ClientDisconnect as error:
        raise refused(499, "the client has left") from error
    return bytes(data)
