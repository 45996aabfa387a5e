"""What a client can make the router keep: bounded, whatever it sends and however little it reads."""

from __future__ import annotations

import asyncio
import tracemalloc

import pytest
import uvloop
from router_rig import Backend, Reader, Seen, Writer, answer_name, reply, request, rig

from patience import eventually
from penstock import process
from penstock.router.client_connection import ClientConnection

MB = 1 << 20


class SilentTransport(asyncio.Transport):
    """A client that only sends."""

    def is_closing(self) -> bool:
        return False


async def test_the_framing_of_chunks_counts_as_body() -> None:
    piece = b"1\r\na\r\n"
    async with rig(answer_name, max_body_bytes=10_000) as r:
        head = request(headers="Transfer-Encoding: chunked\r\n")
        client = await r.client()
        client.writer.write(head + piece * (12_000 // len(piece)))
        assert (await client.receive()).status == 413
        client = await r.client()
        await client.send(head + piece * (5_000 // len(piece)) + b"0\r\n\r\n")
        assert (await client.receive()).status == 200


async def test_a_body_that_drips_in_ends_at_its_deadline() -> None:
    async with rig(answer_name, body_timeout_s=0.5) as r:
        client = await r.client()
        await client.send(request(headers="Content-Length: 100000\r\n"))

        async def drip() -> None:
            while True:
                await client.send(b"x")
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        answer = await client.receive()
        dripping.cancel()
        assert (answer.status, answer.header("x-penstock-error")) == (408, "slow_body")
        assert b"more than 0.5 s" in answer.body
        await r.settled()


async def test_a_large_admin_body_is_refused_in_time() -> None:
    async with rig() as r:
        client = await r.control()
        await client.send(request("/router/engines", headers="Content-Length: 5000000\r\n", method="PUT"))
        await client.send(b" " * 5_000_000)
        answer = await client.receive()
        assert (answer.status, b"larger than 4194304 bytes" in answer.body) == (400, True)


async def test_bytes_of_incomplete_bodies_count_as_held() -> None:
    async with rig(answer_name, max_held_bytes=100_000) as r:
        assert r.router is not None
        gate = r.router.dispatcher.gate
        head = request(headers="Content-Length: 50000\r\n")
        first, second, third = [await r.client() for _ in range(3)]
        for client in (first, second):
            await client.send(head + b"x" * 45_000)
        await eventually(lambda: gate.held_bytes > 90_000)
        await third.send(head + b"x" * 45_000)
        answer = await third.receive()
        assert (answer.status, answer.header("x-penstock-error")) == (503, "queue_full")
        assert gate.held_bytes > 90_000
        first.close()
        await eventually(lambda: gate.held_bytes < 50_000)
        await second.send(b"x" * 5_000)
        assert (await second.receive()).status == 200
        assert gate.held_bytes == 0
        assert r.backends[0].seen[0].body == b"x" * 50_000


async def test_a_body_in_tiny_pieces_takes_no_more_than_its_bytes() -> None:
    async with rig(answer_name) as r:
        assert r.router is not None
        pieces = 100_000
        client = ClientConnection(r.router.clients)
        client.transport = SilentTransport()
        client.connection_made(client.transport)
        tracemalloc.start()
        try:
            client.data_received(request(headers=f"Content-Length: {pieces + 1}\r\n"))
            for _ in range(pieces):
                client.data_received(bytes(bytearray(b"x")))
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            client.connection_lost(None)
        assert kept < 3 * pieces
        assert r.router.dispatcher.gate.held_bytes == 0


def test_a_long_body_is_kept_once() -> None:
    size, piece = 32 * MB, b"x" * MB
    reads = asyncio.Event()

    async def deaf(backend: Backend, seen: Seen, reader: Reader, writer: Writer) -> None:  # noqa: ARG001
        await reads.wait()
        left = size
        while left:
            data = await reader.read(MB)
            assert data.strip(b"x") == b""
            left -= len(data)
        writer.write(reply(b"read"))

    async def run() -> None:
        async with rig(deaf, read_bodies=False) as r:
            client = await r.client()
            tracemalloc.start()
            try:
                await client.send(request(headers=f"Content-Length: {size}\r\n"))
                for _ in range(size // MB):
                    await client.send(piece)
                await asyncio.wait_for(r.backends[0].arrived.wait(), 60)
                _, most = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert size < most < 1.5 * size
            reads.set()
            assert (await client.receive()).body == b"read"

    uvloop.run(run())  # as a router's process does


async def test_strangers_give_way_where_descriptors_run_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.resource, "getrlimit", lambda _: (64 + 40, 64 + 40))
    async with rig(answer_name, api_key="k") as r:
        assert r.router is not None
        keyed = "Authorization: Bearer k\r\n"
        known = [await r.client() for _ in range(5)]
        for client in known:
            assert (await client.ask(headers=keyed)).status == 200
        strangers = [await r.client() for _ in range(40)]
        for client in strangers[::2]:
            await client.send(b"GET /router/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for client in strangers[:20]:
            await client.rest()
        assert len(r.router.clients.connected) <= 21  # 20, and one connection of the admin client
        for client in [*known, await r.client()]:
            assert (await client.ask(headers=keyed)).status == 200
