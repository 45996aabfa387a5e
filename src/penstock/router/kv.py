"""The usage of engines' KV caches, as their metrics report it."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from typing import NamedTuple

from penstock.router.backend import Backend
from penstock.router.dispatcher import Dispatcher

_DEADLINE_S = 2.0
_MAX_ANSWER = 8 << 20
"""Most bytes read of one answer."""
_MOST_TOKENS = 1 << 53
"""Largest capacity that is believed; integers up to it are exact in JSON too."""
# Not prometheus_client's parser: this runs once a second for each engine, in the event loop that carries the requests,
# and needs two of some thousand lines.
_USAGE = re.compile(rb"^vllm:kv_cache_usage_perc(\{[^\n]*\})? ([0-9.eE+-]+)\r?$", re.MULTILINE)
_CACHE = re.compile(rb"^vllm:cache_config_info\{([^\n]*)\} ", re.MULTILINE)
_SIZE = re.compile(rb'(?:^|,)(num_gpu_blocks|block_size|kv_cache_size_tokens)="(\d{1,15})"')


class KVStats(NamedTuple):
    """An engine's KV cache."""

    usage: float
    """Fraction in use, 0 to 1; the mean over data-parallel ranks."""
    capacity: int
    """Tokens that it holds; 0: unknown."""


def parse_kv_stats(text: bytes | bytearray, dp_rank: int | None = None) -> KVStats | None:
    """Read the KV usage of one rank or all from vLLM's metrics; None: they have none.

    vLLM 0.32 reports the tokens that fit on a rank, which is exact for models with several kinds of attention. Without
    that value, the capacity comes from the blocks, which vLLM counts over all ranks together.
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


async def read_metrics(backend: Backend) -> bytes:
    """Return an engine's metrics, as far as they came in time; empty if it is gone."""
    host, port = backend.entry.address()
    answer = bytearray()
    with suppress(OSError):  # TimeoutError is one
        async with asyncio.timeout(_DEADLINE_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"GET /metrics HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
                while len(answer) < _MAX_ANSWER and (piece := await reader.read(1 << 18)):
                    answer += piece
            finally:
                writer.transport.abort()
    return bytes(answer)


async def report_usage(dispatcher: Dispatcher, interval_s: float) -> None:
    """Report every engine's KV usage to placement, every `interval_s` seconds."""

    async def report(backend: Backend) -> None:
        if (stats := parse_kv_stats(await read_metrics(backend), backend.entry.dp_rank)) is not None:
            dispatcher.placement.report_kv(backend, kv_usage=stats.usage, kv_capacity=stats.capacity)
            dispatcher.gate.room()

    while True:
        await asyncio.gather(*map(report, dispatcher.backends.values()))
        await asyncio.sleep(interval_s)  # an engine sends no event to wait for
