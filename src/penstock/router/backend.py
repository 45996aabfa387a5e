"""The connections to one engine behind the router, and what is asked of it besides requests."""

from __future__ import annotations

import asyncio
import errno
import itertools
import re
import socket
import time
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, cast

import orjson

from penstock.process import backoff_s
from penstock.router.memory import Engine

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
        """Take a connection that is free; False: it is not needed any more."""
        raise NotImplementedError

    def not_connected(self, error: OSError | None) -> None:
        """There is none; the error is None where the engine has left the set."""
        raise NotImplementedError

    def received(self, data: bytes) -> None:
        raise NotImplementedError

    def lost(self, error: Exception | None) -> None:
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


class Backend:
    """One engine's connections, and counts of what became of them. The placement keeps all else that is known of it."""

    openings = 0
    """How often the breaker opened."""
    dead_answers = 0
    """Answers that said that its core is dead."""
    failure = ""
    """Cause that the last of them gave; empty: there was none."""
    requests = 0
    """Requests sent by this process."""
    removed = False
    asking: asyncio.Task[None] | None = None
    """What was asked of it last besides requests: one thing at a time."""
    fields: bytes
    """Header lines that the router adds to every request for it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.name = engine.name
        self.address = engine.entry.address()
        self.announced()
        self.read_buffer = memoryview(bytearray(READ_SIZE))
        """Where its connections read into, one at a time: what came is copied out at once."""
        self.open: set[BackendConnection] = set()
        self._idle: list[BackendConnection] = []
        """Oldest first; the youngest is used first, so that a burst's surplus ages and is closed. One that was lost
        stays until it is met."""
        self._connecting: set[asyncio.Task[None]] = set()
        self._waiting: deque[ConnectionUser] = deque()

    def announced(self) -> None:
        """The fleet has announced it, perhaps with another key."""
        rank, key = self.engine.entry.dp_rank, self.engine.entry.api_key
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
        """Open a connection for `user`; it gets that, or one that another request has done with before."""
        self._waiting.append(user)
        if len(self._connecting) < MAX_CONNECTING:
            self._connecting.add(asyncio.get_running_loop().create_task(self._connect()))

    def release(self, connection: BackendConnection, *, reusable: bool) -> None:
        """Keep a connection that a request has done with for another one, or close it."""
        transport = connection.transport
        if not reusable or self.removed or transport.get_write_buffer_size() or transport.is_closing():
            transport.abort()
            return
        connection.set_reading(reading=True)
        while self._waiting:
            if self._waiting.popleft().connected(connection):
                return
        connection.idle_since = time.monotonic()
        self._idle.append(connection)

    def close_idle(self, now: float) -> None:
        """Close connections that have been idle for too long; `now` is `time.monotonic()`."""
        while self._idle and self._idle[0].idle_since <= now - IDLE_S:
            self._idle.pop(0).transport.abort()

    def ask(self, work: Coroutine[Any, Any, None]) -> None:
        """Ask something of it besides requests, in place of what is being asked now."""
        self.stop_asking()
        self.asking = asyncio.get_running_loop().create_task(work)

    def stop_asking(self) -> None:
        if self.asking is not None:
            self.asking.cancel()

    def remove(self) -> None:
        """It left the set: requests in flight end as they may, nothing new is begun."""
        self.removed = True
        self.stop_asking()
        self.close_idle(float("inf"))
        self._fail(None)

    def cut(self) -> None:
        """Break off what is in flight, as if the engine had closed every connection: it goes on elsewhere, or ends."""
        for connection in list(self.open):
            connection.transport.abort()
            connection.connection_lost(ConnectionAbortedError("the fleet has given it up"))

    async def close(self) -> None:
        self.removed = True
        self._waiting.clear()
        for connection in list(self.open):
            connection.transport.abort()
        tasks = [*self._connecting, *([self.asking] if self.asking else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    _, connection = await loop.create_connection(lambda: BackendConnection(self), *self.address)
                if connection.transport.is_closing():
                    raise ConnectionResetError("closed as soon as it was open")
                self.release(connection, reusable=True)
            except OSError as error:  # TimeoutError is one
                self._fail(error)
        self._connecting.discard(cast("asyncio.Task[None]", asyncio.current_task()))

    def _fail(self, error: OSError | None) -> None:
        while self._waiting:
            self._waiting.popleft().not_connected(error)


# --- What is asked of engines besides requests -----------------------------------------------------------------------


_DEADLINE_S = 2.0
_PROBE_S, _LONGEST_PROBE_S = 0.1, 2.0
"""Before the first probe of an engine that is down, and the most that the wait doubles to."""
_MAX_ANSWER = 8 << 20
"""Bytes."""
_DEAD_MESSAGE = "EngineCore encountered an issue"
"""How the message of vLLM's `EngineDeadError` begins."""
_ALIVE = re.compile(rb"HTTP/1\.[01] [234]\d\d ")
"""Any answer but a 5xx says that a server is there and can serve; vLLM answers 503 once its engine is dead."""


def cause_of_death(content: bytes) -> str:
    """Message of the error in an answer that says that the engine's core is dead; empty: it does not say so."""
    if _DEAD_MESSAGE.encode() not in content:
        return ""
    try:
        answer: Any = orjson.loads(content)
    except orjson.JSONDecodeError:
        return ""
    match answer:
        case {"error": {"message": str(message)}} | {"answer": {"error": {"message": str(message)}}} if (
            message.startswith(_DEAD_MESSAGE)
        ):
            return message
        case _:
            return ""


async def wait_until_well(backend: Backend) -> None:
    """Probe an engine that is down until it answers its health check, with anything but a server error."""
    for failures in itertools.count():
        # Another process's state: there is no event to wait for.
        await asyncio.sleep(backoff_s(failures, _PROBE_S, _LONGEST_PROBE_S))
        with suppress(OSError):
            if _ALIVE.match(await read_answer(backend, "/health")):
                return


async def read_answer(backend: Backend, path: str) -> bytes:
    """Ask one engine on a connection of its own; returns its answer with the head, as far as it came in time.

    Raises:
        OSError: it refused or broke off.
    """
    host, port = backend.address
    answer = bytearray()
    with suppress(TimeoutError):
        async with asyncio.timeout(_DEADLINE_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
                while len(answer) < _MAX_ANSWER and (piece := await reader.read(1 << 18)):
                    answer += piece
            finally:
                writer.transport.abort()
    return bytes(answer)
