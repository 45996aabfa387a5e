"""The connections to one engine behind the router."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from typing import cast

from penstock.router.memory import Engine, EngineEntry

RANK_HEADER = b"X-data-parallel-rank"
"""VLLM's: the data-parallel rank that is to have the request."""
IDLE_S = 4.0
"""An idle connection is closed after this time: before vLLM's server does, which takes 5 s."""
CONNECT_TIMEOUT_S = 5.0
READ_SIZE = 1 << 16
"""Most bytes of an answer in one read: 256 clients that do not read theirs shall not take 64 MB."""
MAX_CONNECTING = 256
"""Connections being opened at once; a listen queue is a few times as long."""
OWN_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
"""Failures to connect that say something of this process and nothing of the engine."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
"""A machine that vanished without a word is noticed after 35 s, however long an answer may take."""


class ConnectionUser:
    """A request that wants a connection, and then uses it."""

    def connected(self, connection: BackendConnection) -> bool:
        """Take a new connection; False: it is not needed any more."""
        raise NotImplementedError

    def not_connected(self, error: OSError) -> None:
        """There is none: the engine refused, or has left the fleet."""
        raise NotImplementedError

    def received(self, data: bytes) -> None:
        raise NotImplementedError

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is gone; with the error, if there was one."""
        raise NotImplementedError


class BackendConnection(asyncio.BufferedProtocol):
    """Protocol of one connection in a backend's pool; one request at a time uses it."""

    transport: asyncio.Transport
    user: ConnectionUser | None = None
    reused = False
    """Whether it has served a request before this one: only then may it be stale."""
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
        """Where the next bytes go; its size bounds what is kept here of an answer whose client does not read."""
        return self._read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        user = self.user
        if user is None:
            self.transport.abort()  # nothing was asked: the connection cannot be trusted any more
        else:
            user.received(self._read_buffer[:nbytes].tobytes())

    def connection_lost(self, exc: Exception | None) -> None:
        self.backend.open.discard(self)
        user, self.user = self.user, None
        if user is not None:
            user.connection_lost(exc)

    def set_reading(self, *, reading: bool) -> None:
        """Read the answer, or leave it with the engine while the client is slow."""
        if reading == self._read_paused and not self.transport.is_closing():
            self._read_paused = not reading
            (self.transport.resume_reading if reading else self.transport.pause_reading)()

    def drop(self) -> None:
        """Close at once, whatever is under way: the engine sees the disconnect and aborts the request."""
        self.user = None
        self.transport.abort()


class Backend(Engine):
    """One engine with its connections, and counts of what became of them."""

    openings = 0
    """How often the breaker opened."""
    dead_answers = 0
    """Answers that said that its core is dead."""
    failure = ""
    """Cause that the last of them gave; empty: there was none."""
    sent = 0
    """Requests sent by this process."""
    fields: bytes
    """Header lines that the router adds to every request for it."""

    def __init__(self, entry: EngineEntry) -> None:
        super().__init__(entry)
        self.read_buffer = memoryview(bytearray(READ_SIZE))
        """Where its connections read into, one at a time: what came is copied out at once."""
        self.open: set[BackendConnection] = set()
        self._idle: list[BackendConnection] = []
        """Oldest first; the youngest is used first, so that a burst's surplus ages and is closed. One that was lost
        stays until it is met."""
        self._connecting: set[asyncio.Task[None]] = set()
        self._may_connect = asyncio.Semaphore(MAX_CONNECTING)

    def announce(self, entry: EngineEntry) -> None:
        super().announce(entry)
        rank, key = entry.dp_rank, entry.api_key
        self.fields = (b"" if rank is None else b"%b: %d\r\n" % (RANK_HEADER, rank)) + (
            b"" if key is None else b"Authorization: Bearer %b\r\n" % key.encode()
        )

    def take(self) -> BackendConnection | None:
        oldest = time.monotonic() - IDLE_S
        idle = self._idle
        while idle:
            connection = idle.pop()
            if connection.idle_since > oldest and not connection.transport.is_closing():
                return connection
            connection.transport.abort()
        return None

    def connect(self, user: ConnectionUser) -> None:
        """Open a connection for `user`."""
        task = asyncio.get_running_loop().create_task(self._connect(user))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

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
        else:
            if not user.connected(connection):
                self.release(connection, reusable=True)

    def release(self, connection: BackendConnection, *, reusable: bool) -> None:
        """Keep a connection that a request has done with for another one, or close it."""
        transport = connection.transport
        if not reusable or self.left or transport.get_write_buffer_size() or transport.is_closing():
            transport.abort()
            return
        connection.set_reading(reading=True)
        connection.idle_since = time.monotonic()
        self._idle.append(connection)

    def close_idle(self, now: float) -> None:
        """Close connections that have been idle for too long; `now` is `time.monotonic()`."""
        while self._idle and self._idle[0].idle_since <= now - IDLE_S:
            self._idle.pop(0).transport.abort()

    def cut(self) -> None:
        """Break off what is in flight, as if the engine had closed every connection: it goes on elsewhere, or ends."""
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
