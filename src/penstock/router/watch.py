"""Asks each engine now and then whether it is well and how full its KV cache is."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from penstock.router.backend import OWN_SHORTAGES, Engine, is_alive

_DEADLINE_S = 2.0
_MAX_ANSWER = 8 << 20
"""Bytes."""
_MOST_TOKENS = 1 << 53
"""A capacity beyond is none; integers up to it are exact in JSON too."""
_USAGE = re.compile(rb"^vllm:kv_cache_usage_perc(\{[^\n]*\})? ([0-9.eE+-]+)\r?$", re.MULTILINE)
_CACHE = re.compile(rb"^vllm:cache_config_info\{([^\n]*)\} ", re.MULTILINE)
_SIZE = re.compile(rb'(?:^|,)(num_gpu_blocks|block_size|kv_cache_size_tokens)="(\d{1,15})"')


class KVFigures(NamedTuple):
    """An engine's KV cache."""

    usage: float
    """Share in use, 0 to 1; the mean over data-parallel ranks."""
    capacity: int
    """Tokens that it holds; 0: the engine does not say."""


class Reading(NamedTuple):
    """What an engine answered."""

    well: bool
    figures: KVFigures | None
    """None: it has none, as an engine that is no vLLM."""


_UNWELL = Reading(well=False, figures=None)


def parse_figures(text: bytes | bytearray, dp_rank: int | None = None) -> KVFigures | None:
    """The figures in vLLM's Prometheus text; None where it has none, or a usage that is no number from 0 to 1.

    vLLM 0.32 says how many tokens fit on a rank (exact for models with several kinds of attention); before that, and
    where it does not, it is the blocks of all ranks together times their size.

    Args:
        text: of one server.
        dp_rank: the figures of this data-parallel rank alone; None: of all together.
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
    return KVFigures(sum(usages) / len(usages), capacity if capacity <= _MOST_TOKENS else 0)


async def read(host: str, port: int, dp_rank: int | None = None) -> Reading:
    """Ask one engine, both questions on one connection; of its cache, that of `dp_rank` where that is one.

    Raises:
        OSError: it refused, broke off, or did not answer in time (TimeoutError).
    """
    async with asyncio.timeout(_DEADLINE_S):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            ask = f"HTTP/1.1\r\nHost: {host}:{port}\r\n"
            writer.write(f"GET /health {ask}\r\nGET /metrics {ask}Connection: close\r\n\r\n".encode())
            answer = bytearray()
            while len(answer) < _MAX_ANSWER and (piece := await reader.read(1 << 18)):
                answer += piece
        finally:
            writer.transport.abort()
    return Reading(is_alive(answer), parse_figures(answer, dp_rank))


class EngineWatch:
    """Looks after every engine.

    An engine is unwell if it takes no connection, breaks off or answers its health check with a server error. One
    whose metrics fail, or that takes its time, is not: it may be busy, or no vLLM.

    Args:
        interval_s: seconds between two looks at one engine; 0: never.
        engines: those to look at.
        figures: called with what an engine said of its KV cache.
        unwell: called with an engine that is.
    """

    def __init__(
        self,
        interval_s: float,
        engines: Callable[[], Iterable[Engine]],
        figures: Callable[[Engine, KVFigures], None],
        unwell: Callable[[Engine], None],
    ) -> None:
        self._interval_s = interval_s
        self._engines = engines
        self._figures = figures
        self._unwell = unwell
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
            for engine in list(self._engines()):
                if not engine.down and engine not in self._asking:
                    self._asking[engine] = asyncio.get_running_loop().create_task(self._ask(engine))
            await asyncio.sleep(self._interval_s)  # another process's state: there is no event to wait for

    async def _ask(self, engine: Engine) -> None:
        try:
            reading = await read(*engine.address, engine.entry.dp_rank)
        except TimeoutError:
            return
        except OSError as error:
            if error.errno in OWN_SHORTAGES:
                return
            reading = _UNWELL
        finally:
            del self._asking[engine]
        if engine.removed:
            return
        if not reading.well:
            self._unwell(engine)
        elif reading.figures is not None:
            self._figures(engine, reading.figures)
