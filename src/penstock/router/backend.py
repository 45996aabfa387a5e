"""Asks an engine that is down whether it is back."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.router.backend_connection import EngineConnection
from penstock.router.http import RefusalError
from penstock.router.membership import EngineEntry

if TYPE_CHECKING:
    from penstock.router.exchange import Exchange

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 2.0
_DEADLINE_S = 2.0
_ALIVE = re.compile(rb"HTTP/1\.[01] [234]\d\d ")
"""Any answer but a 5xx says that a server is there and can serve; vLLM answers 503 once its engine is dead."""


class Probes:
    """One probe for each engine that is down, with exponential back-off between tries.

    Args:
        up: called with an engine that answers again.
    """

    def __init__(self, up: Callable[[Engine], None]) -> None:
        self._up = up
        self._tasks: dict[Engine, asyncio.Task[None]] = {}

    def start(self, engine: Engine) -> None:
        """Probe it until it answers; harmless where that is being done."""
        if engine not in self._tasks:
            self._tasks[engine] = asyncio.get_running_loop().create_task(self._watch(engine))

    def stop(self, engine: Engine) -> None:
        """Leave it alone."""
        task = self._tasks.pop(engine, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Stop all."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, engine: Engine) -> None:
        delay = _FIRST_DELAY_S
        while True:
            await asyncio.sleep(delay)  # another process: there is no event to wait for
            if await answers(*engine.address):
                del self._tasks[engine]
                self._up(engine)
                return
            delay = min(2 * delay, _LONGEST_DELAY_S)


async def answers(host: str, port: int) -> bool:
    """Whether `GET /health` is answered in time, and not with a server error."""
    try:
        async with asyncio.timeout(_DEADLINE_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"GET /health HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
                line = await reader.readline()
            finally:
                writer.transport.abort()
    except (OSError, ValueError):  # refused, broken, too late, or an endless line
        return False
    return is_alive(line)


def is_alive(answer: bytes | bytearray) -> bool:
    """Whether this answer to a health check says that the engine is well."""
    return _ALIVE.match(answer) is not None


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


class Engine:
    """Live record of one engine. What policies see of it is kept by the placement."""

    def __init__(self, entry: EngineEntry) -> None:
        self.entry = entry
        self.address = entry.address()
        self.fields = _fields(entry)
        """Header lines that the router adds to every request for it."""
        self.down = False
        """The breaker is open: a connection was refused or a health check failed, and since then neither a probe
        succeeded nor a membership was announced."""
        self.openings = 0
        """How often the breaker opened."""
        self.dead_answers = 0
        """Answers that said that its core is dead."""
        self.failure = ""
        """Cause that the last of them gave; empty: there was none."""
        self.outstanding = 0
        """Requests of this process that were sent and not answered in full."""
        self.requests = 0
        """Requests sent by this process."""
        self.removed = False
        self.read_buffer = memoryview(bytearray(READ_SIZE))
        """Where its connections read into, one at a time: what came is copied out at once."""
        self._idle: list[EngineConnection] = []
        """Oldest first; the youngest is used first, so that a burst's surplus ages and is closed. One that was lost
        stays until it is met."""
        self._open: set[EngineConnection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._waiting: deque[Exchange] = deque()

    @property
    def name(self) -> str:
        """Its name."""
        return self.entry.name

    def announce(self, entry: EngineEntry) -> None:
        """Take over what the fleet says of it now; an open breaker closes."""
        self.entry = entry
        self.fields = _fields(entry)
        self.down = False

    def mark(self, *, down: bool) -> None:
        """Open or close the breaker."""
        self.openings += down and not self.down
        self.down = down

    # --- connections -------------------------------------------------------------------------------------------------

    def connect(self, exchange: Exchange, *, fresh: bool = False) -> None:
        """Give `exchange` a connection (`exchange.connected`), or say why not (`exchange.not_connected`).

        Args:
            exchange: the request that wants one.
            fresh: do not take one from the pool.
        """
        if not fresh:
            oldest = time.monotonic() - IDLE_S
            idle = self._idle
            while idle:
                connection = idle.pop()
                if connection.idle_since > oldest and not connection.transport.is_closing():
                    exchange.connected(connection)
                    return
                connection.transport.abort()
        self._waiting.append(exchange)
        self._start_connecting()

    def release(self, connection: EngineConnection, *, reusable: bool) -> None:
        """An exchange is over: keep its connection for another one, or close it."""
        if not reusable or self.removed or connection.write_paused or connection.transport.is_closing():
            connection.transport.abort()
            return
        connection.set_reading(reading=True)
        if not self._waiting or not self._give(connection):
            connection.idle_since = time.monotonic()
            self._idle.append(connection)

    def opened(self, connection: EngineConnection) -> None:
        """A connection is there."""
        self._open.add(connection)
        sock = connection.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def forget(self, connection: EngineConnection) -> None:
        """A connection is gone."""
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
        while (exchange := self._next_waiting()) is not None:
            exchange.not_connected(self)

    def cut(self) -> None:
        """It has left the set, and nothing is to be hoped of it: what is in flight goes on elsewhere, or breaks off."""
        for connection in list(self._open):
            connection.cut()

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
        while self._next_waiting(peek=True) is not None:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    _, connection = await loop.create_connection(lambda: EngineConnection(self), host, port)
                if connection.transport.is_closing():
                    raise ConnectionResetError("closed as soon as it was open")
            except OSError as error:  # TimeoutError is one
                self._refused(error)
                return
            self.release(connection, reusable=True)

    def _refused(self, error: OSError) -> None:
        ours = error.errno in OWN_SHORTAGES
        while (exchange := self._next_waiting()) is not None:
            if ours:
                exchange.refuse(
                    RefusalError(503, "no_sockets", f"the router cannot open a connection ({error}); raise ulimit -n")
                )
            else:
                exchange.not_connected(self)

    def _give(self, connection: EngineConnection) -> bool:
        exchange = self._next_waiting()
        if exchange is not None:
            exchange.connected(connection)
        return exchange is not None

    def _next_waiting(self, *, peek: bool = False) -> Exchange | None:
        while self._waiting:
            exchange = self._waiting[0]
            if exchange.gone:
                self._waiting.popleft()
                continue
            return exchange if peek else self._waiting.popleft()
        return None


def _fields(entry: EngineEntry) -> bytes:
    rank = b"" if entry.dp_rank is None else b"%b: %d\r\n" % (RANK_HEADER, entry.dp_rank)
    key = b"" if entry.api_key is None else b"Authorization: Bearer %b\r\n" % entry.api_key.encode()
    return rank + key
