"""The connections to one engine behind the router."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from functools import lru_cache
from typing import cast

from penstock.router.membership import Engine, EngineEntry

IDLE_S = 4.0
"""Seconds after which the router closes an idle connection; vLLM's server does so after 5 s."""
CONNECT_TIMEOUT_S = 5.0
READ_SIZE = 1 << 16
"""Most bytes of an answer in one read. 256 clients that do not read their answers must not take 64 MB."""
MAX_CONNECTING = 256
"""Most connections to one engine that are opened at once. A listen queue is a few times as long."""
OWN_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
"""Errors of `connect` that come from this process's limits and not from the engine."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
"""TCP keepalive: the router notices after 35 s that a machine vanished, also during a long answer."""


@lru_cache(maxsize=4096)
def added_fields(dp_rank: int | None, api_key: str | None) -> bytes:
    """Return the header lines that the router adds to every request for an engine: its rank, for vLLM, and its key."""
    rank = b"" if dp_rank is None else b"X-data-parallel-rank: %d\r\n" % dp_rank
    return rank + (b"" if api_key is None else b"Authorization: Bearer %b\r\n" % api_key.encode())


class ConnectionUser:
    """A request that waits for a connection and then uses it."""

    def connected(self, connection: BackendConnection) -> bool:
        """Take a new connection; return False if the request no longer needs it."""
        raise NotImplementedError

    def not_connected(self, error: OSError) -> None:
        """Handle a failed connect: the engine refused it, or has left the fleet."""
        raise NotImplementedError

    def received(self, data: bytes) -> None:
        raise NotImplementedError

    def connection_lost(self, error: Exception | None) -> None:
        """Handle the end of the connection, with its error if there was one."""
        raise NotImplementedError


class BackendConnection(asyncio.BufferedProtocol):
    """One pooled connection to an engine; at most one request uses it at a time."""

    transport: asyncio.Transport
    user: ConnectionUser | None = None
    reused = False
    """Whether it has served an earlier request; only then can it be stale."""
    idle_since = 0.0
    _read_paused = False

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._read_buffer = backend.read_buffer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.backend.open.add(self)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the loop's signature
        """Return the buffer for the next bytes; its size bounds what a slow client holds."""
        return self._read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        user = self.user
        if user is None:
            self.transport.abort()  # no request is under way: the connection cannot be trusted any more
        else:
            user.received(self._read_buffer[:nbytes].tobytes())

    def connection_lost(self, exc: Exception | None) -> None:
        self.backend.open.discard(self)
        user, self.user = self.user, None
        if user is not None:
            user.connection_lost(exc)

    def set_reading(self, *, reading: bool) -> None:
        """Resume reading the answer, or pause while the client is slow."""
        if reading == self._read_paused and not self.transport.is_closing():
            self._read_paused = not reading
            (self.transport.resume_reading if reading else self.transport.pause_reading)()

    def drop(self) -> None:
        """Close at once. The engine sees the disconnect and aborts the request."""
        self.user = None
        self.transport.abort()


class Backend(Engine):
    """One engine with its pool of connections and its counts."""

    breaker_openings = 0
    """Times that the breaker opened."""
    dead_answers = 0
    """Answers that reported a dead engine core."""
    failure = ""
    """Cause in the last such answer; empty: none came."""
    requests = 0
    """Requests sent by this process."""

    def __init__(self, entry: EngineEntry) -> None:
        super().__init__(entry)
        self.read_buffer = memoryview(bytearray(READ_SIZE))
        """Read buffer that all its connections share; each read is copied out at once."""
        self.open: set[BackendConnection] = set()
        self.idle: list[BackendConnection] = []
        """Idle connections, the oldest first. A request takes the youngest, so that the surplus of a burst ages and is
        closed. A lost connection stays in the list until `take` finds it."""
        self._connecting: dict[asyncio.Task[None], ConnectionUser] = {}
        self._may_connect = asyncio.Semaphore(MAX_CONNECTING)

    def take(self) -> BackendConnection | None:
        oldest = time.monotonic() - IDLE_S
        idle = self.idle
        while idle:
            connection = idle.pop()
            if connection.idle_since > oldest and not connection.transport.is_closing():
                return connection
            connection.transport.abort()
        return None

    def connect(self, user: ConnectionUser) -> None:
        """Open a connection for `user`."""
        task = asyncio.get_running_loop().create_task(self._connect(user))
        self._connecting[task] = user
        task.add_done_callback(self._connecting.pop)

    async def _connect(self, user: ConnectionUser) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with self._may_connect, asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(lambda: BackendConnection(self), *self.entry.address())
            if self.left or connection.transport.is_closing():
                connection.transport.abort()
                raise ConnectionResetError("the engine has left the fleet, or closed the connection as it was opened")
        except OSError as error:  # TimeoutError is one
            user.not_connected(error)
            if error.errno not in OWN_SHORTAGES:  # otherwise each would wait for its own deadline
                self.give_up_connecting(error)
        else:
            if not user.connected(connection):
                self.release(connection, reusable=True)

    def release(self, connection: BackendConnection, *, reusable: bool) -> None:
        """Keep a connection for the next request, or close it."""
        transport = connection.transport
        if not reusable or self.left or transport.get_write_buffer_size() or transport.is_closing():
            transport.abort()
            return
        connection.set_reading(reading=True)
        connection.idle_since = time.monotonic()
        self.idle.append(connection)

    def close_idle(self, now: float) -> None:
        """Close connections that were idle for too long; `now` is `time.monotonic()`."""
        while self.idle and self.idle[0].idle_since <= now - IDLE_S:
            self.idle.pop(0).transport.abort()

    def give_up_connecting(self, error: OSError) -> None:
        """Let every request that waits for a connection go elsewhere."""
        for task, user in list(self._connecting.items()):
            if not task.done() and task is not asyncio.current_task():
                task.cancel()
                user.not_connected(error)

    def cut(self) -> None:
        """Break every connection, as if the engine had closed it; requests are retried."""
        for connection in list(self.open):
            connection.transport.abort()
            connection.connection_lost(ConnectionAbortedError("the fleet has given it up"))

    async def close(self) -> None:
        self.left = True
        for connection in list(self.open):
            connection.transport.abort()
        tasks = list(self._connecting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
