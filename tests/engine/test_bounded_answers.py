"""Servers that answer without end, or send the caller on: neither memory nor a key is lost to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from canned import answer, canned
from patience import WAIT_S
from penstock.errors import EngineError, EngineHTTPError
from penstock.http import HttpTransport
from penstock.router.state import RouterAdmin

ENDLESS_HEAD = b"HTTP/1.1 %d OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
PIECE = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
PIECES = 256
"""MiB after which the server ends all the same."""


class Hostile:
    url, sent = "", 0


@asynccontextmanager
async def answering(status: int) -> AsyncIterator[Hostile]:
    hostile = Hostile()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(ENDLESS_HEAD % status)
            for _ in range(PIECES):
                writer.write(PIECE)
                await writer.drain()
                hostile.sent += 1
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        hostile.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield hostile


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("client", [HttpTransport, RouterAdmin])
async def test_an_answer_without_end_is_given_up(client: Any, status: int) -> None:
    async with answering(status) as hostile:
        caller = client(hostile.url)
        with pytest.raises(EngineError, match="its answer is longer than 64 MiB"):
            await (caller.get("/x", timeout_s=WAIT_S) if client is HttpTransport else caller.engines())
        await caller.close()
        assert hostile.sent < PIECES


async def test_a_line_without_end_is_given_up() -> None:
    async with answering(200) as hostile:
        http = HttpTransport(hostile.url, name="e0", most=8 << 20)

        async def read() -> None:
            async with http.stream("POST", "/x", b"{}", timeout_s=WAIT_S) as reply:
                async for _ in reply.lines():
                    pass

        with pytest.raises(EngineError, match="engine e0: its answer is longer than 8 MiB"):
            await read()
        await http.close()
        assert hostile.sent < PIECES


@pytest.mark.parametrize("status", [302, 307])
async def test_nobody_is_followed_to_another_address(status: int) -> None:
    async with canned(answer({})) as other:
        head = f"HTTP/1.1 {status} T\r\nConnection: close\r\nLocation: {other.url}/x\r\nContent-Length: 0\r\n\r\n"
        async with canned(head.encode()) as first:
            http, admin = HttpTransport(first.url, api_key="key"), RouterAdmin(first.url, "key")
            for call in (
                http.get("/x", timeout_s=WAIT_S),
                http.post("/x", {}, timeout_s=WAIT_S),
                admin._call("GET", "/router/health"),
            ):
                with pytest.raises(EngineHTTPError, match=f"redirects to '{other.url}/x', which is not followed") as e:
                    await call
                assert e.value.status == status
            await http.close()
            await admin.close()
        assert other.heads == []
