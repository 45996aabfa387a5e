"""Answers in which vLLM says that its engine core is dead, which its API server outlives by about a second.

In vLLM 0.26 and 0.32 an answer is a 500 with the message of `EngineDeadError`; a stream, which has its 200 already,
begins with an event that holds the same error, as Penstock's lines of progress do. Any other error says something of
the request and nothing of the engine.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import orjson

from penstock.router.head import CHUNKED, ResponseHead, parse_response
from penstock.router.http import (
    WHOLE_CHUNK_LIMIT,
    WHOLE_CHUNK_OPENING,
    BodyReader,
    ChunkedReader,
    CloseReader,
    FramingError,
    LengthReader,
    RefusalError,
)

if TYPE_CHECKING:
    from penstock.router.backend import Engine
    from penstock.router.exchange import Exchange

_MESSAGE = "EngineCore encountered an issue"
"""How the message of vLLM's `EngineDeadError` begins."""
_MOST = 16_384
"""Bytes of an answer, framing and all, that are read at most before it goes on: such an error has about 200."""
_LINES, _EVENTS = b"application/x-ndjson", b"text/event-stream"
_LINE_END = re.compile(rb"\n")
_EVENT_END = re.compile(rb"\r?\n\r?\n")


def is_suspect(response: ResponseHead) -> bool:
    """Whether the beginning of the body has to be seen before the head goes to the client."""
    if response.status == 500:  # noqa: PLR2004 - the HTTP status
        return 0 < response.length <= _MOST or response.length == CHUNKED
    return response.status == 200 and response.length == CHUNKED and _is_stream(response)  # noqa: PLR2004


class Suspect:
    """An answer whose body may begin with the death of its core; sees the body as it comes."""

    def __init__(self, response: ResponseHead) -> None:
        self.response = response
        self._payload: list[bytes] = []
        chunked = response.length == CHUNKED
        self._reader = ChunkedReader(self._payload) if chunked else LengthReader(response.length)
        self._body = b""

    def judge(self, data: bytes) -> tuple[bool, str]:
        """Whether enough of the body is here with `data`, its next piece, and the cause of death; empty: none.

        Raises:
            FramingError: the body is not well-formed.
        """
        end = self._reader.feed(data)
        self._body += b"".join(self._payload) if self.response.length == CHUNKED else data[:end]
        self._payload.clear()
        body, done = self._body, self._reader.done or self._reader.size >= _MOST
        if _is_stream(self.response):
            is_lines = self.response.content_type.startswith(_LINES)
            first, *rest = (_LINE_END if is_lines else _EVENT_END).split(body, 1)
            body = first if is_lines else first.partition(b"data:")[2]
            done = done or bool(rest)
        return (True, _cause(body)) if done else (False, "")


def _is_stream(response: ResponseHead) -> bool:
    return response.content_type.startswith((_LINES, _EVENTS))


def _cause(content: bytes) -> str:
    if _MESSAGE.encode() not in content:
        return ""
    try:
        answer: Any = orjson.loads(content)
    except orjson.JSONDecodeError:
        return ""
    match answer:
        case {"error": {"message": str(message)}} | {"answer": {"error": {"message": str(message)}}} if (
            message.startswith(_MESSAGE)
        ):
            return message
        case _:
            return ""


_MAX_HEAD = 262_144
"""Bytes; an engine's head is trusted more than a client's, but not without bound."""
_SWITCHING, _FINAL = 101, 200


class EngineConnection(asyncio.BufferedProtocol):
    """Protocol of one connection in an engine's pool; serves one exchange at a time."""

    __slots__ = (
        "_between_chunks",
        "_body",
        "_buffer",
        "_pass_on",
        "_payload",
        "_read_buffer",
        "_read_paused",
        "_reusable",
        "_suspect",
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
        self._suspect: Suspect | None = None
        """The answer, while it is not known whether it says that the core is dead; `_buffer` has its body so far."""
        self._payload: list[bytes] | None = None
        self._between_chunks = False
        """The answer is passed on as it comes, and the next byte is the first of a chunk."""
        self._pass_on: Callable[[bytes], object] = _nowhere
        """The client's `transport.write`, while an answer is passed on."""
        self._reusable = False
        self._read_buffer = engine.read_buffer
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

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the loop's signature
        """Where the next bytes go; its size bounds what is kept here of an answer whose client does not read."""
        return self._read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """They are there."""
        data = self._read_buffer[:nbytes].tobytes()
        exchange = self.exchange
        if (
            # A token of a stream: nearly always one whole chunk, which needs no reader.
            self._between_chunks
            and exchange is not None
            and nbytes < WHOLE_CHUNK_LIMIT
            and data.startswith(WHOLE_CHUNK_OPENING[nbytes])
            and data.endswith(b"\r\n")
        ):
            exchange.bytes_out += nbytes
            self._pass_on(data)
        else:
            self.data_received(data)

    def data_received(self, data: bytes) -> None:
        """Bytes have come, and more has to be known of them."""
        exchange = self.exchange
        if exchange is None:
            self.transport.abort()  # nobody asked: the connection cannot be trusted any more
            return
        try:
            if self._body is not None:
                self._read_body(exchange, self._body, data)
            elif self._suspect is not None:
                self._read_suspect(exchange, self._suspect, data)
            else:
                self._read_head(exchange, data)
        except FramingError as error:
            self.drop()
            exchange.broken(f"bad answer: {error}")
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
            exchange.unanswered(self)
        elif isinstance(self._body, CloseReader) and exc is None:
            exchange.answered()
        else:
            exchange.broken(f"the engine closed the connection inside its answer{f': {exc}' if exc else ''}")

    # --- for the exchange --------------------------------------------------------------------------------------------

    def send(self, exchange: Exchange, body: bytes | bytearray | memoryview) -> None:
        """Start an exchange with its head, written for this engine, and what has come of its body."""
        self.exchange = exchange
        self.transport.write(b"".join((exchange.request.to_engine(self.engine.fields), body)))

    def set_reading(self, *, reading: bool) -> None:
        """Read the answer, or leave it with the engine while the client is slow."""
        if reading == self._read_paused and not self.transport.is_closing():
            self._read_paused = not reading
            (self.transport.resume_reading if reading else self.transport.pause_reading)()

    def drop(self) -> None:
        """Close at once, whatever is under way: the engine sees the disconnect and aborts the request."""
        self.exchange = None
        self.transport.abort()

    def cut(self) -> None:
        """The engine is given up: what is under way ends here as if it had broken the connection itself."""
        self.transport.abort()
        self.connection_lost(ConnectionAbortedError("the fleet has given it up"))

    # --- the answer --------------------------------------------------------------------------------------------------

    def _read_head(self, exchange: Exchange, data: bytes) -> None:
        if not self._buffer:
            exchange.first_byte(time.monotonic())
        else:
            data = self._buffer + data
            self._buffer = b""
        start = 0
        while True:
            end = data.find(b"\r\n\r\n", start) + 4
            if end < 4:  # noqa: PLR2004 - not found
                if len(data) > _MAX_HEAD:
                    what = f"the engine's head is longer than {_MAX_HEAD} bytes"
                    raise RefusalError(502, "bad_engine_response", what)
                self._buffer = data[start:]
                return
            response = parse_response(data[start:end], exchange.request.method)
            if response.status >= _FINAL:
                break
            self._interim(exchange, response)
            start = end
        if is_suspect(response):
            self._suspect = Suspect(response)
            self._read_suspect(exchange, self._suspect, data[end:])
        else:
            self._begin_answer(exchange, response, data, end)

    def _read_suspect(self, exchange: Exchange, suspect: Suspect, data: bytes) -> None:
        self._buffer += data
        known, cause = suspect.judge(data)
        if not known:
            return
        body, self._buffer, self._suspect = self._buffer, b"", None
        if cause:
            self.drop()
            exchange.engine_died(self.engine, cause)
        else:
            self._begin_answer(exchange, suspect.response, body, 0)

    def _interim(self, exchange: Exchange, response: ResponseHead) -> None:
        """An informational answer, before the real one."""
        if response.status == _SWITCHING:
            raise RefusalError(502, "bad_engine_response", "the engine switched protocols, which nobody asked for")
        exchange.interim(response)

    def _begin_answer(self, exchange: Exchange, response: ResponseHead, data: bytes, end: int) -> None:
        """`data` holds the answer's head, up to `end`, and what has come of its body."""
        self._reusable = response.keep_alive
        length = response.length
        if length == len(data) - end:  # all of it is here
            exchange.bytes_out += length
            exchange.client.transport.write(exchange.respond(response) + data[end:])
            self._finish(exchange)
            return
        self._payload = [] if length == CHUNKED and not exchange.request.http_1_1 else None
        if length >= 0:
            body = LengthReader(length)
        else:
            body = ChunkedReader(self._payload) if length == CHUNKED else CloseReader()
        self._body = body
        self._follow(body, data, end)
        piece = data[end:]
        if self._payload is not None:
            piece = b"".join(self._payload)
            self._payload.clear()
        exchange.bytes_out += len(piece)
        self._pass_on = exchange.client.transport.write
        self._pass_on(exchange.respond(response) + piece)
        if body.done:
            self._finish(exchange)

    def _read_body(self, exchange: Exchange, body: BodyReader, data: bytes) -> None:
        self._follow(body, data, 0)
        if self._payload is not None:
            data = b"".join(self._payload)
            self._payload.clear()
        exchange.bytes_out += len(data)
        self._pass_on(data)
        if body.done:
            self._finish(exchange)

    def _follow(self, body: BodyReader, data: bytes, start: int) -> None:
        if body.feed(data, start) < len(data):
            # Bytes after the answer: it is not the answer to this request, or the next one's would not be.
            raise FramingError("the engine sent more than its answer")
        self._between_chunks = body.between_chunks and self._payload is None and not body.done

    def _finish(self, exchange: Exchange) -> None:
        """The answer is complete: the connection is free for the next one."""
        self.exchange = None
        self._body = None
        self._between_chunks = False
        self._pass_on = _nowhere
        self.reused = True
        self.engine.release(self, reusable=self._reusable and exchange.body_done)
        exchange.answered()


def _nowhere(data: bytes) -> None:
    """Nobody is passed anything."""
