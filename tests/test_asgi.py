"""Serving an ASGI application."""

from __future__ import annotations

import asyncio
import socket

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from patience import WAIT_S
from penstock.asgi import listening, serving_app


async def test_what_an_answer_has_written_is_sent_at_once():
    waits: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        waits.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = listening("127.0.0.1", 0, "a test")
    async with await asyncio.start_server(connected, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        async with asyncio.timeout(WAIT_S):
            assert await waits
        writer.close()


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
async def test_the_head_of_an_answer_is_sent_with_its_body(connection: str):
    listener = listening("127.0.0.1", 0, "a test")
    address = listener.getsockname()
    sent: list[int] = []

    class Counted(socket.socket):
        def send(self, data: bytes, *flags: int) -> int:  # type: ignore[override]
            sent.append(len(data))
            return super().send(data, *flags)

        def accept(self) -> tuple[socket.socket, object]:
            fd, where = self._accept()  # type: ignore[attr-defined]
            return Counted(self.family, self.type, self.proto, fd), where

    counted = Counted(listener.family, listener.type, listener.proto, listener.detach())
    app = Starlette(routes=[Route("/", lambda _: PlainTextResponse("a body"))])
    async with serving_app(app, counted, "a test"), asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(f"GET / HTTP/1.1\r\nHost: x\r\nConnection: {connection}\r\n\r\n".encode())
        assert (await reader.readuntil(b"a body")).startswith(b"HTTP/1.1 200 OK")
        writer.close()
    assert len(sent) == 1
