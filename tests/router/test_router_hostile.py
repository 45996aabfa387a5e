"""Input that is refused, seen from outside: an error, a closed connection, and an engine that was never touched."""

from __future__ import annotations

import asyncio
import re
import time

import pytest
from router_rig import Rig, Writer, answer_name, both_loops, request, rig
from test_router_framing import BAD_BODIES
from test_router_head import BAD_HEADS

from patience import WAIT_S


async def refused(r: Rig, data: bytes, allowed: set[int]) -> bytes:
    """Send it, and see one error answer and the end of the connection."""
    client = await r.client()
    client.writer.write(data)
    answer = await client.rest()
    client.close()
    assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5")), (data, answer)
    assert int(answer.split()[1]) in allowed, (data, answer)
    assert len(re.findall(rb"HTTP/1\.1 \d", answer)) == 1, (data, answer)
    assert b"X-Penstock-Error: " in answer
    assert b"Connection: close" in answer
    assert not re.search(rb"\bb'", answer), "what was sent is shown as text"
    return answer


@both_loops
async def test_hostile_heads_and_bodies_touch_no_engine(*, process: bool) -> None:
    smuggled = request("/smuggled", method="GET")
    async with rig(answer_name, process=process) as r:
        for more in (b"", b"0\r\n\r\n" + smuggled):
            for head in BAD_HEADS.values():
                await refused(r, head + more, {400, 417, 501, 505})
        for more in (b"", smuggled):
            for body in BAD_BODIES.values():
                await refused(r, request(headers="Transfer-Encoding: chunked\r\n") + body + more, {400})
        assert (r.backends[0].seen, r.backends[0].connections) == ([], 0)
        assert (await (await r.client()).ask()).status == 200


async def test_a_bad_request_behind_a_good_one_ends_the_connection() -> None:
    async with rig(answer_name) as r:
        client = await r.client()
        await client.send(request() + BAD_HEADS["length and chunked"] + request("/smuggled"))
        assert (await client.receive()).status == 400
        assert await client.rest() == b""
        assert not r.backends[0].seen


@pytest.mark.parametrize("size", [3, 0x110000], ids=["short", "long"])
async def test_a_chunked_body_that_turns_bad_reaches_no_engine(size: int) -> None:
    async with rig(answer_name) as r:
        client = await r.client()
        await client.send(request(headers="Transfer-Encoding: chunked\r\n") + b"%x\r\n%b\r\n" % (size, b"x" * size))
        async with asyncio.timeout(WAIT_S):
            await client.send(b"zz\r\nabc\r\n0\r\n\r\n")
            assert (await client.receive()).status == 400
        await r.settled()
        assert not r.backends[0].seen


@both_loops
async def test_limits(*, process: bool) -> None:
    async with rig(answer_name, process=process, max_header_bytes=2000, max_body_bytes=10_000) as r:
        long = f"X-Long: {'a' * 2000}\r\n"
        assert b" 431 " in await refused(r, request(headers=long), {431})
        assert b" 431 " in await refused(r, b"GET /" + b"a" * 3000, {431})
        assert b" 413 " in await refused(r, request(headers="Content-Length: 10001\r\n") + b"x" * 50, {413})
        chunk = b"1000\r\n" + b"x" * 4096 + b"\r\n"
        assert b" 413 " in await refused(r, request(headers="Transfer-Encoding: chunked\r\n") + 4 * chunk, {413})
        expecting = request(headers="Expect: 100-continue\r\nContent-Length: 20000\r\n")
        assert b" 413 " in await refused(r, expecting, {413})  # told before it sends
        assert r.backends[0].seen == []
        assert (await (await r.client()).ask(body=b"x" * 10_000)).status == 200


@both_loops
async def test_a_head_that_does_not_end(*, process: bool) -> None:
    async with rig(answer_name, process=process, header_timeout_s=0.4) as r:
        started = time.monotonic()
        assert b" 408 " in await refused(r, b"GET / HTTP/1.1\r\nHost: ", {408})
        assert time.monotonic() - started >= 0.4
        assert r.backends[0].seen == []


async def test_a_client_that_never_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.router.client_connection.WRITE_STALL_S", 0.3)

    async def endless(backend: object, seen: object, reader: object, writer: Writer) -> None:  # noqa: ARG001
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n" + b"x" * 65_536 + b"\r\n")
            await writer.drain()

    async with rig(endless) as r:
        client = await r.client(limit=1000)
        await client.send(request())
        await client.head()
        state = await r.settled()
        assert state.engines[0].requests == 1
