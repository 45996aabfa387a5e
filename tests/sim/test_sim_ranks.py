"""Several data-parallel ranks behind one simulated server, and a server without our plugin."""

from __future__ import annotations

from sim_http import PROMPT, sim_client

from penstock.router.kv import parse_kv_stats
from penstock.sim.config import SimConfig

BODY = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4, "logprobs": 0}}


async def test_the_header_chooses_a_rank_and_nothing_else_does() -> None:
    async with sim_client(SimConfig(data_parallel_size=2)) as client:
        for rank in ("1", "1", "0", "1"):
            await client.post("/inference/v1/generate", BODY, headers={"X-data-parallel-rank": rank})
        made = [rank.stats.generation_tokens for rank in client.server.ranks]
        assert made == [4, 12]
        status, answer = await client.call(
            "POST", "/inference/v1/generate", BODY, headers={"x-data-parallel-rank": "2"}
        )
        assert (status, answer["error"]["message"]) == (400, "data_parallel_rank 2 is out of range [0, 2).")
        await client.post("/inference/v1/generate", BODY, headers={"X-data-parallel-rank": "first"})
        assert sum(rank.stats.generation_tokens for rank in client.server.ranks) == 20
        text = await client.get("/metrics")
        assert parse_kv_stats(text, 1) is not None
        assert parse_kv_stats(text, 2) is None


async def test_control_calls_reach_every_rank() -> None:
    async with sim_client(SimConfig(data_parallel_size=3)) as client:
        await client.post("/pause?mode=keep")
        assert [rank.paused for rank in client.server.ranks] == [True] * 3
        await client.post("/init_weight_transfer_engine", {"init_info": {}})
        await client.post("/start_weight_update")
        await client.post("/update_weights", {"update_info": {}})
        await client.post("/finish_weight_update", {"weight_version": "5"})
        await client.post("/resume")
        assert [(rank.paused, rank.weights.version) for rank in client.server.ranks] == [(False, 5)] * 3


async def test_vllm_0_26_says_nothing_of_versions() -> None:
    async with sim_client(SimConfig(plain=True, vllm_version="0.26.0")) as client:
        assert "weight_versions" not in (await client.generate(3))["choices"][0]
        assert (await client.call("GET", "/weight_info"))[0] == 404
