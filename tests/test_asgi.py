"""Serving an ASGI application."""

from __future__ import annotations

import asyncio
import socket

from penstock.asgi import listening


async def test_what_an_answer_has_written_is_sent_at_once():
    waits: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        waits.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = listening("127.0.0.1", 0, "a test")
    async with await asyncio.start_server(connected, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        async with asyncio.timeout(30.0):
            assert await waits
        writer.close()
