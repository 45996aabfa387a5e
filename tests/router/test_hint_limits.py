"""Headers are hints: what a client claims there takes no more of an engine than one request can."""

from __future__ import annotations

import asyncio

import pytest
from router_rig import answer_name, held, request, rig, session

from patience import WAIT_S, eventually
from penstock.router.membership import EngineEntry
from penstock.router.placement import MOST_TOKENS, Placement

HUGE = "X-Prompt-Tokens: 999999999999999\r\nX-Expected-Tokens: 999999999999999\r\n"
METRICS = b'vllm:cache_config_info{block_size="10",num_gpu_blocks="100"} 1.0\nvllm:kv_cache_usage_perc 0.0\n'


async def test_two_slow_bodies_with_huge_claims_stop_no_new_session() -> None:
    async with rig(answer_name, answer_name, engine_metrics_interval_s=0.05) as r:
        for backend in r.backends:
            backend.metrics = METRICS
        await r.until(lambda state: all(engine.kv_capacity == 1000 for engine in state.engines))
        for i in range(2):
            slow = await r.client()
            await slow.send(
                f"POST /v1/x HTTP/1.1\r\nHost: t\r\nX-Session-ID: slow{i}\r\n{HUGE}Content-Length: 9\r\n\r\n12".encode()
            )
        assert r.router is not None
        await eventually(lambda: r.router is not None and r.router.metrics.requests == 2)
        state = await r.admin.engines()
        assert [engine.resident_tokens for engine in state.engines] == [0, 0], "nothing of it is with an engine yet"
        client = await r.client()
        for i in range(10):
            asked = client.ask(body=b"{}", headers=f"X-Session-ID: new{i}\r\nX-Prompt-Tokens: 10\r\n")
            assert (await asyncio.wait_for(asked, WAIT_S)).status == 200
        await slow.send(b"3456789")
        assert (await slow.receive()).status == 200
        assert r.backends[0].seen[-1].body == b"123456789" or r.backends[1].seen[-1].body == b"123456789"


@pytest.mark.parametrize(
    ("entry", "metrics", "most"), [({}, b"", MOST_TOKENS), ({}, METRICS, 1000), ({"max_model_len": 64}, METRICS, 64)]
)
async def test_a_claim_counts_as_what_one_sequence_can_have(entry: dict[str, int], metrics: bytes, most: int) -> None:
    release, answer = held()
    async with rig(answer, engine_metrics_interval_s=0.05) as r:
        r.backends[0].metrics = metrics
        await r.announce([r.backends[0].entry(**entry)])
        await r.until(lambda state: bool(state.engines[0].kv_capacity) == bool(metrics))
        client = await r.client()
        await client.send(request(body=b"{}", headers=HUGE))
        await r.backends[0].arrived.wait()
        assert (await r.admin.engines()).engines[0].outstanding_tokens == most
        release.set()
        assert (await client.receive()).status == 200
        engine = (await r.admin.engines()).engines[0]
        assert (engine.outstanding, engine.outstanding_tokens, engine.resident_tokens) == (0, 0, 0)


async def test_equal_requests_of_a_session_count_each_for_itself() -> None:
    release, answer = held()
    async with rig(answer) as r:
        first, second = await r.client(), await r.client()
        await first.send(request(headers=session("s")))
        await r.backends[0].arrived.wait()
        await r.announce([r.backends[0].entry(eligible=False)])
        await second.send(request(headers=session("s")))
        await r.until_held(1)
        release.set()
        assert (await first.receive()).status == 200
        assert (await r.load("e0")).resident_tokens == 1, "the session, whose length is not known"


def test_the_longest_context_of_any_engine_bounds_a_claim() -> None:
    placement = Placement()
    assert placement.most_tokens == MOST_TOKENS
    placement.set_engines([EngineEntry(f"e{i}", f"http://h:{i + 1}", max_model_len=64 << i) for i in range(3)])
    assert placement.most_tokens == 256
    placement.report_kv(placement.engines["e2"], kv_usage=0.0, kv_capacity=100)
    assert placement.most_tokens == 128
    placement.set_engines([])
    assert placement.most_tokens == MOST_TOKENS
