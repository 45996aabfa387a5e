"""Several processes behind one port, before scripted engines: what one router does, each of them does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from router_rig import RawClient, Rig, answer_name, held, request, rig, session

from patience import WAIT_S, alive, asked, eventually
from penstock.errors import StateError, UserError
from penstock.router.membership import Membership
from penstock.router.state import RouterAdmin, RouterState
from penstock.router.workers import listen, router_of_worker
from penstock.router_settings import RouterConfig

OPTIONS: dict[str, Any] = {"process": True, "workers": 2, "engine_metrics_interval_s": 0}


async def pid_of(client: RawClient) -> int:
    return json.loads((await client.ask("/router/health", method="GET")).body)["pid"]


async def one_to_each(r: Rig, workers: int = 2) -> dict[int, RawClient]:
    """A connection to each process."""
    clients: dict[int, RawClient] = {}
    async with asyncio.timeout(WAIT_S):
        while len(clients) < workers:
            client = await r.client()
            clients.setdefault(await pid_of(client), client)
    return clients


async def all_up(r: Rig, *, gone: int = 0) -> RouterState:
    """State once each process serves and none of them is `gone`; brings up to date what was started again."""
    while True:
        state = await r.until(lambda state: gone not in state.workers)
        if state.in_step:
            return state
        await r.announce([backend.entry() for backend in r.backends])  # as the owner of a fleet does


async def test_a_session_is_on_one_engine_whichever_process_gets_its_turns() -> None:
    async with rig(*[answer_name] * 4, **OPTIONS) as r:
        one, two = (await one_to_each(r)).values()
        for i in range(20):
            answers = [await client.ask(headers=session(f"s{i}")) for client in (one, two, two, one)]
            assert len({answer.body for answer in answers}) == 1
        state = await r.settled()
        assert all(engine.sessions for engine in state.engines)
        assert state.sessions == 40  # each process knows each of them
        assert state.requests == 80
        assert state.placements == {"bounded-sticky": 80}
        assert sum(engine.requests for engine in state.engines) == 80


async def test_sessions_keep_their_engine_when_processes_die_but_for_few() -> None:
    async with rig(*[answer_name] * 8, **{**OPTIONS, "workers": 4}) as r:
        names = [f"s{i}" for i in range(300)]

        async def homes() -> dict[str, bytes]:
            clients = [await r.client() for _ in range(16)]

            async def ask(client: RawClient, mine: list[str]) -> list[tuple[str, bytes]]:
                return [(name, (await client.ask(headers=session(name, 400))).body) for name in mine]

            asked = await asyncio.gather(*(ask(client, names[i::16]) for i, client in enumerate(clients)))
            return dict(pair for pairs in asked for pair in pairs)

        before = await homes()
        assert set(before.values()) == {backend.name.encode() for backend in r.backends}
        for _ in range(2):
            state = await r.admin.engines()
            victim, killed_at = state.workers[0], time.time()
            assert state.counted_since < killed_at
            os.kill(victim, signal.SIGKILL)
            await all_up(r, gone=victim)
            assert (await r.admin.engines()).counted_since >= killed_at, "its counts are gone"
            after = await homes()
            assert sum(before[name] != after[name] for name in names) <= len(names) // 20


async def test_the_bound_holds_where_hashing_alone_would_not() -> None:
    async with rig(*[answer_name] * 2, **OPTIONS, slack_tokens=0) as r:
        client = await r.client()
        for i in range(200):
            await client.ask(headers=session(f"s{i}", 100))
        resident = [engine.resident_tokens for engine in (await r.admin.engines()).engines]
        assert sum(resident) == 20_000
        assert max(resident) <= 1.1 * 10_000 + 100


async def test_a_process_answers_for_itself_on_its_control_port_alone() -> None:
    async with rig(answer_name, answer_name, **OPTIONS) as r:
        clients = (await one_to_each(r)).values()
        for client, times in zip(clients, (2, 3), strict=True):
            for _ in range(times):
                assert (await client.ask(headers=session("s"))).status == 200
        await r.settled()
        answer = await (await r.client()).ask("/router/health", method="GET")
        ports = json.loads(answer.body)["control_ports"]
        asked = [await r.control(process) for process in range(2)]
        metrics = [(await client.ask("/metrics", method="GET")).body.decode().splitlines() for client in asked]
        counts = ["penstock_router_requests_total 2.0" in lines for lines in metrics]
        assert counts == ["penstock_router_requests_total 3.0" not in lines for lines in metrics]
        assert sorted(counts) == [False, True]
        for body in (b'{"finished":true}', b'{"finished":false}'):
            for client in asked:
                assert (await client.ask("/router/sessions/finish", b'{"session_id": "s"}')).body == body
        for client in clients:
            for method, path in (("GET", "/router/engines"), ("PUT", "/router/engines"), ("GET", "/metrics")):
                answer = await client.ask(path, b"{}", method=method)
                assert (answer.status, answer.header("x-penstock-error")) == (421, "control_port")
                assert f"make it on the control port of each process: {ports[0]}, {ports[1]}" in str(answer.body)


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
async def test_a_process_that_ended_and_came_back_has_its_control_port_again(by: signal.Signals) -> None:
    async with rig(answer_name, **OPTIONS) as r:
        ports = await r.admin._urls()
        victim = (await r.admin.engines()).workers[1]
        os.kill(victim, by)
        state = await all_up(r, gone=victim)
        assert state.in_step
        fresh = RouterAdmin(r.url)
        assert await fresh._urls() == ports
        assert (await fresh.engines()).epoch == state.epoch
        await fresh.close()


def two_free_ports() -> int:
    """Return the first of two ports below those that the kernel gives to others meanwhile."""
    for first in range(20_000 + os.getpid() % 10_000, 32_000, 2):
        with suppress(OSError), ExitStack() as held:
            for port in (first, first + 1):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("no two ports are free")


async def test_control_ports_that_are_chosen_follow_one_another() -> None:
    first = two_free_ports()
    async with rig(answer_name, **OPTIONS, control_port=first) as r:
        assert await r.admin._urls() == [f"http://127.0.0.1:{first + index}" for index in range(2)]
    with pytest.raises(UserError, match="65535 is too high: 2 workers take the ports to 65536"):
        router_of_worker(RouterConfig(workers=2, control_port=65_535), None, None, pytest.fail)


async def test_a_change_is_in_force_on_every_process_when_the_call_returns() -> None:
    async with rig(answer_name, answer_name, **OPTIONS) as r:
        clients = [await r.client() for _ in range(20)]
        assert len({await pid_of(client) for client in clients}) == 2
        for round_ in range(5):
            await r.gate(closed=True)
            for client in clients:
                await client.send(request("/v1/x", b"{}"))
            await r.until_held(20)
            assert sum(len(backend.seen) for backend in r.backends) == 20 * round_
            await r.gate(closed=False)
            assert [(await client.receive()).status for client in clients] == [200] * 20
        await r.announce([r.backends[0].entry(weight_version=3)])
        for client in clients:
            assert (await client.ask(headers="X-Weight-Version: 3\r\n")).body == b"e0"
        with pytest.raises(StateError, match="epoch 1 is not newer"):
            await r.admin.announce(Membership(1, ()))
        state = await r.admin.engines()
        assert (state.epoch, len(state.engines), len(state.workers)) == (12, 1, 2)


async def test_a_process_that_was_started_again_serves_nothing_before_it_is_told() -> None:
    release, answer = held()
    async with rig(answer, answer, **OPTIONS) as r:
        await r.set_policy("bounded-sticky,requests", prefix_length=77)
        clients = await one_to_each(r)
        (first, one), (second, _) = clients.items()
        await one.send(request("/v1/x", b"{}", session("s")))
        await eventually(lambda: sum(len(backend.seen) for backend in r.backends) == 1)
        home = next(backend.name for backend in r.backends if backend.seen)
        await r.gate(closed=True)
        os.kill(first, signal.SIGKILL)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):  # its client sees a broken connection
            await one.receive()
        release.set()
        fresh = [await r.client() for _ in range(8)]  # some of them wait in the queue of the one that is started
        for client in fresh:
            await client.send(request("/v1/x", b"{}", session("s")))
        await r.until(lambda s: len(s.workers) == 2 and first not in s.workers and not s.in_step)
        await r.until_held(8)
        await r.again()  # and the gate is still closed, for both
        state = await r.admin.engines()
        assert (state.in_step, state.epoch, state.gate_closed) == (True, 4, True)
        assert state.policy["prefix_length"] == 77
        assert (state.held, sum(len(backend.seen) for backend in r.backends)) == (8, 1)
        await r.gate(closed=False)
        assert {(await client.receive()).body for client in fresh} == {home.encode()}
        assert second in state.workers
        state = await r.settled()
        assert [engine.outstanding for engine in state.engines] == [0, 0]


@pytest.mark.parametrize("stopped", [False, True])
async def test_nothing_stays_when_the_parent_is_killed(tmp_path: Path, *, stopped: bool) -> None:
    launched = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock.router", '{"workers": 3}',
        stdout=asyncio.subprocess.PIPE, stderr=(tmp_path / "log").open("wb"),
    )  # fmt: skip
    assert launched.stdout is not None
    async with asyncio.timeout(2 * WAIT_S):
        url = (await launched.stdout.readline()).decode().split()[-1]
        admin = RouterAdmin(url)
        workers = (await admin.engines()).workers
        await admin.close()
        assert len(workers) == 3
        if stopped:
            os.kill(workers[0], signal.SIGSTOP)
        launched.kill()
        await launched.wait()
        await eventually(lambda: not any(alive(pid) for pid in workers), 60)

        async def refused() -> bool:  # the port is free: another thread of a process may end after its first
            try:
                (await RawClient.connect(url)).close()
            except ConnectionError:
                return True
            return False

        await asked(refused, bool)


async def test_a_signal_that_comes_while_processes_start_ends_them() -> None:
    for wait_s in (0.002, 0.005, 0.008, 0.011):
        launched = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "penstock.router", '{"workers": 8}', stdout=asyncio.subprocess.PIPE
        )
        assert launched.stdout is not None
        async with asyncio.timeout(WAIT_S):
            await launched.stdout.readline()
            await asyncio.sleep(wait_s)
            launched.terminate()
            try:
                assert await launched.wait() in {0, -signal.SIGTERM}
            finally:
                with suppress(ProcessLookupError):
                    launched.kill()


LATE_SIGNAL = """
import ctypes, operator, os, signal, socket, time
from functools import partial
from penstock.router import workers

kill = partial(ctypes.PyDLL(None).kill, os.getpid(), signal.SIGTERM)

def late(wait):  # between the two no bytecode runs, so no handler either
    return lambda *given: list(map(operator.call, [kill, partial(wait, *given)]))[1]

os.wait, socket.socket.recv = late(os.wait), late(socket.socket.recv)
workers._forked(2)
time.sleep(600)
"""


def test_a_signal_just_before_the_parent_waits_ends_it() -> None:
    assert subprocess.run([sys.executable, "-c", LATE_SIGNAL], timeout=WAIT_S, check=False).returncode == 0


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
    with pytest.raises(UserError, match="there is no API key"):
        router_of_worker(RouterConfig(workers=2, host="0.0.0.0"), None, None, pytest.fail)
