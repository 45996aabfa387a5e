"""Several processes behind one port, before scripted engines: what one router does, they do together."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from router_rig import Backend, RawClient, Seen, answer_name, eventually, reply, request, rig
from worker_rig import one_to_each, pid_of, running

from penstock.config import RouterConfig
from penstock.errors import EngineStartError, StateError, UserError
from penstock.router.admin_client import RouterAdmin
from penstock.router.hub import Hub
from penstock.router.listen import listen

OPTIONS: dict[str, Any] = {"process": True, "workers": 2, "engine_metrics_interval_s": 0}


def held() -> tuple[asyncio.Event, Any]:
    """An event, and an engine that answers when it is set."""
    release = asyncio.Event()

    async def answer(backend: Backend, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:  # noqa: ARG001
        await release.wait()
        writer.write(reply(backend.name.encode()))

    return release, answer


def session(name: str, prompt: int = 0) -> str:
    return f"X-Session-ID: {name}\r\n" + (f"X-Prompt-Tokens: {prompt}\r\n" if prompt else "")


@asynccontextmanager
async def asked(client: RawClient, headers: str = "") -> AsyncIterator[None]:
    """A request that is under way within."""
    await client.send(request("/v1/x", b"{}", headers))
    yield
    assert (await client.receive()).status == 200


async def test_a_session_is_on_one_engine_whichever_process_gets_its_turns() -> None:
    async with rig(*[answer_name] * 4, **OPTIONS) as r:
        one, two = (await one_to_each(r)).values()
        for i in range(20):
            answers = [await client.ask(headers=session(f"s{i}")) for client in (one, two, two, one)]
            assert len({answer.body for answer in answers}) == 1
        state = await r.settled()
        assert [engine.sessions for engine in state.engines] == [5, 5, 5, 5]  # as even as of one process
        assert state.sessions == 20
        assert state.requests == 80
        assert state.placements == {"bounded-sticky": 80}
        assert sum(engine.requests for engine in state.engines) == 80
        home = next(i for i, b in enumerate(r.backends) if any(seen.header("x-session-id") == "s0" for seen in b.seen))
        finished = await two.ask("/router/sessions/finish", b'{"session_id": "s0"}')
        assert json.loads(finished.body) == {"finished": True}
        for client in (one, two):
            state = json.loads((await client.ask("/router/engines", method="GET")).body)
            assert state["engines"][home]["sessions"] == 4


async def test_first_turns_of_one_session_at_both_processes_at_once() -> None:
    async with rig(*[answer_name] * 4, **OPTIONS) as r:
        clients = [await r.client() for _ in range(50)]
        pids = Counter([await pid_of(client) for client in clients])
        assert len(pids) == 2
        turns = [f"s{i % 100}" for i in range(500)]

        async def serve(client: RawClient, mine: list[str]) -> None:
            for name in mine:
                assert (await client.ask(headers=session(name))).status == 200

        await asyncio.gather(*(serve(client, turns[i::50]) for i, client in enumerate(clients)))
        homes = {(seen.header("x-session-id"), backend.name) for backend in r.backends for seen in backend.seen}
        assert len(homes) == 100
        state = await r.settled()
        assert state.sessions == 100
        metrics = (await r.admin.metrics()).splitlines()
        assert "penstock_router_requests_total 500" in metrics
        assert "penstock_router_answered_total 500" in metrics
        assert "penstock_router_request_seconds_count 500" in metrics
        assert "penstock_router_sessions 100" in metrics


async def test_every_process_knows_what_is_in_flight_in_all() -> None:
    release, answer = held()
    async with rig(answer, answer, answer, **OPTIONS) as r:
        one, two = (await one_to_each(r)).values()
        clients = [await r.client() for _ in range(28)]
        for i, client in enumerate((one, two, *clients)):
            await client.send(request("/v1/x", b"{}", "X-Prompt-Tokens: 10\r\nX-Expected-Tokens: 5\r\n"))
            await eventually(lambda n=i + 1: sum(len(backend.seen) for backend in r.backends) == n)
        assert [len(backend.seen) for backend in r.backends] == [10, 10, 10]  # nobody chose by half of the load
        state = await r.admin.engines()
        assert [engine.outstanding for engine in state.engines] == [10, 10, 10]
        assert [engine.outstanding_tokens for engine in state.engines] == [150, 150, 150]
        release.set()
        for client in (one, two, *clients):
            assert (await client.receive()).status == 200
        state = await r.admin.engines()
        assert [(e.outstanding, e.outstanding_tokens, e.resident_tokens) for e in state.engines] == [(0, 0, 0)] * 3


async def test_a_change_is_in_force_on_every_process_when_the_call_returns() -> None:
    async with rig(answer_name, answer_name, **OPTIONS) as r:
        clients = [await r.client() for _ in range(20)]
        assert len({await pid_of(client) for client in clients}) == 2
        for round_ in range(5):
            await r.admin.gate(closed=True)
            for client in clients:
                await client.send(request("/v1/x", b"{}"))
            await r.until_held(20)
            assert sum(len(backend.seen) for backend in r.backends) == 20 * round_
            await r.admin.gate(closed=False)
            assert [(await client.receive()).status for client in clients] == [200] * 20
        await r.admin.gate(closed=True, adapter="a")
        for client in clients:
            await client.send(request("/v1/x", b"{}", "X-Adapter: a\r\n"))
        await r.until_held(20)
        assert (await r.admin.engines()).held_by["adapter"] == 20
        await r.admin.gate(closed=False, adapter="a")
        assert [(await client.receive()).status for client in clients] == [200] * 20
        await r.announce([r.backends[0].entry(weight_version=3)])
        for client in clients:
            assert (await client.ask(headers="X-Weight-Version: 3\r\n")).body == b"e0"
        with pytest.raises(StateError, match="epoch 1 is not newer"):
            await r.admin.set_engines(1, [])
        with pytest.raises(UserError, match="no engine 'e9'"):
            await r.admin.gate(closed=True, engine="e9")
        state = await r.admin.engines()
        assert (state.epoch, len(state.engines), len(state.workers)) == (2, 1, 2)


async def test_an_engine_that_one_process_finds_unwell_is_down_for_all() -> None:
    async with rig(answer_name, answer_name, **{**OPTIONS, "engine_metrics_interval_s": 0.05}) as r:
        clients = list((await one_to_each(r)).values())
        r.backends[0].health = "503 Service Unavailable"

        async def unwell() -> bool:
            return (await r.admin.engines()).engines[0].down

        await eventually(unwell)
        await r.admin.gate(closed=False)  # what one has told the other has arrived before this
        for client in clients:
            assert {(await client.ask()).body for _ in range(6)} == {b"e1"}
        state, text = await r.admin.engines(), await r.admin.metrics()
        assert (state.engines[0].down, state.engines[0].breaker_openings) == (True, 1)  # one event, not one for each
        assert 'penstock_router_engine_down{engine="e0"} 1\n' in text
        assert 'penstock_router_engine_breaker_openings_total{engine="e0"} 1\n' in text
        r.backends[0].health = "200 OK"

        async def well() -> bool:
            return not await unwell()

        await eventually(well)
        for client in clients:
            assert {(await client.ask()).body for _ in range(6)} == {b"e0", b"e1"}


async def test_room_that_one_process_makes_is_taken_by_another_that_waits() -> None:
    release, answer = held()
    async with rig(answer, **{**OPTIONS, "engine_metrics_interval_s": 0.05}) as r:
        r.backends[
            0
        ].metrics = b'vllm:cache_config_info{block_size="10",num_gpu_blocks="100"} 1.0\nvllm:kv_cache_usage_perc 0.0\n'
        one, two = (await one_to_each(r)).values()

        async def all_know() -> bool:
            states = [json.loads((await c.ask("/router/engines", method="GET")).body) for c in (one, two)]
            return all(state["engines"][0]["kv_capacity"] == 1000 for state in states)

        await eventually(all_know)
        r.backends[0].metrics = b""  # each reading would have those that wait looked at
        async with asked(one, session("big", 900)):
            await r.backends[0].arrived.wait()
            await two.send(request("/v1/x", b"{}", session("next", 500)))
            await r.until_held(1)
            assert (await r.admin.engines()).held_by["room"] == 1
            release.set()
        assert (await r.admin.engines()).held == 1  # the session is still there
        finish = request("/router/sessions/finish", b'{"session_id": "big"}')
        await one.send(finish)
        assert (await two.receive()).body == b"e0"
        assert (await one.receive()).status == 200


async def test_a_killed_process_leaves_neither_load_nor_a_closed_port() -> None:
    release, answer = held()
    async with rig(answer, answer, **OPTIONS) as r:
        clients = await one_to_each(r)
        (first, one), (_, two) = clients.items()
        await one.send(request("/v1/x", b"{}", session("s")))
        await eventually(lambda: sum(len(backend.seen) for backend in r.backends) == 1)
        home = next(backend.name for backend in r.backends if backend.seen)
        await r.admin.gate(closed=True, adapter="a")
        assert sum(engine.outstanding for engine in (await r.admin.engines()).engines) == 1
        os.kill(first, signal.SIGKILL)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):  # its client sees a broken connection
            await one.receive()
        release.set()
        assert (await two.ask(headers=session("s"))).body == home.encode()  # and nothing of the session is lost

        async def restored() -> bool:
            state = await r.admin.engines()
            return len(state.workers) == 2 and first not in state.workers

        fresh = [await r.client() for _ in range(8)]  # some of them wait in the queue of the one that is started
        assert [(await client.ask()).status for client in fresh] == [200] * 8
        await eventually(restored)
        state = await r.admin.engines()
        assert (state.epoch, state.gates_closed, len(state.engines)) == (1, ("a",), 2)
        assert [engine.outstanding for engine in state.engines] == [0, 0]
        assert state.sessions == 1
        anew = await one_to_each(r)
        for client in anew.values():
            assert (await client.ask(headers=session("s"))).body == home.encode()
            await client.send(request("/v1/x", b"{}", "X-Adapter: a\r\n"))
        await r.until_held(2)  # the new one knows of the gate


async def test_nothing_stays_when_the_hub_is_killed(tmp_path: Path) -> None:
    launched = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock.router", "--workers", "3",
        stdout=asyncio.subprocess.PIPE, stderr=(tmp_path / "log").open("wb"),
    )  # fmt: skip
    assert launched.stdout is not None
    async with asyncio.timeout(120):
        url = (await launched.stdout.readline()).decode().split()[-1]
        admin = RouterAdmin(url)
        workers = (await admin.engines()).workers
        await admin.close()
        assert len(workers) == 3
        launched.kill()
        await launched.wait()
        await eventually(lambda: not any(running(pid) for pid in workers), 60)
    with pytest.raises(ConnectionError):
        await RawClient.connect(url)


async def test_it_ends_with_sigterm_and_its_workers_before_it() -> None:
    async with rig(answer_name, **OPTIONS) as r:
        workers = (await r.admin.engines()).workers
        assert all(running(pid) for pid in workers)
    assert not any(running(pid) for pid in workers)  # the rig has seen it exit with status 0


async def test_workers_that_cannot_start_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    hub = Hub(RouterConfig(workers=2))
    with pytest.raises(EngineStartError, match=r"worker \d ended 5 times in a row"):
        await hub.start()
    await hub.close()


async def test_a_port_that_another_router_shares_out_is_taken() -> None:
    sockets = listen("127.0.0.1", 0, 2)
    try:
        port = sockets[0].getsockname()[1]
        assert sockets[1].getsockname()[1] == port
        for count in (1, 2):
            with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use; choose"):
                listen("127.0.0.1", port, count)
    finally:
        for sock in sockets:
            sock.close()


async def test_every_process_asks_for_the_key_and_only_loopback_needs_none() -> None:
    async with rig(answer_name, api_key="secret", **OPTIONS) as r:
        for client in (await one_to_each(r)).values():
            assert (await client.ask()).status == 401
            assert (await client.ask(headers="Authorization: Bearer secret\r\n")).status == 200
        assert (await r.admin.engines()).requests == 2
    hub = Hub(RouterConfig(workers=2, host="0.0.0.0"))
    with pytest.raises(UserError, match="there is no API key"):
        await hub.start()
    await hub.close()
