"""What was seen to go wrong in other routers in front of vLLM, one test each, against this one."""

from __future__ import annotations

import json

from router_rig import Backend, Reader, Seen, Writer, answer_name, reply, rig


async def poison_kills(backend: Backend, seen: Seen, reader: Reader, writer: Writer) -> None:  # noqa: ARG001
    if b"poison" in seen.body:
        writer.close()
    else:
        writer.write(reply(backend.name.encode()))


async def test_a_control_call_is_not_answered_by_one_of_many() -> None:
    async with rig(answer_name, answer_name) as r:
        client = await r.client()
        for call in (
            "/pause", "/resume", "/sleep", "/wake_up", "/update_weights", "/start_weight_update", "/collective_rpc",
            "/finish_weight_update", "/init_weight_transfer_engine", "/reset_prefix_cache", "/abort_requests",
            "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/scale_elastic_ep", "/reset_mm_cache",
            "/reset_encoder_cache", "/start_profile", "/stop_profile", "/penstock/weights/apply",
            "/fault_tolerance/apply", "/release_kv_cache_memory", "/shutdown_weight_transfer_engine",
            "/start_draft_weight_update", "/update_weight_version",
            "/pause?mode=abort", "/pause/", "/weight_checker", "/inference/v1/abort_requests", "/server_info",
            "/adapters/a", "/weight_info", "/penstock/info", "/is_paused", "/v1/responses/r1/cancel", "/sim/fault",
        ):  # fmt: skip
            answer = await client.ask(call, b"{}")
            assert (answer.status, answer.header("x-penstock-error")) == (403, "control_call"), call
        assert not r.backends[0].seen
        assert not r.backends[1].seen


async def test_poisoned_requests_open_no_breaker_and_the_last_engine_serves_on() -> None:
    async with rig(poison_kills, poison_kills, engine_metrics_interval_s=0.05) as r:
        await r.backends[1].stop()
        client = await r.client()
        for _ in range(10):
            assert (await client.ask(body=b"poison")).status == 502
            assert (await client.ask(body=b"good")).body == b"e0"
        assert [e.breaker_openings > 0 for e in (await r.admin.engines()).engines] == [False, True]


async def test_prompts_that_begin_alike_do_not_go_to_one_engine() -> None:
    async with rig(*[answer_name] * 4) as r:
        body = json.dumps({"messages": [{"role": "system", "content": "You are a helpful assistant that " * 9}]})
        client = await r.client()
        for _ in range(100):
            assert (await client.ask("/v1/chat/completions", body.encode())).status == 200
        assert [len(b.seen) for b in r.backends] == [25] * 4
