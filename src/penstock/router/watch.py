"""Ask each engine how full its KV cache is, and one that a request found down whether it is back.

Whether an engine is well is for the owner of the fleet to decide (`fleet/probe.py`), which takes it out of the set.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from penstock.process import backoff_s
from penstock.router.backend import Backend

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
