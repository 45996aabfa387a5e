"""What clients do not read stays with the engines: the router as a process, its memory from the kernel."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from router_rig import Answer, RawClient, Rig, reply, request, rig, says

from patience import WAIT_S

STREAMS, SIZE = 256, 1 << 20
RATE, SECONDS = 10_000, 3.0
LIMIT = 64 << 20
CHUNKS = (b"400\r\n" + b"y" * 1024 + b"\r\n") * (SIZE >> 16)


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


WHOLE = says(reply(b"y" * SIZE))
CHUNKED = says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *[CHUNKS] * 64, b"0\r\n\r\n")


async def narrow(url: str) -> RawClient:
    """A client behind a network's segments and a small window: on loopback the kernel itself would take the answer."""
    parts = urlsplit(url)
    sock = socket.socket()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1400)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 10)
    sock.setblocking(False)  # noqa: FBT003
    await asyncio.get_running_loop().sock_connect(sock, (parts.hostname, parts.port))
    return RawClient(*await asyncio.open_connection(sock=sock, limit=4 << 10))


async def begin(r: Rig, session: int) -> RawClient:
    client = await narrow(r.url)
    r.clients.append(client)
    await client.send(request(headers=f"X-Session-ID: {session}\r\n"))
    assert (await client.head())[0] == 200
    return client


async def read_slowly(r: Rig, client: RawClient) -> int:
    """Read at `RATE` for a while; a client that starves does not get to its end. Returns the router's memory then."""
    got = 0
    began = time.monotonic()
    while (now := time.monotonic()) < began + SECONDS or got <= RATE / 2:
        got += len(await client.reader.read(max(0, int((now - began) * RATE) - got) or 1))
        await asyncio.sleep(0.1)
    return resident(r.pid)


@pytest.mark.parametrize("answer", [WHOLE, CHUNKED], ids=["long answers", "streams"])
async def test_slow_readers_do_not_fill_the_router(answer: Answer) -> None:
    async with rig(answer, answer, process=True) as r:
        await (await r.client()).ask("/warm-up")
        before = resident(r.pid)
        async with asyncio.timeout(WAIT_S):
            clients = await asyncio.gather(*[begin(r, session) for session in range(STREAMS)])
            grown = max(await asyncio.gather(*[read_slowly(r, client) for client in clients])) - before
        assert grown < LIMIT, f"{grown >> 20} MiB of {STREAMS * SIZE >> 20} that were offered"
