"""HTTP without sockets, for virtual time: calls of `HttpTransport` run the handlers of aiohttp applications directly.

Above aiohttp's client and below its server everything is the real thing: bodies, headers, statuses, streams that break.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Mapping
from types import SimpleNamespace
from typing import Any, Self

import aiohttp
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion11, RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

Head = tuple[int, Mapping[str, str]]
Open = Callable[["Call"], Awaitable["Exchange"]]
BROKEN = "the connection broke"


class Call:
    """One request as a client makes it."""

    def __init__(self, method: str, url: str, data: bytes | None, headers: Mapping[str, str]) -> None:
        self.method = method
        self.url = URL(url)
        self.data = data or b""
        self.headers = headers

    @property
    def address(self) -> str:
        """Where it goes, `http://host:port`."""
        return f"{self.url.scheme}://{self.url.authority}"


class Exchange:
    """A call and its answer while a server works on it."""

    def __init__(self, app: web.Application, call: Call) -> None:
        self.head: asyncio.Future[Head] = asyncio.get_running_loop().create_future()
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        """What came of the body; None at its end."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Nothing more comes of it, for whatever reason."""
        self.broken = False
        self._handler = asyncio.create_task(self._serve(app, call), name=f"{call.method} {call.url.path}")

    async def begun(self) -> Head:
        """Status and headers. Raises aiohttp's error where the connection broke before."""
        return await asyncio.shield(self.head)

    async def body(self) -> AsyncIterator[bytes]:
        """What follows, as it comes."""
        while (piece := await self.pieces.get()) is not None:
            yield piece
        if self.broken:
            raise aiohttp.ClientPayloadError(BROKEN)

    def sever(self) -> None:
        """The connection breaks: the client sees that, and the server drops the request."""
        self._handler.cancel()
        self.end(broken=True)

    def end(self, *, broken: bool) -> None:
        """Nothing more comes; the first end counts."""
        if self.ended.done():
            return
        self.broken = broken
        self.ended.set_result(None)
        if not self.head.done():
            self.head.set_exception(aiohttp.ServerDisconnectedError(BROKEN))
            self.head.exception()  # the client may be gone
        self.pieces.put_nowait(None)

    async def _serve(self, app: web.Application, call: Call) -> None:
        headers = CIMultiDict({"Host": call.url.authority, **call.headers})
        raw = tuple((name.encode(), value.encode()) for name, value in headers.items())
        url = URL(call.url.path_qs)
        framing = (False, None, False, False)  # should_close, compression, upgrade, chunked
        message = RawRequestMessage(
            call.method, call.url.path_qs, HttpVersion11, CIMultiDictProxy(headers), raw, *framing, url
        )
        transport = SimpleNamespace(abort=self.sever, is_closing=lambda: False, get_extra_info=lambda *_: None)
        protocol = SimpleNamespace(transport=transport, ssl_context=None, peername=None, sockname=None)
        loop = asyncio.get_running_loop()
        request = web.Request(message, EMPTY_PAYLOAD, protocol, _Writer(self), None, loop)  # type: ignore[arg-type]
        request._read_bytes = call.data
        response = await app._handle(request)
        if not response.prepared:
            await response.prepare(request)
        await response.write_eof()
        self.end(broken=False)


class _Writer(AbstractStreamWriter):
    """Where a handler writes its answer."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def write_headers(self, status_line: str, headers: CIMultiDict[str]) -> None:
        if not self._exchange.head.done():
            self._exchange.head.set_result((int(status_line.split(" ")[1]), headers))

    async def write(self, chunk: Any) -> None:
        if chunk:
            self._exchange.pieces.put_nowait(bytes(chunk))

    async def write_eof(self, chunk: bytes = b"") -> None:
        await self.write(chunk)

    async def drain(self) -> None:
        """There is no buffer to empty."""

    def enable_compression(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("nobody compresses here")

    def enable_chunking(self) -> None:
        """There is no framing."""

    def send_headers(self) -> None:
        """They are sent when they are written."""


class Response:
    """What `HttpTransport` uses of an `aiohttp.ClientResponse`."""

    def __init__(self, exchange: Exchange, head: Head, end: float | None) -> None:
        self.status, self.headers = head
        self.content_type = self.headers.get("Content-Type", "application/octet-stream").partition(";")[0]
        self.content = SimpleNamespace(iter_any=self._pieces)
        self._exchange = exchange
        self._end = end

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self._pieces()])

    async def _pieces(self) -> AsyncIterator[bytes]:
        body = self._exchange.body()
        while True:
            async with asyncio.timeout_at(self._end):
                piece = await anext(body, None)
            if piece is None:
                return
            yield piece

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._exchange.sever()


class Sending:
    """What `aiohttp.ClientSession.request` gives: to be awaited, or to be entered."""

    def __init__(self, answering: Coroutine[Any, Any, Response]) -> None:
        self._answering = answering

    def __await__(self) -> Generator[Any, Any, Response]:
        return self._answering.__await__()

    async def __aenter__(self) -> Response:
        self._response = await self._answering
        return self._response

    async def __aexit__(self, *given: object) -> None:
        await self._response.__aexit__(*given)


class Session:
    """What `HttpTransport` uses of an `aiohttp.ClientSession`.

    Args:
        opener: finds who answers a call; raises `aiohttp.ClientConnectorError` where nobody listens.
    """

    closed = False

    def __init__(self, opener: Open) -> None:
        self._open = opener

    def request(
        self,
        method: str,
        url: str,
        *,
        data: bytes | None,
        headers: Mapping[str, str],
        timeout: aiohttp.ClientTimeout,
        allow_redirects: bool,
    ) -> Sending:
        assert not allow_redirects
        return Sending(self._answer(Call(method, url, data, headers), timeout.total))

    async def _answer(self, call: Call, total_s: float | None) -> Response:
        end = None if total_s is None else asyncio.get_running_loop().time() + total_s
        async with asyncio.timeout_at(end):
            exchange = await self._open(call)
            try:
                return Response(exchange, await exchange.begun(), end)
            except BaseException:
                exchange.sever()
                raise

    async def close(self) -> None:
        """There is nothing to close."""


def refused(url: str) -> aiohttp.ClientConnectorError:
    """Nobody listens there."""
    key: Any = SimpleNamespace(host=url, port=0, is_ssl=False, ssl=True)
    return aiohttp.ClientConnectorError(key, ConnectionRefusedError(111, "refused"))
