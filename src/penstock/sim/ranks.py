"""The data-parallel ranks of one server: who answers a request, and control calls that go to all."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler

from penstock.errors import RequestError
from penstock.sim.answers import RANK, RANKS
from penstock.sim.engine import SimEngine

RANK_HEADER = "X-data-parallel-rank"


def on_one(handler: Handler) -> Handler:
    """On the rank that the header names, else on the one with the least to do, as vLLM places."""

    async def placed(http: web.Request) -> web.StreamResponse:
        http[RANK] = _rank(http)
        return await handler(http)

    return placed


def on_all(handler: Handler) -> Handler:
    """On every rank, one after another; the last one's answer, or the first error."""

    async def everywhere(http: web.Request) -> web.StreamResponse:
        for rank in http.app[RANKS][:-1]:
            http[RANK] = rank
            await handler(http)
        http[RANK] = http.app[RANKS][-1]
        return await handler(http)

    return everywhere


def _rank(http: web.Request) -> SimEngine:
    ranks = http.app[RANKS]
    named = http.headers.get(RANK_HEADER, "")
    if not named.lstrip("-").isdigit():  # vLLM passes over what is no number
        return min(ranks, key=lambda rank: len(rank.scheduler.running) + len(rank.scheduler.waiting))
    if not 0 <= int(named) < len(ranks):
        raise RequestError(f"data_parallel_rank {named} is out of range [0, {len(ranks)}).")
    return ranks[int(named)]
