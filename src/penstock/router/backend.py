"""One engine behind the router: what the fleet announced of it, its breaker, and its pool of connections."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, cast

from penstock.router.membership import EngineEntry

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
    """What a connection calls while a request uses it."""

    def received(self, data: bytes) -> None:
        """With each piece of the answer."""
        raise NotImplementedError

    def lost(self, error: Exception | None) -> None:
        """When the connection is gone; with the error, if there was one."""
        raise NotImplementedError

    def adjust_reading(self) -> None:
        """When it takes no more bytes for now, or takes them again."""
        raise NotImplementedError


class BackendConnection(asyncio.BufferedProtocol):
    """Protocol of one connection in a backend's pool; one request at a time uses it."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.transport: asyncio.Transport
        self.user: ConnectionUser | None = None
        self.reused = False
        """Whether it has served a request before this one: only then may it be stale."""
        self.idle_since = 0.0
        self.write_paused = False
        self._read_paused = False
        self._read_buffer = backend.read_buffer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio's `BaseProtocol`."""
        self.transport = cast("asyncio.Transport", transport)
        self.backend.opened(self)

    def pause_writing(self) -> None:
        """More is buffered towards the engine than it takes."""
        self.write_paused = True
        if self.user is not None:
            self.user.adjust_reading()

    def resume_writing(self) -> None:
        """The engine has caught up."""
        self.write_paused = False
        if self.user is not None:
            self.user.adjust_reading()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the loop's signature
        """Where the next bytes go; its size bounds what is kept here of an answer whose client does not read."""
        return self._read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """They are there."""
        user = self.user
        if user is None:
            self.transport.abort()  # nothing was asked: the connection cannot be trusted any more
        else:
            user.received(self._read_buffer[:nbytes].tobytes())

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self.backend.forget(self)
        user, self.user = self.user, None
        if user is not None:
            user.lost(exc)

    def set_reading(self, *, reading: bool) -> None:
        """Read the answer, or leave it with the engine while the client is slow."""
        if reading == self._read_paused and not self.transport.is_closing():
            self._read_paused = not reading
            (self.transport.resume_reading if reading else self.transport.pause_reading)()

    def drop(self) -> None:
        """Close at once, whatever is under way: the engine sees the disconnect and aborts the request."""
        self.user = None
        self.transport.abort()


class Waiting(NamedTuple):
    """A request for which a connection is being opened."""

    connected: Callable[[BackendConnection], bool]
    """Called with the connection; False: it is not needed any more."""
    failed: Callable[[OSError | None], object]
    """Called where there is none; the error is None where the engine has left the set."""


class Backend:
    """Live record of one engine, and its connections. What policies see of it is kept by the placement."""

    down = False
    """The breaker is open: a connection was refused, or an answer said that the core is dead. It closes when a probe
    succeeds; in the first case also when the engine is announced again."""
    dead = False
    """An answer said that its core is dead, and no probe has succeeded since."""
    openings = 0
    """How often the breaker opened."""
    dead_answers = 0
    """Answers that said that its core is dead."""
    failure = ""
    """Cause that the last of them gave; empty: there was none."""
    outstanding = 0
    """Requests of this process that were sent and not answered in full."""
    requests = 0
    """Requests sent by this process."""
    removed = False
    fields: bytes
    """Header lines that the router adds to every request for it."""

    def __init__(self, entry: EngineEntry) -> None:
        self.name = entry.name
        self.address = entry.address()
        self.announce(entry)
        self.read_buffer = memoryview(bytearray(READ_SIZE))
        """Where its connections read into, one at a time: what came is copied out at once."""
        self._idle: list[BackendConnection] = []
        """Oldest first; the youngest is used first, so that a burst's surplus ages and is closed. One that was lost
        stays until it is met."""
        self._open: set[BackendConnection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._waiting: deque[Waiting] = deque()

    def announce(self, entry: EngineEntry) -> None:
        """Take over what the fleet says of it now; an open breaker closes, unless its core is dead."""
        self.entry = entry
        rank = b"" if entry.dp_rank is None else b"%b: %d\r\n" % (RANK_HEADER, entry.dp_rank)
        key = b"" if entry.api_key is None else b"Authorization: Bearer %b\r\n" % entry.api_key.encode()
        self.fields = rank + key
        self.down = self.dead

    def mark(self, *, down: bool) -> None:
        """Open or close the breaker."""
        self.openings += down and not self.down
        self.down = down
        self.dead = self.dead and down

    # --- connections -------------------------------------------------------------------------------------------------

    def take(self) -> BackendConnection | None:
        """Return an idle connection, if there is one."""
        oldest = time.monotonic() - IDLE_S
        idle = self._idle
        while idle:
            connection = idle.pop()
            if connection.idle_since > oldest and not connection.transport.is_closing():
                return connection
            connection.transport.abort()
        return None

    def connect(self, waiting: Waiting) -> None:
        """Open a connection for `waiting`; it gets that, or one that another request has done with before."""
        self._waiting.append(waiting)
        self._start_connecting()

    def release(self, connection: BackendConnection, *, reusable: bool) -> None:
        """Keep a connection that a request has done with for another one, or close it."""
        if not reusable or self.removed or connection.write_paused or connection.transport.is_closing():
            connection.transport.abort()
            return
        connection.set_reading(reading=True)
        while self._waiting:
            if self._waiting.popleft().connected(connection):
                return
        connection.idle_since = time.monotonic()
        self._idle.append(connection)

    def opened(self, connection: BackendConnection) -> None:
        """Note a connection that is there."""
        self._open.add(connection)
        sock = connection.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def forget(self, connection: BackendConnection) -> None:
        """Forget a connection that is gone."""
        self._open.discard(connection)

    def close_idle(self, now: float) -> None:
        """Close connections that have been idle for too long; `now` is `time.monotonic()`."""
        oldest = now - IDLE_S
        late = 0
        for connection in self._idle:
            if connection.idle_since > oldest:
                break
            connection.transport.abort()
            late += 1
        del self._idle[:late]

    def remove(self) -> None:
        """It left the set: requests in flight end as they may, nothing new is begun."""
        self.removed = True
        self.close_idle(float("inf"))
        self._fail(None)

    def cut(self) -> None:
        """Break off what is in flight, as if the engine had closed every connection: it goes on elsewhere, or ends."""
        for connection in list(self._open):
            connection.transport.abort()
            connection.connection_lost(ConnectionAbortedError("the fleet has given it up"))

    async def close(self) -> None:
        """Close every connection at once."""
        self.removed = True
        self._waiting.clear()
        for connection in list(self._open):
            connection.transport.abort()
        tasks = list(self._connecting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start_connecting(self) -> None:
        if len(self._connecting) < MAX_CONNECTING:
            task = asyncio.get_running_loop().create_task(self._connect())
            self._connecting.add(task)
            task.add_done_callback(self._connecting_ended)

    def _connecting_ended(self, task: asyncio.Task[None]) -> None:
        self._connecting.discard(task)
        if self._waiting and not self.removed:  # it came when this task had ended but still counted
            self._start_connecting()

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        host, port = self.address
        while self._waiting:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    _, connection = await loop.create_connection(lambda: BackendConnection(self), host, port)
                if connection.transport.is_closing():
                    raise ConnectionResetError("closed as soon as it was open")
            except OSError as error:  # TimeoutError is one
                self._fail(error)
                return
            self.release(connection, reusable=True)

    def _fail(self, error: OSError | None) -> None:
        while self._waiting:
            self._waiting.popleft().failed(error)
