"""One engine behind the router: what the fleet announced of it, its breaker, its pool of connections, and its watch.

The watch asks how full its KV cache is, and whether one that a request found down is back. Whether an engine is well is
for the owner of the fleet to decide (`fleet/supervise.py`), which takes it out of the set.
"""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, NamedTuple, cast

from penstock.process import backoff_s
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


# --- What is asked of engines besides requests -----------------------------------------------------------------------


_DEADLINE_S = 2.0
_PROBE_S, _LONGEST_PROBE_S = 0.1, 2.0
"""Before the first probe of an engine that is down, and the most that the wait doubles to."""
_MAX_ANSWER = 8 << 20
"""Bytes."""
_ALIVE = re.compile(rb"HTTP/1\.[01] [234]\d\d ")
"""Any answer but a 5xx says that a server is there and can serve; vLLM answers 503 once its engine is dead."""
_MOST_TOKENS = 1 << 53
"""A capacity beyond is none; integers up to it are exact in JSON too."""
# Not prometheus_client's parser: this runs once a second for each engine in the event loop that carries the requests,
# and reads two of some thousand lines.
_USAGE = re.compile(rb"^vllm:kv_cache_usage_perc(\{[^\n]*\})? ([0-9.eE+-]+)\r?$", re.MULTILINE)
_CACHE = re.compile(rb"^vllm:cache_config_info\{([^\n]*)\} ", re.MULTILINE)
_SIZE = re.compile(rb'(?:^|,)(num_gpu_blocks|block_size|kv_cache_size_tokens)="(\d{1,15})"')


class KVStats(NamedTuple):
    """An engine's KV cache."""

    usage: float
    """Share in use, 0 to 1; the mean over data-parallel ranks."""
    capacity: int
    """Tokens that it holds; 0: the engine does not say."""


def parse_kv_stats(text: bytes | bytearray, dp_rank: int | None = None) -> KVStats | None:
    """Read vLLM's Prometheus text; None where it has no usage, or one that is no number from 0 to 1.

    vLLM 0.32 says how many tokens fit on a rank (exact for models with several kinds of attention); before that, and
    where it does not, it is the blocks of all ranks together times their size.

    Args:
        text: of one server.
        dp_rank: the data-parallel rank to read; None: all together.
    """
    ranks = _USAGE.findall(text)
    cache = _CACHE.search(text)
    sizes = {name: int(size) for name, size in _SIZE.findall(cache[1])} if cache else {}
    try:
        usages = [float(usage) for labels, usage in ranks if dp_rank is None or b'engine="%d"' % dp_rank in labels]
    except ValueError:
        return None
    if not usages or min(usages) < 0 or max(usages) > 1:
        return None
    capacity = sizes.get(b"kv_cache_size_tokens", 0) * len(usages)
    capacity = capacity or sizes.get(b"num_gpu_blocks", 0) * sizes.get(b"block_size", 0) * len(usages) // len(ranks)
    return KVStats(sum(usages) / len(usages), capacity if capacity <= _MOST_TOKENS else 0)


async def read(backend: Backend, path: str) -> bytes:
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


class BackendWatch:
    """Watches every engine, one task at a time for each.

    Args:
        interval_s: seconds between two readings of one engine's KV cache; 0: none is read.
        backends: returns the engines of the set.
        up: called with an engine that is down and answers its health check again, with anything but a server error.
        kv_reported: called with what an engine reports of its KV cache.
    """

    def __init__(
        self,
        interval_s: float,
        backends: Callable[[], Iterable[Backend]],
        *,
        up: Callable[[Backend], None],
        kv_reported: Callable[[Backend, KVStats], None],
    ) -> None:
        self._interval_s = interval_s
        self._backends = backends
        self._up = up
        self._kv_reported = kv_reported
        self._clock: asyncio.Task[None] | None = None
        self._tasks: dict[Backend, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Begin; harmless where that has been done."""
        if self._interval_s and self._clock is None:
            self._clock = asyncio.get_running_loop().create_task(self._tick())

    def probe(self, backend: Backend) -> None:
        """Probe an engine that is down until it answers."""
        self.stop(backend)
        self._spawn(backend, self._probe(backend))

    def stop(self, backend: Backend) -> None:
        """Stop what is under way for an engine."""
        task = self._tasks.pop(backend, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Stop all."""
        tasks = [*self._tasks.values(), *([self._clock] if self._clock else [])]
        self._clock = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, backend: Backend, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[backend] = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda task: self._tasks.get(backend) is task and self._tasks.pop(backend))

    async def _tick(self) -> None:
        while True:
            for backend in self._backends():
                if backend not in self._tasks:
                    self._spawn(backend, self._ask(backend))
            await asyncio.sleep(self._interval_s)  # another process's state: there is no event to wait for

    async def _ask(self, backend: Backend) -> None:
        stats = None
        with suppress(OSError):  # the next request finds out
            stats = parse_kv_stats(await read(backend, "/metrics"), backend.entry.dp_rank)
        del self._tasks[backend]
        if stats is not None:
            self._kv_reported(backend, stats)

    async def _probe(self, backend: Backend) -> None:
        failures = 0
        while True:
            await asyncio.sleep(backoff_s(failures, _PROBE_S, _LONGEST_PROBE_S))  # as in `_tick`
            failures += 1
            well = None
            with suppress(OSError):
                well = _ALIVE.match(await read(backend, "/health"))
            if well:
                del self._tasks[backend]
                self._up(backend)
                return
