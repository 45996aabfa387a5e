"""Data-parallel ranks of one server, each an engine of its own to the router."""

from __future__ import annotations

import pytest
from router_rig import Backend, Rig, answer_name, rig

from penstock.router.kv import KVStats, parse_kv_stats
from penstock.router.membership import EngineEntry

RANK = "x-data-parallel-rank"


def ranks(backend: Backend, count: int = 2, **more: object) -> list[EngineEntry]:
    url = f"http://127.0.0.1:{backend.port}"
    return [EngineEntry(f"e0.dp{i}", url, dp_rank=i, **more) for i in range(count)]  # type: ignore[arg-type]


def given(backend: Backend) -> list[str | None]:
    return [seen.header(RANK) for seen in backend.seen]


async def sessions(r: Rig) -> dict[str, int]:
    return {engine.name: engine.sessions for engine in (await r.settled()).engines}


@pytest.mark.parametrize("process", [False, True], ids=["one", "workers"])
async def test_requests_are_spread_over_ranks_and_sessions_stay(process: bool) -> None:  # noqa: FBT001
    more = {"workers": 2, "slack_tokens": 0} if process else {}  # else as the hash has it
    async with rig(answer_name, process=process, **more) as r:
        (backend,) = r.backends
        await r.announce(ranks(backend))
        client = await r.client()
        for _ in range(3):
            for name in "abcd":
                assert (await client.ask(headers=f"X-Session-ID: {name}\r\nX-Prompt-Tokens: 10\r\n")).status == 200
        first, second, third = (given(backend)[i : i + 4] for i in (0, 4, 8))
        assert sorted(str(rank) for rank in first) == ["0", "0", "1", "1"]
        assert first == second == third
        assert await sessions(r) == {"e0.dp0": 2, "e0.dp1": 2}


async def test_the_header_is_ours_and_all_else_as_it_came() -> None:
    async with rig(answer_name) as r:
        (backend,) = r.backends
        await r.announce(ranks(backend)[1:])
        client = await r.client()
        body = b"x" * 300_000
        answer = await client.ask(body=body, headers="X-Data-Parallel-Rank: 7\r\nX-Other: y\r\n")
        assert answer.status == 200
        (seen,) = backend.seen
        assert seen.header(RANK) == "1", "vLLM takes the first of two"
        assert seen.header("x-other") == "y"
        assert seen.body == body
        await client.send(b"POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n")
        await client.send(b"ok")
        assert (await client.receive()).status == 200
        assert backend.seen[1].header(RANK) == "1"
        assert backend.seen[1].body == b"ok"


async def test_each_rank_has_its_own_figures() -> None:
    async with rig(answer_name, engine_metrics_interval_s=0.05) as r:
        (backend,) = r.backends
        backend.metrics = (
            b'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\n'
            b'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25\n'
            b'vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75\n'
        )
        await r.announce(ranks(backend, weight_version=3))
        known = [(0.25, 800), (0.75, 800)]
        await r.until(lambda state: [(e.kv_usage, e.kv_capacity) for e in state.engines] == known)
        assert [(e.dp_rank, e.weight_version) for e in (await r.admin.engines()).engines] == [(0, 3), (1, 3)]


async def test_a_name_at_another_rank_is_another_engine() -> None:
    async with rig(answer_name) as r:
        url = f"http://127.0.0.1:{r.backends[0].port}"
        await r.announce([EngineEntry("e0", url, dp_rank=0)])
        client = await r.client()
        assert (await client.ask(headers="X-Session-ID: s\r\n")).status == 200
        await r.announce([EngineEntry("e0", url, dp_rank=1)])
        assert await sessions(r) == {"e0": 0}
        assert (await client.ask(headers="X-Session-ID: s\r\n")).status == 200
        assert given(r.backends[0]) == ["0", "1"]


def test_figures_of_a_rank_that_is_not_there() -> None:
    text = b'vllm:kv_cache_usage_perc{engine="1"} 0.5\n'
    assert parse_kv_stats(text, 1) == KVStats(0.5, 0)
    assert parse_kv_stats(text, 0) is None
    assert parse_kv_stats(text, 11) is None
