"""Requests that wait: for the gate, for an engine, for a weight version."""

from __future__ import annotations

import asyncio
import time

import pytest
from router_rig import Backend, RawClient, answer_name, both_loops, request, rig

from patience import WAIT_S
from penstock.router.backend import Backend as RouterBackend
from penstock.router.exchange import Exchange


@both_loops
async def test_a_thousand_wait_and_go_on_in_order_while_new_clients_are_accepted(
    *, process: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 1000
    sent: list[int] = []
    placed = Exchange.placed

    def spy(exchange: Exchange, backend: RouterBackend) -> None:
        sent.append(int(exchange.request.target.partition(b"?")[2]))
        placed(exchange, backend)

    monkeypatch.setattr(Exchange, "placed", spy)  # sees the router of this process only
    async with rig(answer_name, process=process) as r:
        await r.gate(closed=True)
        clients: list[RawClient] = []
        for i in range(count):
            client = await r.client()
            clients.append(client)
            client.writer.write(request(f"/v1/x?{i}", b"x" * 10))
            if i % 50 == 49:
                await r.until_held(i + 1)
        assert r.backends[0].connections == 0
        await r.gate(closed=False)
        assert (await (await r.client()).ask("/router/health", method="GET")).status == 200
        # A new client did not have to wait for all of them. A router in its own process may be faster than this client.
        assert process or len(r.backends[0].seen) < count
        answers = await asyncio.gather(*[client.receive() for client in clients])
        assert {answer.status for answer in answers} == {200}
        assert sent == ([] if process else list(range(count)))
        assert len(r.backends[0].seen) == count
        state = await r.settled()
        assert (state.held, state.requests) == (0, count)


async def test_nothing_up_is_held_then_refused_with_retry_after() -> None:
    async with rig(max_hold_s=0.3) as r:
        client = await r.client()
        started = time.monotonic()
        answer = await client.ask()
        assert 0.3 <= time.monotonic() - started < WAIT_S
        assert (answer.status, answer.header("x-penstock-error")) == (503, "held_too_long")
        assert int(answer.header("retry-after") or 0) > 0
        assert b'"message":"no engine could serve it for 0.3 s' in answer.body
        assert (await client.ask()).status == 503  # the connection goes on


async def test_who_is_refused_hears_what_no_engine_had() -> None:
    async with rig(answer_name, max_hold_s=0.1) as r:
        (backend,) = r.backends
        await r.announce([backend.entry(weight_version=3)])
        client = await r.client()
        answer = await client.ask(headers="X-Weight-Version: 4\r\n")
        assert b'"message":"no engine with weight version 4 or newer could serve it' in answer.body


async def test_a_held_request_goes_to_the_first_engine_that_comes() -> None:
    async with rig() as r:
        backend = await Backend(name="late").start()
        client = await r.client()
        await client.send(request(body=b"x" * 3_000_000))  # over what is read of a held request
        await r.until_held(1)
        await r.announce([backend.entry(eligible=False)])
        assert (await r.admin.engines()).held == 1
        await r.announce([backend.entry()])
        assert (await client.receive()).body == b"late"
        assert len(backend.seen[0].body) == 3_000_000
        await backend.stop()


async def test_a_request_waits_for_its_weight_version() -> None:
    async with rig(answer_name, answer_name) as r:
        old, new = r.backends
        await r.announce([old.entry(weight_version=3), new.entry(weight_version=4)])
        client, other = await r.client(), await r.client()
        assert {(await client.ask(headers="X-Weight-Version: 4\r\n")).body for _ in range(3)} == {b"e1"}
        await client.send(request(headers="X-Weight-Version: 5\r\n"))
        await r.until_held(1)
        assert (await other.ask(headers="X-Weight-Version: 3\r\n")).status == 200
        await r.announce([old.entry(weight_version=5), new.entry(weight_version=4)])
        assert (await client.receive()).body == b"e0"


@both_loops
async def test_a_held_client_that_leaves_is_forgotten(*, process: bool) -> None:
    async with rig(answer_name, process=process) as r:
        await r.gate(closed=True)
        client = await r.client()
        await client.send(request(body=b"x" * 1000))
        await r.until_held(1)
        client.close()
        await r.until_held(0)
        await r.gate(closed=False)
        assert (await (await r.client()).ask()).status == 200
        assert len(r.backends[0].seen) == 1
