"""Reads from each engine's own metrics how full its KV cache is."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from penstock.router.engine import Engine

_DEADLINE_S = 2.0
_MAX_ANSWER = 8 << 20
"""Bytes."""
_USAGE = re.compile(rb"^vllm:kv_cache_usage_perc(?:\{[^\n]*\})? ([0-9.eE+-]+)\r?$", re.MULTILINE)
_CACHE = re.compile(rb"^vllm:cache_config_info\{([^\n]*)\} ", re.MULTILINE)
_SIZE = re.compile(rb'(?:^|,)(num_gpu_blocks|block_size|kv_cache_size_tokens)="(\d{1,15})"')


class KVFigures(NamedTuple):
    """An engine's KV cache."""

    usage: float
    """Share in use, 0 to 1; the mean over data-parallel ranks."""
    capacity: int
    """Tokens that it holds; 0: the engine does not say."""


def parse_figures(text: bytes) -> KVFigures | None:
    """The figures in vLLM's Prometheus text; None where it has none.

    vLLM 0.32 says how many tokens fit on a rank (exact for models with several kinds of attention); before that, and
    where it does not, it is the blocks of all ranks together times their size.
    """
    usages = [float(usage) for usage in _USAGE.findall(text)]
    if not usages:
        return None
    cache = _CACHE.search(text)
    sizes = {name: int(size) for name, size in _SIZE.findall(cache[1])} if cache else {}
    capacity = sizes.get(b"kv_cache_size_tokens", 0) * len(usages)
    capacity = capacity or sizes.get(b"num_gpu_blocks", 0) * sizes.get(b"block_size", 0)
    return KVFigures(sum(usages) / len(usages), capacity)


async def read_figures(host: str, port: int) -> KVFigures | None:
    """Ask one engine.

    Raises:
        OSError: it refused, broke off, or did not answer in time (TimeoutError).
    """
    async with asyncio.timeout(_DEADLINE_S):
        reader, writer = await asyncio.open_connection(host, port)
        try:  # HTTP/1.0: no chunks in the answer, and the connection's end is its end
            writer.write(f"GET /metrics HTTP/1.0\r\nHost: {host}:{port}\r\n\r\n".encode())
            answer = bytearray()
            while len(answer) < _MAX_ANSWER and (piece := await reader.read(1 << 18)):
                answer += piece
        finally:
            writer.transport.abort()
    return parse_figures(bytes(answer))


class EngineFigures:
    """Reads every engine's figures now and then.

    An engine whose metrics fail is not thereby down: it may be busy, or no vLLM.

    Args:
        interval_s: seconds between two readings of one engine; 0: never.
        engines: those to ask.
        read: called with what an engine said.
        unreachable: called with an engine that took no connection.
    """

    def __init__(
        self,
        interval_s: float,
        engines: Callable[[], Iterable[Engine]],
        read: Callable[[Engine, KVFigures], None],
        unreachable: Callable[[Engine], None],
    ) -> None:
        self._interval_s = interval_s
        self._engines = engines
        self._read = read
        self._unreachable = unreachable
        self._clock: asyncio.Task[None] | None = None
        self._asking: dict[Engine, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Begin; harmless where that has been done."""
        if self._interval_s and self._clock is None:
            self._clock = asyncio.get_running_loop().create_task(self._tick())

    async def close(self) -> None:
        """Stop."""
        tasks = [*self._asking.values(), *([self._clock] if self._clock else [])]
        self._clock = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _tick(self) -> None:
        while True:
            for engine in self._engines():
                if not engine.down and engine not in self._asking:
                    self._asking[engine] = asyncio.get_running_loop().create_task(self._ask(engine))
            await asyncio.sleep(self._interval_s)  # another process's state: there is no event to wait for

    async def _ask(self, engine: Engine) -> None:
        try:
            figures = await read_figures(*engine.address)
            if figures is not None and not engine.removed:
                self._read(engine, figures)
        except TimeoutError:
            pass  # busy
        except OSError:
            if not engine.removed:
                self._unreachable(engine)
        finally:
            del self._asking[engine]
