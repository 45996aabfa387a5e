"""Clients and engines that go away, engines that refuse: what is retried, where, and what the client sees."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from router_rig import (
    Backend,
    RawClient,
    Reader,
    Seen,
    Writer,
    answer_name,
    both_loops,
    hang_up,
    reply,
    request,
    rig,
    says,
    stays,
)

from canned import full
from patience import WAIT_S, eventually
from penstock.router.membership import EngineEntry


async def hang_up_when_told(backend: Backend, seen: Seen, reader: Reader, writer: Writer) -> None:  # noqa: ARG001
    await backend.disconnected.wait()
    writer.close()


streaming = says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", then=stays)


@both_loops
@pytest.mark.parametrize("answer", [stays, streaming], ids=["before the answer", "inside the answer"])
async def test_a_client_that_leaves_ends_the_engines_work(*, process: bool, answer: object) -> None:
    async with rig(answer, process=process) as r:  # type: ignore[arg-type]
        client = await r.client()
        await client.send(request(body=b"x" * 10))
        async with asyncio.timeout(60):
            await r.backends[0].arrived.wait()
            if answer is streaming:
                await client.head()
            client.close()
            await r.backends[0].disconnected.wait()
        assert (await r.settled()).engines[0].requests == 1


BROKEN = {
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\npart",
    "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\npart\r\n",
    "inside a chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\npart",
}


@both_loops
@pytest.mark.parametrize("wire", BROKEN.values(), ids=BROKEN)
async def test_an_engine_that_breaks_off_is_never_a_clean_end(*, process: bool, wire: bytes) -> None:
    async with rig(says(wire, then=hang_up), answer_name, process=process, policy="round-robin") as r:
        client = await r.client()
        await client.send(request())
        assert await client.rest() == wire  # what there was, no terminating chunk, no other engine's answer
        assert len(r.backends[1].seen) == 0
        await r.settled()


@pytest.mark.parametrize(
    "wire",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\n\r\nuntil the end",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    ],
    ids=["ambiguous", "not HTTP", "upgrade", "half", "bad chunk", "two answers", "until close", "1.0", "early hints"],
)
async def test_an_answer_that_is_no_http_is_a_502(wire: bytes) -> None:
    async with rig(says(wire, then=hang_up)) as r:
        client = await r.client()
        answer = await client.ask()
        assert answer.status == 502
        # an engine that dies inside its head has given the client nothing: another one may answer
        errors = {"engines_failed"} if wire.endswith(b"Content-Le") else {"bad_engine_response", "engine_failed"}
        assert answer.header("x-penstock-error") in errors
        assert len(r.backends[0].seen) == 1
        assert (await client.ask()).status == 502  # the connection goes on


@pytest.mark.parametrize("wire", [b"", b"part"], ids=["before the body", "inside it"])
async def test_an_engine_that_dies_behind_the_head_of_a_short_answer_costs_no_request(wire: bytes) -> None:
    async with rig(
        says(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n", wire, then=hang_up), answer_name, policy="round-robin"
    ) as r:
        answer = await (await r.client()).ask()
        assert (answer.status, answer.body) == (200, b"e1")
        assert len(r.backends[0].seen) == 1


@both_loops
async def test_a_request_that_was_hung_up_on_goes_to_another_engine_once(*, process: bool) -> None:
    async with rig(hang_up, answer_name, process=process, policy="round-robin") as r:
        body = b"x" * 300_000
        for _ in range(6):
            client = await r.client()
            answer = await client.ask(body=body)
            assert (answer.status, answer.body) == (200, b"e1")
        assert all(seen.body == body for seen in r.backends[1].seen)
        sent = Counter({b.name: len(b.seen) for b in r.backends})
        assert sent["e1"] == 6
        state = await r.settled()
        assert not any(e.down for e in state.engines)  # nobody refused a connection


async def test_an_engine_that_came_back_gets_what_the_one_before_it_broke() -> None:
    async with rig(hang_up_when_told, answer_name) as r:
        dying, anew = r.backends
        await r.announce([dying.entry()])
        client = await r.client()
        await client.send(request())
        async with asyncio.timeout(60):
            await dying.arrived.wait()
        await r.announce([])
        dying.disconnected.set()
        await r.until_held(1)
        await r.announce([replace(anew.entry(), name="e0")])
        answer = await client.receive()
        assert (answer.status, answer.body) == (200, b"e1")


async def test_a_session_follows_its_retry() -> None:
    async with rig(answer_name, answer_name) as r:
        first = await (await r.client()).ask(headers="X-Session-ID: s\r\n")
        home = next(b for b in r.backends if b.name == first.body.decode())
        other = next(b for b in r.backends if b is not home)
        home.answer = hang_up
        moved = await (await r.client()).ask(headers="X-Session-ID: s\r\n")
        assert moved.body == other.name.encode()
        home.answer = answer_name
        assert (await (await r.client()).ask(headers="X-Session-ID: s\r\n")).body == other.name.encode()


@pytest.mark.parametrize("warm", [False, True], ids=["fresh connections", "pooled connections"])
async def test_a_request_ends_two_engines_at_most(*, warm: bool) -> None:
    async def ends(backend: Backend, seen: Seen, reader: Reader, writer: Writer) -> None:
        if seen.body == b"poison":
            await backend.stop()
        else:
            await answer_name(backend, seen, reader, writer)

    async with rig(*[ends] * 4, policy="round-robin") as r:
        client = await r.client()
        for _ in range(8 * warm):
            assert (await client.ask()).status == 200
        answer = await client.ask(body=b"poison")
        assert (answer.status, answer.header("x-penstock-error")) == (502, "engines_failed")
        poisoned = [sum(seen.body == b"poison" for seen in backend.seen) for backend in r.backends]
        assert sorted(poisoned) == [0, 0, 1, 1]


async def test_a_stale_connection_costs_no_request_and_no_session_its_engine() -> None:
    async def once(backend: Backend, seen: Seen, reader: Reader, writer: Writer) -> None:
        await answer_name(backend, seen, reader, writer)
        await reader.readuntil(b"\r\n\r\n")  # the next request meets a connection that closes unanswered
        writer.close()

    async with rig(once, once) as r:
        client = await r.client()
        answers = {(await client.ask(headers="X-Session-ID: s\r\n")).body for _ in range(6)}
        assert len(answers) == 1


@both_loops
async def test_an_engine_that_refuses_is_left_out_and_tried_again(*, process: bool) -> None:
    async with rig(answer_name, answer_name, process=process, policy="round-robin") as r:
        client = await r.client()
        await r.backends[0].stop()
        answers = [(await client.ask(body=b"x" * 2_000_000)).body for _ in range(4)]
        assert answers == [b"e1"] * 4  # nothing was sent to the one that refused: any size goes on
        assert [e.breaker_openings > 0 for e in (await r.admin.engines()).engines] == [True, False]
        await r.backends[0].start()
        await r.until(lambda state: not state.engines[0].down)
        assert {(await client.ask()).body for _ in range(4)} == {b"e0", b"e1"}


async def test_an_engine_that_answers_before_it_reads_is_not_used_again() -> None:
    answered = asyncio.Event()

    async def too_large(backend: Backend, seen: Seen, reader: Reader, writer: Writer) -> None:  # noqa: ARG001
        writer.write(reply(b"too large", "413 Content Too Large"))
        await answered.wait()
        await reader.read()

    async with rig(too_large, read_bodies=False) as r:
        answer = await (await r.client()).ask(body=b"x" * (48 << 20))  # more than the kernel takes
        assert (answer.status, answer.body) == (413, b"too large")
        answered.set()
        await eventually(lambda: not r.backends[0].open)
        await r.settled()


async def test_closing_the_router_breaks_what_is_under_way() -> None:
    async with rig(streaming) as r:
        client = await r.client()
        await client.send(request())
        await client.head()
        assert r.router is not None
        await r.router.close()
        assert await client.rest() == b"3\r\nabc\r\n"
        with pytest.raises(ConnectionRefusedError):
            await RawClient.connect(r.url)


async def test_requests_do_not_wait_for_connections_to_an_engine_that_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine has vanished: connections to it neither open nor fail."""
    monkeypatch.setattr("penstock.router.backend.CONNECT_TIMEOUT_S", 3600.0)
    with full() as hole:
        async with rig(answer_name) as r:
            await r.announce([EngineEntry("hole", f"http://127.0.0.1:{hole.getsockname()[1]}")])
            clients = [await r.client() for _ in range(300)]
            asked = [asyncio.create_task(client.ask()) for client in clients]
            await r.until(lambda state: state.requests == len(asked))
            await r.announce([r.backends[0].entry()])
            answers = await asyncio.wait_for(asyncio.gather(*asked), WAIT_S)
            assert {answer.status for answer in answers} == {200}


async def test_a_request_goes_elsewhere_where_no_connection_opens_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.router.backend.CONNECT_TIMEOUT_S", 0.5)
    with full() as hole:
        async with rig(answer_name) as r:
            await r.announce([EngineEntry("hole", f"http://127.0.0.1:{hole.getsockname()[1]}"), r.backends[0].entry()])
            client = await r.client()
            assert [(await client.ask()).body for _ in range(2)] == [b"e0"] * 2
            assert r.router is not None
            assert r.router.metrics.retries["refused"] >= 1
