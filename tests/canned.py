"""A server that gives prepared answers, whatever it is asked, and keeps what it was sent."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import orjson

from penstock.engine.client import DataClient

JSON, LINES = "application/json", "application/x-ndjson"


def answer(body: object, kind: str = JSON) -> bytes:
    """A whole answer; of `LINES`, `body` is a list of lines. Bytes go out as they are."""
    if isinstance(body, bytes):
        data = body
    elif kind == LINES and isinstance(body, Sequence):
        data = b"".join(orjson.dumps(line) + b"\n" for line in body)
    else:
        data = orjson.dumps(body)
    head = f"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


@dataclass
class Canned:
    url: str = ""
    heads: list[bytes] = field(default_factory=list[bytes])
    bodies: list[bytes] = field(default_factory=list[bytes])
    """Of the requests, in order."""


@asynccontextmanager
async def canned(*answers: bytes) -> AsyncIterator[Canned]:
    """Each connection gets the next of `answers`, the last one again and again."""
    left, server_of = list(answers), Canned()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
        server_of.heads.append(head)
        server_of.bodies.append(await reader.readexactly(int(length or 0)))
        writer.write(left.pop(0) if len(left) > 1 else left[0])
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        server_of.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield server_of


@contextmanager
def full() -> Iterator[socket.socket]:
    """A socket whose queue is full: connections to it neither open nor fail."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.settimeout(0)
            with suppress(BlockingIOError):
                filler.connect(listening.getsockname())
        yield listening


@asynccontextmanager
async def client_of(*answers: bytes, **options: Any) -> AsyncIterator[DataClient]:
    """A data client of an engine that gives these answers."""
    async with canned(*answers) as server:
        data = DataClient(server.url, **options)
        try:
            yield data
        finally:
            await data.close()
