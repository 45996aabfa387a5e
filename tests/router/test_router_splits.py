"""Answers that are cut, cut short or too long; `test_router_fuzz.py` has what messages mean to h11 and llhttp.

The router's protocols run on transports of this test; the engine behind them reads with h11, so what it sees is what
another parser makes of what was passed on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_rig import DATA_PATHS

from penstock.router.backend import BackendConnection
from penstock.router.client_connection import ClientConnection
from penstock.router.membership import EngineEntry, Membership
from penstock.router.server import Router
from penstock.router_settings import RouterConfig

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Message(NamedTuple):
    """A whole request as one reader sees it; names of fields in lower case, in order."""

    method: bytes
    target: bytes
    fields: tuple[tuple[bytes, bytes], ...]
    body: bytes


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__({"socket": self})
        self.written = b""
        self.closing = False

    def setsockopt(self, *_: Any) -> None:
        """A socket's."""

    def write(self, data: Any) -> None:
        if not self.closing:
            self.written += bytes(data)

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = True

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Pair:
    """A client's connection and an engine's, with a router between them."""

    def __init__(self, connections: int = 1) -> None:
        self.router = Router(
            RouterConfig(engine_metrics_interval_s=0, data_paths=DATA_PATHS)
        )  # nobody else opens connections
        self.router.dispatcher.set_membership(Membership(1, (EngineEntry("e0", "http://127.0.0.1:9"),)))
        engine = self.router.dispatcher.backends["e0"]
        self.engines: list[tuple[BackendConnection, Wire]] = []
        self.answered = 0
        for _ in range(connections):
            connection, wire = BackendConnection(engine), Wire()
            connection.connection_made(wire)
            engine.release(connection, reusable=True)
            self.engines.append((connection, wire))
        self.client, self.wire = ClientConnection(self.router.clients), Wire()
        self.client.connection_made(self.wire)

    async def close(self) -> None:
        self.client.connection_lost(None)
        await self.router.close()


def read(connection: BackendConnection, data: bytes) -> None:
    """Let it read, as the loop does."""
    connection.get_buffer(-1)[: len(data)] = data
    connection.buffer_updated(len(data))


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    ends = sorted({0, len(data), *[place % (len(data) + 1) for place in places]})
    return [data[start:end] for start, end in pairwise(ends)]


def by_h11(data: bytes) -> tuple[list[Message], bool]:
    """Complete requests, and whether the rest is bad or another protocol."""
    messages: list[Message] = []
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(data)
    head, body = None, b""
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                head, body = event, b""
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage) and head is not None:
                messages.append(Message(head.method, head.target, tuple(head.headers), body))
                connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is h11.MUST_CLOSE:
                    return messages, False
                connection.start_next_cycle()
            else:
                return messages, event is h11.PAUSED
    except h11.RemoteProtocolError:
        return messages, True


GET = b"GET /b?c HTTP/1.1\r\nHost: a\r\n\r\n"
ANSWERS = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\nX: y\r\n\r\nhello world",
    b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n00F\r\n, you out there\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"9\r\ndata: x\n\n\r\n" * 3 + b"0\r\n\r\n",
]


async def answered(pieces: Sequence[bytes], *, ends: bool, lost: Exception | None = None) -> tuple[bytes, bool]:
    """What the client gets, and whether its connection is closed."""
    pair = Pair()
    pair.client.data_received(GET)
    connection, _ = pair.engines[0]
    for piece in pieces:
        read(connection, piece)
    if ends:
        connection.connection_lost(lost)
    result = pair.wire.written, pair.wire.closing
    await pair.close()
    return result


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(ANSWERS), st.integers(0, 400), st.lists(st.integers(0, 400), max_size=4), st.booleans())
def test_an_answer_cut_short_is_never_a_whole_one(
    answer: bytes,
    at: int,
    places: list[int],
    reset: bool,  # noqa: FBT001
) -> None:
    part = answer[: at % len(answer)]
    lost = ConnectionResetError() if reset else None
    written, closing = asyncio.run(answered(cut(part, places), ends=True, lost=lost))
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("host", "a")]))
    client.send(h11.EndOfMessage())
    client.receive_data(written)
    events: list[Any] = []
    while (event := client.next_event()) is not h11.NEED_DATA:
        events.append(event)
        if isinstance(event, h11.EndOfMessage):
            break
    if not written:
        return  # the request waits for another engine
    if events and isinstance(events[-1], h11.EndOfMessage):
        heads = [event for event in events if isinstance(event, h11.Response)]
        assert heads[0].status_code == 502  # the router's own: no byte of the answer had been passed on
    else:
        assert closing


@pytest.mark.parametrize("extra", [b"x", ANSWER, b"\r\n"])
@pytest.mark.parametrize("joined", [True, False])
async def test_bytes_behind_an_answer_end_the_connection(*, extra: bytes, joined: bool) -> None:
    pair = Pair()
    pair.client.data_received(GET)
    connection, wire = pair.engines[0]
    for piece in [ANSWER + extra] if joined else [ANSWER, extra]:
        read(connection, piece)
    assert wire.closing
    assert pair.wire.written.startswith(b"HTTP/1.1 502 " if joined else ANSWER)
    await pair.close()


async def test_a_payload_that_looks_like_chunks_is_a_payload() -> None:
    inner = b"3\r\nabc\r\n"
    head, size = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"%x\r\n" % (3 * len(inner))
    pieces = [head, size, inner, inner, inner, b"\r\n", inner, b"0\r\n\r\n"]
    pair = Pair()
    for _ in range(2):
        pair.client.data_received(GET)
        connection, wire = pair.engines[0]
        assert connection.user is not None
        for piece in pieces:
            read(connection, piece)
        assert connection.user is None  # it knows where the answer ended
        assert not wire.closing
    assert pair.wire.written == 2 * b"".join(pieces)
    await pair.close()


@pytest.mark.parametrize(
    "wrong", [b"2\r\nabc\r\n", b"4\r\nabc\r\n", b"3\r\nabc\n\n", b"+3\r\nabc\r\n", b"0\r\nabc\r\n"]
)
async def test_a_chunk_of_another_size_than_it_says_ends_the_transfer(*, wrong: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    good = [b"3\r\nabc\r\n", b"03\r\nabc\r\n", b"A\r\n0123456789\r\n"]
    assert await answered([head, *good], ends=False) == (head + b"".join(good), False)
    for block in (wrong, wrong + good[0]):
        written, closing = await answered([head, *good, block], ends=False)
        assert (written, closing) == (head + b"".join(good), True)
