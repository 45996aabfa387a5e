"""One client connection: it serves one request at a time, in order, each step with a deadline."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import cast

from penstock.router.answer import BodyReader, FramingError, body_reader
from penstock.router.http import CHUNKED, RefusalError, RequestHead, parse_request
from penstock.router_settings import RouterConfig

IDLE_S = 75.0
"""Seconds without a request after which a kept-alive connection is closed."""
WRITE_STALL_S = 300.0
"""Seconds without progress after which the router gives up a client that does not read its answer."""
LINGER_S = 2.0
"""Seconds for which the rest of a refused request is read and dropped, so that the client can read the answer."""
_LONG = 16_384
"""Bytes above which a view costs less than a copy."""
_NEVER = float("inf")
_SWEEP_S = 0.25
"""Seconds between two checks of all deadlines. A timer for each request would cost more than parsing its head."""
_COMPLETE = BodyReader(0)
_BARE_LF = re.compile(rb"(?<!\r)\n")
_CR = 13
HEALTH = b"/router/health"
"""The path that needs no key."""


class Call:
    """The service of one request: an `Exchange`, or a call to the router itself."""

    def begin(self, piece: bytes | memoryview, *, done: bool) -> None:
        """Start with the part of the body that came with the head; `done`: all of it."""
        self.add_body(piece, done=done)

    def add_body(self, piece: bytes | memoryview, *, done: bool) -> None:
        """Take a further piece of the request's body, without its framing."""
        raise NotImplementedError

    def refuse(self, refusal: RefusalError) -> None:
        """Refuse the request: the rest of it is not acceptable, or too late."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Stop the call: the client has gone."""

    def pause(self, *, paused: bool) -> None:
        """Pause the answer while the client reads too slowly, or continue it."""


class Clients:
    """Every client connection of one router, and the state that they share.

    `open_call` returns the call that serves a request. It raises RefusalError where the key is missing or no call
    serves the path. Above `most` open connections, a new connection may close the oldest stranger.
    """

    def __init__(
        self,
        config: RouterConfig,
        rejected: Counter[str],
        open_call: Callable[[ClientConnection, RequestHead], Call],
        most: int,
    ) -> None:
        self.config = config
        self.rejected = rejected
        """Calls that never became a request, by code."""
        self.open_call = open_call
        self.most = most
        self.connected: set[ClientConnection] = set()
        self.strangers: dict[ClientConnection, None] = {}
        """Connections that have not yet sent a head with the key, the oldest first."""
        self._sweeping = False

    def add(self, client: ClientConnection) -> None:
        """Add a connection; if descriptors run short, close the oldest of many strangers."""
        self.connected.add(client)
        self.strangers[client] = None
        if not self._sweeping:
            self._sweep()
        if len(self.connected) > self.most and len(self.strangers) > self.most // 2:
            oldest = next(iter(self.strangers))
            self.discard(oldest)
            oldest.transport.abort()

    def discard(self, client: ClientConnection) -> None:
        self.connected.discard(client)
        self.strangers.pop(client, None)

    def _sweep(self) -> None:
        """Run each action whose deadline has passed, periodically while there are connections."""
        now = time.monotonic()
        for client in [client for client in self.connected if client.deadline <= now]:
            client.expire()
        self._sweeping = bool(self.connected)
        if self._sweeping:
            asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)


class ClientConnection(asyncio.Protocol):
    """Protocol of one accepted connection."""

    def __init__(self, clients: Clients) -> None:
        self.transport: asyncio.Transport
        self.write_paused = False
        self.deadline = _NEVER
        """`time.monotonic()` at which `expire` is due."""
        self._ready = True
        """Whether the next byte is the first of a request."""
        self._head: bytes = b""
        """An incomplete head."""
        self._request: RequestHead | None = None
        self._body: BodyReader | None = None
        self._payload: list[bytes] | None = None
        """Payload of a chunked body that the call has not received yet."""
        self._call: Call | None = None
        self._lingering = False
        self._stranger = True
        """Whether it has not yet sent a head with the key."""
        self._clients = clients
        self._on_deadline: Callable[[], None] = self._cut_off

    # --- callbacks of the event loop ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._arm(IDLE_S, self._close)
        self._clients.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            if self._ready:
                end = data.find(b"\r\n\r\n") + 4
                if 4 <= end <= self._clients.config.max_header_bytes and data[0] > _CR:  # noqa: PLR2004 - found
                    self._begin(parse_request(data[:end]), data, end)
                else:
                    self._read_head(data)
            else:
                self._read_more(data)
        except RefusalError as refusal:
            if self._call is not None:
                self._call.refuse(refusal)
            else:
                self._clients.rejected[refusal.code] += 1
                self.answer_refusal(refusal)

    def _read_more(self, data: bytes) -> None:
        if self._lingering:
            return
        if self._call is None and not self.write_paused:
            self._read_head(data)
        elif self._call is None or self._body is None or self._body.done:
            raise self._sent_ahead()
        else:
            piece, done = self._follow(self._body, data, 0), self._body.done
            if done:
                self.deadline = _NEVER
            if piece or done:
                self._call.add_body(piece, done=done)

    def eof_received(self) -> None:
        # A client that shuts down its sending side looks like one that went away, which is the usual case.
        if self._call is not None:
            self._cut_off()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the loop's signature
        self._clients.discard(self)
        self.deadline = _NEVER
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    def pause_writing(self) -> None:
        """Stop reading and begin no request: the client does not take what is buffered."""
        self.write_paused = True
        self._ready = False
        if not self.transport.is_closing():
            self.transport.pause_reading()
        self._arm(WRITE_STALL_S, self._cut_off)
        if self._call is not None:
            self._call.pause(paused=True)

    def resume_writing(self) -> None:
        self.write_paused = False
        if not self.transport.is_closing():
            self.transport.resume_reading()
        if self._call is None:
            self._arm(IDLE_S, self._close)
            return
        self.deadline = _NEVER
        if self._body is not None and not self._body.done:
            self._arm(self._clients.config.body_timeout_s, self._slow_body)
        self._call.pause(paused=False)

    # --- for the call ------------------------------------------------------------------------------------------------

    def answer(self, data: bytes, *, close: bool = False) -> None:
        self.transport.write(data)
        self.exchange_over(close=close)

    def answer_refusal(self, refusal: RefusalError) -> None:
        """Send an error. The connection stays open if the whole request has been read."""
        request = self._request
        close = request is None or self._body is None or not self._body.done or not request.keep_alive
        head_only = request is not None and request.method == b"HEAD"
        self.answer(refusal.response(close=close, head_only=head_only), close=close)

    def exchange_over(self, *, close: bool) -> None:
        """Finish a complete answer: wait for the next request, or close."""
        unread = self._body is None or not self._body.done
        self._call = self._request = self._body = self._payload = None
        self._ready = not (close or self.write_paused)
        if self.transport.is_closing():
            return
        if not close:
            if self.write_paused:
                self._arm(WRITE_STALL_S, self._cut_off)
            else:
                self._arm(IDLE_S, self._close)
        elif unread:
            self._lingering = True
            self._arm(LINGER_S, self._cut_off)
            if self.transport.can_write_eof():
                self.transport.write_eof()
        else:
            self._close()

    def cut(self) -> None:
        """End the connection inside an answer; bytes already written still go out."""
        self._call = None
        self._close()

    # --- deadlines ---------------------------------------------------------------------------------------------------

    def expire(self) -> None:
        self.deadline = _NEVER
        self._on_deadline()

    def _arm(self, seconds: float, action: Callable[[], None]) -> None:
        self.deadline = time.monotonic() + seconds
        self._on_deadline = action

    def _close(self) -> None:
        self._arm(WRITE_STALL_S, self._cut_off)
        self.transport.close()

    def _cut_off(self) -> None:
        self.transport.abort()

    def _slow_head(self) -> None:
        limit = self._clients.config.header_timeout_s
        self._clients.rejected["slow_headers"] += 1
        self.answer_refusal(RefusalError(408, "slow_headers", f"the request's head took more than {limit:g} s"))

    def _slow_body(self) -> None:
        limit = self._clients.config.body_timeout_s
        if self._call is not None:
            self._call.refuse(RefusalError(408, "slow_body", f"the request's body took more than {limit:g} s"))

    # --- the request -------------------------------------------------------------------------------------------------

    def _read_head(self, data: bytes) -> None:
        if self._head:
            data = self._head + data
        elif data[:1] in b"\r\n":
            data = data.lstrip(b"\r\n")  # RFC 9112, 2.2: empty lines before a request line
        end = data.find(b"\r\n\r\n", max(0, len(self._head) - 3)) + 4
        complete = end >= 4  # noqa: PLR2004 - find answers -1
        limit = self._clients.config.max_header_bytes
        if (end if complete else len(data)) > limit:
            raise RefusalError(431, "headers_too_large", f"the request's head is longer than {limit} bytes")
        if complete:
            self._head = b""
            self._begin(parse_request(data[:end]), data, end)
            return
        if _BARE_LF.search(data):
            raise RefusalError(400, "bad_request", "malformed head: a line ends without CR")
        if data and not self._head:
            self._arm(self._clients.config.header_timeout_s, self._slow_head)
        self._head = data
        self._ready = not data

    def _begin(self, request: RequestHead, data: bytes, start: int) -> None:
        self._ready = False
        self.deadline = _NEVER
        self._request = request
        if request.length == len(data) - start:  # the usual case: the whole body is here, and nothing else
            self._body = _COMPLETE
            self._open_call(request).begin(data[start:] if len(data) < _LONG else memoryview(data)[start:], done=True)
            return
        self._payload = [] if request.length == CHUNKED else None
        body = self._body = body_reader(request.length, self._payload)
        piece = self._follow(body, data, start)
        call = self._open_call(request)
        if not body.done:
            self._arm(self._clients.config.body_timeout_s, self._slow_body)
            if request.expect:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        call.begin(piece, done=body.done)

    def _open_call(self, request: RequestHead) -> Call:
        clients = self._clients
        call = clients.open_call(self, request)
        if request.length > clients.config.max_body_bytes:
            what = f"a body of {request.length} bytes is over the limit of {clients.config.max_body_bytes}"
            raise RefusalError(413, "body_too_large", what)
        if self._stranger and not request.target.startswith(HEALTH):  # it had the key, or the path needs none
            self._stranger = False
            clients.strangers.pop(self, None)
        self._call = call
        return call

    def _follow(self, body: BodyReader, data: bytes, start: int) -> bytes | memoryview:
        """Return the part of `data` that belongs to this request's body."""
        try:
            end = body.feed(data, start)
        except FramingError as error:
            raise RefusalError(400, "bad_body", f"malformed chunked body: {error}") from None
        limit = self._clients.config.max_body_bytes
        if body.size > limit:
            raise RefusalError(413, "body_too_large", f"the body is over the limit of {limit} bytes")
        if end < len(data):
            raise self._sent_ahead()
        if self._payload is None:
            return memoryview(data)[start:end]
        payload = b"".join(self._payload)
        self._payload.clear()
        return payload

    def _sent_ahead(self) -> RefusalError:
        self._body = None  # the connection ends with the refusal
        what = "a request came before the answer to the one before it; wait for that, or use another connection"
        return RefusalError(400, "sent_ahead", what)
