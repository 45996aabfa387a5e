"""What goes in comes out: heads, bodies, their framing and their timing, on asyncio and on uvloop."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from router_rig import (
    Backend,
    Reader,
    Seen,
    Writer,
    answer_name,
    both_loops,
    chunk,
    read_chunks,
    reply,
    request,
    rig,
    says,
    stays,
)

from patience import eventually


async def echo(backend: Backend, seen: Seen, reader: Reader, writer: Writer) -> None:  # noqa: ARG001
    writer.write(reply(seen.body, headers="X-Engine: 1\r\nSet-Cookie: a=b\r\nSet-Cookie: c=d\r\n"))


@both_loops
async def test_heads_pass_both_ways(*, process: bool) -> None:
    async with rig(echo, process=process) as r:
        client = await r.client()
        sent = (
            "X-Session-ID: 7\r\nTraceParent: 00-a-b-01\r\nAuthorization: Bearer k\r\nX-Twice: 1\r\nX-Twice: 2\r\n"
            "Content-Type: application/json\r\nAccept-Encoding: gzip\r\n"
        )
        answer = await client.ask("/v1/x?a%20b=c&d", b"{}", sent + "Connection: keep-alive, X-Mine\r\nX-Mine: 1\r\n")
        seen = r.backends[0].seen[0]
        assert seen.line == "POST /v1/x?a%20b=c&d HTTP/1.1"
        assert seen.headers == [
            ("Host", "test"), ("X-Session-ID", "7"), ("TraceParent", "00-a-b-01"),
            ("X-Twice", "1"), ("X-Twice", "2"), ("Content-Type", "application/json"), ("Accept-Encoding", "gzip"),
            ("Content-Length", "2"),
        ]  # fmt: skip
        assert answer.headers == [
            ("X-Engine", "1"), ("Set-Cookie", "a=b"), ("Set-Cookie", "c=d"), ("Content-Length", "2")
        ]  # fmt: skip
        assert answer.body == b"{}"


@both_loops
async def test_bodies_pass_whatever_their_framing_and_size(*, process: bool) -> None:
    async with rig(echo, process=process) as r, aiohttp.ClientSession() as session:

        async def pieces(body: bytes) -> Any:
            for start in range(0, len(body), 70_001):
                yield body[start : start + 70_001]

        for size in (0, 1, 65_536, 1_200_000, 3_000_000):
            body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
            for data in (body, pieces(body)):
                async with session.post(r.url + "/v1/echo", data=data) as response:
                    assert response.status == 200
                    assert await response.read() == body
        state = await r.settled()
        assert state.requests == 10
        assert r.backends[0].connections <= 2  # kept alive; one may be opened while another is being given back


@both_loops
async def test_chunks_pass(*, process: bool) -> None:
    wire = b"3\r\nabc\r\n1\r\nd\r\n0\r\n\r\n"

    splits = [wire[i : i + 1] for i in range(len(wire))]  # every one of the framing
    chunked = says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *splits)
    async with rig(chunked, process=process) as r:
        client = await r.client()
        await client.send(request(headers="Transfer-Encoding: chunked\r\n") + wire)
        assert (await client.head())[0] == 200
        assert await client.reader.readexactly(len(wire)) == wire
        assert r.backends[0].seen[0].body == b"abcd"
        assert (await client.ask()).body == b"abcd"


@both_loops
async def test_each_event_is_passed_on_at_once(*, process: bool) -> None:
    release = [asyncio.Event() for _ in range(5)]

    async def events(backend: Backend, seen: Seen, reader: Reader, writer: Writer) -> None:  # noqa: ARG001
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for event in release:
            await event.wait()
            writer.write(b"9\r\ndata: x\n\n\r\n")
        writer.write(b"0\r\n\r\n")

    async with rig(events, process=process) as r:
        client = await r.client()
        await client.send(request())
        async with asyncio.timeout(60):
            release[0].set()
            assert (await client.head())[0] == 200  # the head comes with the first event
            chunks = read_chunks(client.reader)
            for event in release:
                event.set()
                # The engine makes no further event before this one has arrived: nothing may be held back.
                assert await anext(chunks) == b"data: x\n\n"
            assert [chunk async for chunk in chunks] == []


@both_loops
async def test_answers_without_a_body(*, process: bool) -> None:
    async def bare(backend: Backend, seen: Seen, reader: Reader, writer: Writer) -> None:  # noqa: ARG001
        match seen.line.split()[1]:
            case "/head":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 77\r\n\r\n")
            case "/204":
                writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
            case "/304":
                writer.write(b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\nETag: x\r\n\r\n")
            case _:
                writer.write(reply(headers="Allow: GET, OPTIONS\r\n"))

    async with rig(bare, process=process) as r:
        client = await r.client()
        assert (await client.ask("/head", method="HEAD")).header("content-length") == "77"
        assert (await client.ask("/204", method="DELETE")).status == 204
        assert (await client.ask("/304", method="GET")).header("etag") == "x"
        assert (await client.ask("/options", method="OPTIONS")).header("allow") == "GET, OPTIONS"
        assert r.backends[0].connections == 1


async def test_the_router_says_continue() -> None:
    async with rig(echo) as r:
        client = await r.client()
        head = request(headers="Expect: 100-continue\r\nContent-Length: 3\r\n")
        await client.send(head)
        assert (await client.head())[0] == 100
        await client.send(b"abc")
        assert (await client.receive()).body == b"abc"
        assert r.backends[0].seen[0].header("expect") is None
        await client.send(head + b"def")  # the client need not wait
        assert (await client.receive()).body == b"def"
        await client.send(request(headers="Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n"))
        assert (await client.head())[0] == 100
        await client.send(chunk(b"x" * 300_000) + b"0\r\n\r\n")
        assert (await client.receive()).body == b"x" * 300_000


@pytest.mark.parametrize("when", ["with it", "inside its body", "before the answer"])
async def test_a_request_before_the_answer_to_the_one_before_is_refused(when: str) -> None:
    async with rig(stays) as r:
        client = await r.client()
        first = request("/0", b"body")
        match when:
            case "with it":
                await client.send(first + request("/1"))
            case "inside its body":
                await client.send(first[:-1])
                await asyncio.sleep(0.05)
                await client.send(first[-1:] + request("/1"))
            case _:
                await client.send(first)
                await r.backends[0].arrived.wait()
                await client.send(request("/1"))
        answer = await client.receive()
        assert (answer.status, answer.header("x-penstock-error")) == (400, "sent_ahead")
        assert answer.header("connection") == "close"
        assert await client.rest() == b""
        await r.settled()


async def test_the_client_decides_about_its_own_connection() -> None:
    async with rig(answer_name) as r:
        client = await r.client()
        answer = await client.ask(headers="Connection: close\r\n")
        assert answer.header("connection") == "close"
        assert await client.rest() == b""
        assert (await (await r.client()).ask()).body == b"e0"
        assert r.backends[0].connections == 1  # the engine's connection outlived the client's


async def test_a_slow_engine_does_not_fill_the_router() -> None:
    reads, size = asyncio.Event(), 24 << 20

    async def deaf(backend: Backend, seen: Seen, reader: Reader, writer: Writer) -> None:  # noqa: ARG001
        await reads.wait()
        length = int(seen.header("content-length") or 0)
        while length:
            length -= len(await reader.read(min(length, 1 << 20)))
        writer.write(reply(b"read"))

    async with rig(deaf, read_bodies=False, max_held_bytes=2 * size + 4096) as r:
        assert r.router is not None
        gate = r.router.dispatcher.gate
        asks = [asyncio.create_task((await r.client()).ask(body=b"x" * size)) for _ in range(2)]
        await eventually(lambda: gate.held_bytes > 2 * size)
        client = await r.client()
        await client.send(request(headers="Content-Length: 9000\r\n") + b"x" * 8000)
        late = await client.receive()
        assert (late.status, late.header("x-penstock-error")) == (503, "queue_full")
        reads.set()
        assert [answer.body for answer in await asyncio.gather(*asks)] == [b"read"] * 2
        assert gate.held_bytes == 0
