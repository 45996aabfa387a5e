"""What was seen to go wrong in other routers in front of vLLM, one test each, against this one."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from router_rig import Backend, RawClient, Rig, Seen, answer_name, eventually, reply, request, rig, router_process

from penstock.router.admin_client import RouterAdmin
from penstock.router.membership import EngineEntry

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
SESSIONS = range(400)


def session(name: object) -> str:
    return f"X-Session-ID: {name}\r\n"


async def ask_homes(url: str, sessions: Iterable[object], more: str = "") -> dict[object, str]:
    """Where a turn of each session goes: 16 clients share them."""
    names = list(sessions)

    async def some(mine: list[object]) -> dict[object, str]:
        client = await RawClient.connect(url)
        try:
            return {s: (await client.ask(headers=session(s) + more)).body.decode() for s in mine}
        finally:
            client.close()

    parts = await asyncio.gather(*[some(names[i::16]) for i in range(16)])
    return {s: home for part in parts for s, home in part.items()}


def moved(before: Mapping[object, str], after: Mapping[object, str]) -> list[object]:
    return [s for s, home in before.items() if after[s] != home]


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
        ):  # fmt: skip
            answer = await client.ask(call, b"{}")
            assert (answer.status, answer.header("x-penstock-error")) == (403, "control_call"), call
        assert not r.backends[0].seen
        assert not r.backends[1].seen


async def test_a_retry_leaves_the_sessions_engine() -> None:
    async with rig(poison_kills, poison_kills, poison_kills) as r:
        client = await r.client()
        await client.ask(headers=session("s"))
        assert r.router is not None
        for engine in r.router.dispatcher.backends.values():  # one that closes when it is reused is taken for stale
            engine.close_idle(float("inf"))
        answer = await client.ask(body=b"poison", headers=session("s"))
        assert (answer.status, answer.header("x-penstock-error")) == (502, "engines_failed")
        assert sorted(sum(b"poison" in seen.body for seen in b.seen) for b in r.backends) == [0, 1, 1]


async def test_poisoned_requests_open_no_breaker_and_the_last_engine_serves_on() -> None:
    async with rig(poison_kills, poison_kills, engine_metrics_interval_s=0.05) as r:
        await r.backends[1].stop()
        client = await r.client()
        for _ in range(10):
            assert (await client.ask(body=b"poison")).status == 502
            assert (await client.ask(body=b"good")).body == b"e0"
        assert [e.down for e in (await r.admin.engines()).engines] == [False, True]


async def test_an_engine_that_answers_errors_is_not_left_out() -> None:
    async def error(backend: Backend, seen: Seen, reader: Reader, writer: Writer) -> None:  # noqa: ARG001
        writer.write(reply(b"{}", "500 Internal Server Error"))

    async with rig(error, engine_metrics_interval_s=0.05) as r:
        client = await r.client()
        assert [(await client.ask()).status for _ in range(20)] == [500] * 20
        state = await r.admin.engines()
        assert (state.engines[0].down, state.engines[0].requests) == (False, 20)


@asynccontextmanager
async def eight(policy: str) -> AsyncIterator[tuple[Rig, list[Backend]]]:
    """A router before eight engines, and a ninth that is not announced."""
    async with rig(*[answer_name] * 8, policy=policy) as r, AsyncExitStack() as stack:
        ninth = await Backend(name="e8").start()
        stack.push_async_callback(ninth.stop)
        yield r, [*r.backends, ninth]


@pytest.mark.parametrize("policy", ["bounded-sticky", "sticky-least-loaded", "consistent-hash"])
async def test_a_ninth_engine_moves_few_sessions(policy: str) -> None:
    async with eight(policy) as (r, backends):
        before = await ask_homes(r.url, SESSIONS)
        await r.announce([b.entry() for b in backends])
        after = await ask_homes(r.url, SESSIONS)
        assert len(moved(before, after)) <= 0.15 * len(SESSIONS)
        assert {after[s] for s in moved(before, after)} <= {"e8"}
        if policy == "bounded-sticky":
            assert moved(before, after) == []
            spread = Counter((await ask_homes(r.url, [f"new {s}" for s in range(60)])).values())
            assert spread["e8"] > 60 / 9  # new ones go where there is least


@pytest.mark.parametrize("how", ["left", "killed"])
@pytest.mark.parametrize("policy", ["bounded-sticky", "sticky-least-loaded", "consistent-hash"])
async def test_a_lost_engine_moves_its_own_sessions_and_they_spread(policy: str, how: str) -> None:
    async with eight(policy) as (r, _):
        before = await ask_homes(r.url, SESSIONS)
        counts = Counter(before.values())
        if policy == "bounded-sticky":
            assert max(counts.values()) <= 1.1 * len(SESSIONS) / 8  # pure hashing: 1.55
        lost = r.backends[3]
        if how == "left":
            await r.announce([b.entry() for b in r.backends if b is not lost])
        await lost.stop()
        after = await ask_homes(r.url, SESSIONS)
        assert set(moved(before, after)) == {s for s, home in before.items() if home == lost.name}
        spread = Counter(after[s] for s in moved(before, after))
        assert len(spread) == 7
        assert max(spread.values()) <= 0.4 * counts[lost.name]


async def test_where_a_session_lives_is_the_same_for_another_router_of_another_process() -> None:
    async with AsyncExitStack() as stack:
        backends: list[Backend] = []
        for i in range(4):
            backends.append(await Backend(name=f"e{i}").start())
            stack.push_async_callback(backends[-1].stop)
        homes: list[dict[object, str]] = []
        for _ in range(2):  # each with its own salt of Python's hash
            url, _ = await stack.enter_async_context(router_process(policy="consistent-hash", data_paths="/v1/x"))
            admin = RouterAdmin(url)
            stack.push_async_callback(admin.close)
            await admin.set_engines(1, [backend.entry() for backend in backends])
            homes.append(await ask_homes(url, range(100)))
        assert homes[0] == homes[1]
        assert set(homes[0].values()) == {"e0", "e1", "e2", "e3"}


async def test_prompts_that_begin_alike_do_not_go_to_one_engine() -> None:
    async with rig(*[answer_name] * 4) as r:
        body = json.dumps({"messages": [{"role": "system", "content": "You are a helpful assistant that " * 9}]})
        client = await r.client()
        for _ in range(100):
            assert (await client.ask("/v1/chat/completions", body.encode())).status == 200
        assert [len(b.seen) for b in r.backends] == [25] * 4


async def test_token_ids_and_unknown_fields_and_headers_arrive_as_they_were_sent() -> None:
    body = json.dumps(
        {
            "model": "m",
            "prompt": list(range(32_000)),
            "return_token_ids": True,
            "cache_salt": "s",
            "priority": -3,
            "not_known_to_anybody": {"a": [1, None]},
        }
    ).encode()
    names = {
        "X-Session-ID": "s",
        "X-Group-ID": "g",
        "X-Prompt-Tokens": "32000",
        "X-Expected-Tokens": "5",
        "X-Request-Id": "r-1",
        "X-Custom": "a,b ;c",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }
    async with rig(answer_name) as r:
        client = await r.client()
        headers = "".join(f"{name}: {value}\r\n" for name, value in names.items())
        assert (await client.ask("/v1/completions", body, headers)).status == 200
        seen = r.backends[0].seen[0]
        assert seen.body == body
        assert {name: seen.header(name.lower()) for name in names} == names


async def test_a_fleet_that_is_all_dead_serves_again_once_one_is_back() -> None:
    async with rig(answer_name, answer_name) as r:
        client = await r.client()
        for backend in r.backends:
            await backend.stop()
        await client.send(request(headers=session("s")))
        await r.until_held(1)
        await eventually(lambda: all(e.down for e in r.router.dispatcher.backends.values()))  # type: ignore[union-attr]
        await r.backends[1].start()
        assert (await client.receive()).body == b"e1"


async def test_a_kv_usage_is_what_the_engine_said() -> None:
    async with rig(answer_name, answer_name, policy="kv-cache", engine_metrics_interval_s=0.05) as r:
        for backend, usage in zip(r.backends, (0.9, 0.1), strict=True):
            backend.metrics = b"vllm:kv_cache_usage_perc %f\n" % usage

        async def said() -> bool:
            return [e.kv_usage for e in (await r.admin.engines()).engines] == [0.9, 0.1]

        await eventually(said)
        client = await r.client()
        assert {(await client.ask()).body for _ in range(10)} == {b"e1"}
        r.backends[1].metrics = b"vllm:kv_cache_usage_perc 0.95\n"
        await eventually(lambda: r.router.dispatcher.placement.views()["e1"].kv_usage > 0.9)  # type: ignore[union-attr]
        assert {(await client.ask()).body for _ in range(10)} == {b"e0"}


async def test_an_engine_of_the_same_name_elsewhere_is_another() -> None:
    async with rig(answer_name, answer_name) as r:
        e0, e1 = r.backends
        await r.announce([e0.entry()])
        client = await r.client()
        assert (await client.ask(headers=session("s"))).body == b"e0"
        await r.announce([EngineEntry("e0", f"http://127.0.0.1:{e1.port}")])
        assert (await client.ask(headers=session("s"))).body == b"e1"
        assert (await r.settled()).engines[0].sessions == 1
