"""The control side over HTTP: drains, sessions, room, health and KV figures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from router_rig import Backend, RawClient, Reader, Rig, Seen, Writer, answer_name, held, reply, request, rig, session

from penstock.router.kv import KVStats, parse_kv_stats
from penstock.router.membership import EngineEntry
from penstock.router.state import EngineLoad


async def until(r: Rig, name: str, holds: Callable[[EngineLoad], bool]) -> None:
    await r.until(lambda state: any(e.name == name and holds(e) for e in state.engines))


async def homes(client: RawClient, names: range) -> dict[int, str]:
    return {s: (await client.ask(headers=session(s))).body.decode() for s in names}


async def finished(r: Rig, name: object) -> bool:
    answer = await (await r.control()).ask("/router/sessions/finish", f'{{"session_id": "{name}"}}'.encode())
    return json.loads(answer.body)["finished"]


# --- eligibility and drain -------------------------------------------------------------------------------------------


async def test_a_draining_engine_serves_its_sessions_until_they_finish() -> None:
    go = asyncio.Event()

    async def slow(backend: Backend, seen: Seen, reader: Reader, writer: Writer) -> None:  # noqa: ARG001
        if seen.line.startswith("POST /slow "):
            await go.wait()
        writer.write(reply(backend.name.encode()))

    async with rig(slow, slow) as r:
        e0, e1 = r.backends
        client, busy = await r.client(), await r.client()
        before = await homes(client, range(8))
        mine = [s for s, home in before.items() if home == "e0"]
        await busy.send(request("/slow", headers=session(mine[0])))
        await until(r, "e0", lambda e: e.outstanding == 1)
        await r.announce([e0.entry(draining=True), e1.entry()])
        after = await homes(client, range(100, 108))
        assert set(after.values()) == {"e1"}
        assert {(await client.ask()).body for _ in range(4)} == {b"e1"}
        assert await homes(client, range(8)) == before
        for s in mine:
            e = await r.load("e0")
            assert (e.drained, e.sessions) == (False, len(mine) - mine.index(s))
            assert await finished(r, s)
            assert not await finished(r, s)
        e = await r.load("e0")
        assert (e.drained, e.sessions, e.outstanding) == (False, 0, 1)
        go.set()
        assert (await busy.receive()).body == b"e0"
        await until(r, "e0", lambda e: e.drained)
        assert (await client.ask(headers=session(mine[0]))).body == b"e1"  # it came back: as a new session


async def test_a_drain_ends_when_the_ttl_of_the_last_session_has_passed() -> None:
    async with rig(answer_name, answer_name, session_ttl_s=0.5) as r:
        e0, e1 = r.backends
        await r.announce([e0.entry()])
        client = await r.client()
        await client.ask(headers=session("s"))
        await r.announce([e0.entry(draining=True), e1.entry()])
        await until(r, "e0", lambda e: e.drained)
        assert (await r.admin.engines()).sessions == 0


# --- room ------------------------------------------------------------------------------------------------------------


def kv(usage: float, blocks: int, block_size: int = 16) -> bytes:
    return (
        f'vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {usage}\n'
        f'vllm:cache_config_info{{block_size="{block_size}",engine="0",num_gpu_blocks="{blocks}"}} 1.0\n'
    ).encode()


async def test_new_sessions_wait_for_room_and_later_turns_do_not() -> None:
    async with rig(answer_name, engine_metrics_interval_s=0.05, max_hold_s=0.2) as r:
        r.backends[0].metrics = kv(0.0, 10)  # 160 tokens
        await until(r, "e0", lambda e: e.kv_capacity == 160)
        client, first, second = await r.client(), await r.client(), await r.client()
        assert (await client.ask(headers=session("a", 100))).status == 200
        await first.send(request(headers=session("b", 100)))
        await r.until_held(1)
        await second.send(request(headers=session("c", 1)))  # there is room, but not its turn
        await r.until_held(2)
        assert (await r.admin.engines()).held_by["room"] == 2
        assert (await client.ask(headers=session("a", 100))).status == 200
        assert (await client.ask(headers="X-Prompt-Tokens: 100\r\n")).status == 200
        await asyncio.sleep(0.6)  # longer than max_hold_s: an engine is up, and load will fall
        assert (await r.admin.engines()).held == 2
        assert await finished(r, "a")
        assert (await first.receive()).status == 200
        assert (await second.receive()).status == 200
        assert [e.resident_tokens for e in (await r.admin.engines()).engines] == [101]


async def test_room_comes_with_the_end_of_another_request() -> None:
    go, slow = held()
    async with rig(slow, engine_metrics_interval_s=0.05) as r:
        r.backends[0].metrics = kv(0.0, 10)
        await until(r, "e0", lambda e: e.kv_capacity == 160)
        first, second = await r.client(), await r.client()
        await first.send(request(headers="X-Prompt-Tokens: 100\r\n"))  # no session: counts while it is in flight
        await r.backends[0].arrived.wait()
        await second.send(request(headers=session("b", 100)))
        await r.until_held(1)
        go.set()
        assert [(await c.receive()).status for c in (first, second)] == [200, 200]


# --- health and figures ----------------------------------------------------------------------------------------------


async def test_the_owner_alone_decides_whether_an_engine_is_well() -> None:
    """The router asks for no health check, and an engine that refuses its question is left out by a request alone."""
    async with rig(answer_name, answer_name, engine_metrics_interval_s=0.05, policy="round-robin") as r:
        r.backends[0].metrics = r.backends[1].metrics = kv(0.5, 10)
        r.backends[0].health = "503 Service Unavailable"
        await until(r, "e0", lambda e: e.kv_capacity == 160)
        await r.backends[1].stop()
        await asyncio.sleep(0.3)
        assert [e.down for e in (await r.admin.engines()).engines] == [False, False]
        client = await r.client()
        assert {(await client.ask()).body for _ in range(4)} == {b"e0"}
        assert [e.breaker_openings > 0 for e in (await r.admin.engines()).engines] == [False, True]


async def test_an_engine_whose_metrics_fail_is_not_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.router.kv._DEADLINE_S", 0.1)
    taken = asyncio.Event()

    async def hang(reader: Reader, writer: Writer) -> None:
        taken.set()
        await reader.read()
        writer.close()

    hanging = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = hanging.sockets[0].getsockname()[1]
    async with hanging, rig(answer_name, engine_metrics_interval_s=0.05) as r:
        r.backends[0].metrics = b"nothing of vLLM's"
        await r.announce([r.backends[0].entry(), EngineEntry("busy", f"http://127.0.0.1:{port}")])
        await taken.wait()
        await asyncio.sleep(0.4)
        state = await r.admin.engines()
        assert [(e.down, e.kv_usage, e.kv_capacity) for e in state.engines] == [(False, -1.0, 0)] * 2


@pytest.mark.vllm
async def test_figures_of_a_real_engine(live: Any) -> None:
    async with rig(engine_metrics_interval_s=0.2) as r:
        await r.announce([EngineEntry("live", live.process.url)])
        await until(r, "live", lambda e: e.kv_capacity > 0)
        e = await r.load("live")
        assert 0 <= e.kv_usage < 1
        assert not e.down
        assert e.kv_capacity % 16 == 0


TEXTS = [
    (b"", None),
    (b"# vllm:kv_cache_usage_perc 1\nx 2\n", None),
    (b"vllm:kv_cache_usage_perc 0.25\n", KVStats(0.25, 0)),
    (kv(0.5, 100), KVStats(0.5, 1600)),
    (kv(1.0, 10).replace(b"\n", b"\r\n"), KVStats(1.0, 160)),
    (
        (
            b'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:kv_cache_usage_perc{engine="1"} 0\n'
            b'vllm:cache_config_info{block_size="16",kv_cache_size_tokens="100",num_gpu_blocks="9"} 1\n'
        ),
        KVStats(0.25, 200),
    ),
    (
        (
            b"vllm:kv_cache_usage_perc 1e-05\n"
            b'vllm:cache_config_info{block_size="16",kv_cache_size_tokens="None",num_gpu_blocks="10"} 1\n'
        ),
        KVStats(1e-05, 160),
    ),
    *[
        (b"vllm:kv_cache_usage_perc " + usage, None)
        for usage in (b"-1", b"1.01", b"1e999", b"-1e999", b"NaN", b"1.2.3")
    ],
    (b'vllm:kv_cache_usage_perc{engine="0"} 1e999\nvllm:kv_cache_usage_perc{engine="1"} -1e999', None),
    (
        (
            b"vllm:kv_cache_usage_perc 0.5\n"
            b'vllm:cache_config_info{num_gpu_blocks="999999999999999",block_size="999999999999999"} 1\n'
        ),
        KVStats(0.5, 0),
    ),
]


@pytest.mark.parametrize(("text", "figures"), TEXTS)
def test_figures_in_vllms_text(text: bytes, figures: KVStats | None) -> None:
    assert parse_kv_stats(text) == figures
