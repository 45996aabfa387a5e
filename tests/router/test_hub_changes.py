"""What the hub changes is whole: for a process that hangs, starts or ends in the middle of it too."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from typing import Any

import pytest
from router_rig import answer_name, eventually, request
from worker_rig import hub_here, one_to_each, running

from penstock.errors import UserError
from penstock.router.membership import EngineEntry
from penstock.router.worker_process import WorkerProcess


async def test_a_process_that_hangs_does_not_hold_a_change_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.router.hub.CALL_S", 1.0)
    async with hub_here(answer_name) as r:
        (_, one), (hangs, two) = (await one_to_each(r)).items()
        os.kill(hangs, signal.SIGSTOP)
        answered = await one.ask("/router/gate", b'{"closed": true}')
        assert answered.status == 200
        await two.send(request("/v1/x", b"{}"))
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await two.receive()
        await eventually(lambda: not running(hangs))  # its sockets are closed a moment before
        for client in (await one_to_each(r)).values():  # and the one in its place holds the change
            await client.send(request("/v1/x", b"{}"))
        await r.until_held(2)
        assert r.backends[0].seen == []


async def test_a_policy_set_while_a_process_starts_is_that_process_s_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hub_here(answer_name) as r:
        dies, other = (await one_to_each(r)).items()
        starts, may_start, call = asyncio.Event(), asyncio.Event(), WorkerProcess.call

        async def held_back(worker: WorkerProcess, message: Mapping[str, Any], *, deadline_s: float) -> dict[str, Any]:
            answer = await call(worker, message, deadline_s=deadline_s)
            if message["do"] == "prepare":
                starts.set()
                await may_start.wait()
            return answer

        monkeypatch.setattr(WorkerProcess, "call", held_back)
        os.kill(dies[0], signal.SIGKILL)
        await asyncio.wait_for(starts.wait(), 60)
        assert (await other[1].ask("/router/policy", b'{"policy": "round-robin"}', method="PUT")).status == 200
        may_start.set()

        async def both() -> bool:
            return len((await r.admin.engines()).workers) == 2

        await eventually(both)
        clients = await one_to_each(r)
        for client in clients.values():
            await client.ask()
        assert (await r.settled()).placements == {"round-robin": 2}


async def test_a_change_ends_whole_where_the_process_that_passed_it_on_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hub_here(answer_name) as r:
        clients = await one_to_each(r)
        closed = {pid: await client.ask("/router/gate", b'{"closed": true}') for pid, client in clients.items()}
        assert {answer.status for answer in closed.values()} == {200}
        passes_on, other = clients
        half_done, may_end, call = asyncio.Event(), asyncio.Event(), WorkerProcess.call

        async def late(worker: WorkerProcess, message: Mapping[str, Any], *, deadline_s: float) -> dict[str, Any]:
            answer = await call(worker, message, deadline_s=deadline_s)
            if message["do"] == "execute" and message["path"] == "/router/gate" and worker.pid == other:
                half_done.set()
                await may_end.wait()
            return answer

        monkeypatch.setattr(WorkerProcess, "call", late)
        await clients[passes_on].send(request("/router/gate", b'{"closed": false}'))
        await asyncio.wait_for(half_done.wait(), 60)
        os.kill(passes_on, signal.SIGKILL)
        await eventually(lambda: not running(passes_on))
        await clients[other].send(request("/v1/x", b"{}"))
        assert (await clients[other].receive()).body == b"e0"  # it has the change already
        may_end.set()
        for client in (await one_to_each(r)).values():  # and so has the one in the place of the dead
            assert (await client.ask()).body == b"e0"


async def test_more_engines_than_the_memory_has_places_for_are_refused_and_change_nothing() -> None:
    async with hub_here(answer_name) as r:
        with pytest.raises(UserError, match="figures of at most 1024 engines, got 1025"):
            await r.announce([EngineEntry(f"e{i}", f"http://127.0.0.1:{1000 + i}") for i in range(1025)])
        assert (await (await r.client()).ask()).body == b"e0"
