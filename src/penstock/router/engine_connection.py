"""One connection to an engine: sends a request's bytes, follows the answer, and knows where it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from penstock.router.framing import BodyReader, ChunkedReader, CloseReader, FramingError, LengthReader
from penstock.router.head import CHUNKED, parse_response
from penstock.router.refusal import RefusalError

if TYPE_CHECKING:
    from penstock.router.engine import Engine
    from penstock.router.exchange import Exchange

_MAX_HEAD = 262_144
"""Bytes; an engine's head is trusted more than a client's, but not without bound."""
_JOIN_LIMIT = 1 << 14
"""A head is joined with up to this much of a body: one write for small requests, no copy of large ones."""
_CONTINUE, _SWITCHING, _FINAL = 100, 101, 200


class EngineConnection(asyncio.Protocol):
    """Protocol of one connection in an engine's pool; serves one exchange at a time."""

    __slots__ = (
        "_body",
        "_buffer",
        "_payload",
        "_read_paused",
        "_reusable",
        "engine",
        "exchange",
        "idle_since",
        "reused",
        "transport",
        "write_paused",
    )

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.transport: asyncio.Transport
        self.exchange: Exchange | None = None
        self.reused = False
        """Whether it has served an exchange before this one: only then may it be stale."""
        self.idle_since = 0.0
        self.write_paused = False
        self._buffer = b""
        self._body: BodyReader | None = None
        self._payload: list[bytes] | None = None
        self._reusable = False
        self._read_paused = False

    # --- callbacks of the event loop ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there."""
        self.transport = cast("asyncio.Transport", transport)
        self.engine.opened(self)

    def pause_writing(self) -> None:
        """More is buffered towards the peer than it takes."""
        self.write_paused = True
        if self.exchange is not None:
            self.exchange.adjust_reading()

    def resume_writing(self) -> None:
        """The peer has caught up."""
        self.write_paused = False
        if self.exchange is not None:
            self.exchange.adjust_reading()

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        exchange = self.exchange
        if exchange is None:
            self.transport.abort()  # nobody asked: the connection cannot be trusted any more
            return
        try:
            if self._body is None:
                self._read_head(exchange, data)
            else:
                self._read_body(exchange, self._body, data)
        except FramingError as error:
            self.drop()
            exchange.broken(f"bad chunked answer: {error}")
        except RefusalError as refusal:
            self.drop()
            exchange.failed(refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self.engine.forget(self)
        exchange, self.exchange = self.exchange, None
        if exchange is None:
            return
        if self._body is None:
            exchange.unanswered(self, "closed the connection inside its answer's head" if self._buffer else "")
        elif isinstance(self._body, CloseReader) and exc is None:
            exchange.answered()
        else:
            exchange.broken(f"the engine closed the connection inside its answer{f': {exc}' if exc else ''}")

    # --- for the exchange --------------------------------------------------------------------------------------------

    def send(self, exchange: Exchange, head: bytes, body: Sequence[bytes | memoryview]) -> None:
        """Start an exchange with its head and what has come of its body."""
        self.exchange = exchange
        self._buffer = b""
        self._body = None
        if len(body) == 1 and len(body[0]) <= _JOIN_LIMIT:
            self.transport.write(b"".join((head, body[0])))
            return
        self.transport.write(head)
        for piece in body:
            self.transport.write(piece)

    def set_reading(self, *, reading: bool) -> None:
        """Read the answer, or leave it with the engine while the client is slow."""
        if reading == self._read_paused and not self.transport.is_closing():
            self._read_paused = not reading
            (self.transport.resume_reading if reading else self.transport.pause_reading)()

    def drop(self) -> None:
        """Close at once, whatever is under way: the engine sees the disconnect and aborts the request."""
        self.exchange = None
        self.transport.abort()

    # --- the answer --------------------------------------------------------------------------------------------------

    def _read_head(self, exchange: Exchange, data: bytes) -> None:
        if not self._buffer:
            exchange.first_byte()
        data = self._buffer + data
        start = 0
        while True:
            end = data.find(b"\r\n\r\n", start) + 4
            if end < 4:  # noqa: PLR2004 - not found
                if len(data) > _MAX_HEAD:
                    raise RefusalError(
                        502, "bad_engine_response", f"the engine's head is longer than {_MAX_HEAD} bytes"
                    )
                self._buffer = data[start:]
                return
            response = parse_response(data[start:end], exchange.request.method)
            start = end
            if response.status >= _FINAL:
                break
            if response.status == _SWITCHING:
                raise RefusalError(502, "bad_engine_response", "the engine switched protocols, which nobody asked for")
            if response.status != _CONTINUE:
                exchange.interim(response.forward)
        self._buffer = b""
        self._payload = [] if response.length == CHUNKED and not exchange.request.http_1_1 else None
        if response.length >= 0:
            body = LengthReader(response.length)
        else:
            body = ChunkedReader(self._payload) if response.length == CHUNKED else CloseReader()
        self._body = body
        self._reusable = response.keep_alive
        self._read_body(exchange, body, data, start, exchange.respond(response))

    def _read_body(self, exchange: Exchange, body: BodyReader, data: bytes, start: int = 0, head: bytes = b"") -> None:
        if body.feed(data, start) < len(data):
            # Bytes after the answer: it is not the answer to this request, or the next one's would not be.
            self.drop()
            exchange.broken("the engine sent more than its answer")
            return
        if self._payload is not None:
            data = b"".join(self._payload)
            start = 0
            self._payload.clear()
        if head:
            exchange.forward_head(head, data, start)
        elif data:
            exchange.forward(data)
        if body.done:
            self.exchange = None
            self.reused = True
            self.engine.release(self, reusable=self._reusable and exchange.body_done)
            exchange.answered()
