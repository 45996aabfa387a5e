"""One request and its answer, from the client's connection to an engine and back.

The dispatcher names an engine; the exchange connects to it and sends. The client's connection and the backend's drive
it. A request is placed once all of it is here. A client that stalls therefore holds neither an engine's connection nor
a share of its KV cache. The router keeps the request until its answer begins, and can send it again until then.
"""

from __future__ import annotations

import time
from typing import cast

from penstock.rooms import plugged_in
from penstock.router.answer import WHOLE_CHUNK_LIMIT, WHOLE_CHUNK_OPENING, Answer, FramingError, ResponseHead
from penstock.router.backend import OWN_SHORTAGES, Backend, BackendConnection, ConnectionUser, added_fields
from penstock.router.client_connection import Call, ClientConnection
from penstock.router.dispatcher import Dispatcher
from penstock.router.gate import Waiter
from penstock.router.http import RefusalError, RequestHead

_LONG = 65_536
"""Bytes from which on a body is sent by itself instead of copied behind its head."""


class Exchange(Call, Waiter, ConnectionUser):
    """The life of one request."""

    backend: Backend | None = None
    """The engine that has the request now."""
    gone = False
    """Whether the request is over: answered, broken, refused, or the client went away."""
    bytes_in = bytes_out = 0
    status = 0
    outcome = ""
    """Empty: an engine answered; `cancelled`: the client went away; `broken: ...`: an engine did not complete its
    answer; any other: the code of the router's own error."""
    first_byte_at = 0.0
    """`time.monotonic()` at which an engine's answer began; 0: none has."""
    _connection: BackendConnection | None = None
    _answer: Answer
    _body: bytes | bytearray | memoryview = b""
    _head_sent = False
    """Whether the client has the head of the engine's answer."""

    def __init__(self, client: ClientConnection, request: RequestHead, dispatcher: Dispatcher) -> None:
        self.request = request
        self.started_at = time.monotonic()
        self._client = client
        self._dispatcher = dispatcher

    # --- from the client ---------------------------------------------------------------------------------------------

    def begin(self, piece: bytes | memoryview, *, done: bool) -> None:
        self.bytes_in = len(piece)
        self.buffered = len(self.request.fields) + len(piece)
        self._dispatcher.metrics.requests += 1
        if done:
            self._body = piece
            self._dispatcher.submit(self)
        else:
            self._body = bytearray(piece)
            self._dispatcher.gate.keep(self, self.buffered)

    def add_body(self, piece: bytes | memoryview, *, done: bool) -> None:
        self.bytes_in += len(piece)
        self.buffered += len(piece)
        body = cast("bytearray", self._body)
        body += piece
        self._dispatcher.gate.keep(self, len(piece))
        if done:
            self._dispatcher.submit(self)

    def cancel(self) -> None:
        if not self.gone:
            self._end("cancelled")

    def pause(self, *, paused: bool) -> None:
        if self._connection is not None and self._head_sent:
            self._connection.set_reading(reading=not paused)

    # --- the way to the engine ---------------------------------------------------------------------------------------

    def placed(self, backend: Backend) -> None:
        """Send on an idle connection; on a new one if none is idle or an engine failed."""
        self.backend = backend
        connection = None if self.lost_on else backend.take()
        if connection is None:
            backend.connect(self)
        else:
            self.connected(connection)

    def connected(self, connection: BackendConnection) -> bool:
        """Send the request; return False if the client has gone."""
        if self.gone:
            return False
        self._connection = connection
        self._answer = Answer(self.request)
        self.nowhere_since = 0.0
        connection.user = self
        entry = connection.backend.entry
        head = self.request.to_engine(len(self._body), added_fields(entry.dp_rank, entry.api_key))
        if len(self._body) < _LONG:
            connection.transport.write(b"".join((head, self._body)))
        else:
            connection.transport.write(head)
            connection.transport.write(self._body)  # uvloop keeps a reference until it is sent
        return True

    def not_connected(self, error: OSError) -> None:
        """Place the request again: it was not sent, so any engine may take it."""
        backend = self.backend
        if self.gone or backend is None:
            return
        if error.errno in OWN_SHORTAGES:
            why = f"the router cannot open a connection ({error}); raise ulimit -n"
            self.refuse(RefusalError(503, "no_sockets", why))
            return
        self._lose(backend, "refused")

    # --- the way back ------------------------------------------------------------------------------------------------

    def received(self, data: bytes) -> None:
        """Pass on a piece of the answer, or handle the failure that it reports."""
        answer = self._answer
        if (
            # A token of a stream is nearly always one whole chunk, which need not be parsed.
            answer.between_chunks
            and len(data) < WHOLE_CHUNK_LIMIT
            and data.startswith(WHOLE_CHUNK_OPENING[len(data)])
            and data.endswith(b"\r\n")
        ):
            self.bytes_out += len(data)
            self._client.transport.write(data)
            return
        if not self.first_byte_at:
            self.first_byte_at = time.monotonic()
        try:
            piece = answer.feed(data)
        except FramingError as error:
            self.refuse(RefusalError(502, "engine_failed", f"bad answer: {error}"))
            return
        except RefusalError as refusal:
            self.refuse(refusal)
            return
        if answer.response is not None:
            self.bytes_out += len(piece)
            self._client.transport.write(piece if self._head_sent else self._respond(answer.response) + piece)
            if answer.done:
                self._answered(answer.response)
        elif answer.death:
            self._died(answer.death)

    def _respond(self, response: ResponseHead) -> bytes:
        """Return the answer's head for the client; from now on, no retry is possible."""
        self._head_sent = True
        self._forget_body()
        self.status = response.status
        if self._client.write_paused:
            self.pause(paused=True)
        return response.to_client(close=not self.request.keep_alive)

    def _answered(self, response: ResponseHead) -> None:
        """Finish a complete answer, and free both connections for the next request."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.user = None
            connection.reused = True
            connection.backend.release(connection, reusable=response.keep_alive)
        self._end("")
        self._client.exchange_over(close=not self.request.keep_alive)

    # --- what goes wrong ---------------------------------------------------------------------------------------------

    def connection_lost(self, error: Exception | None) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._answer.response is None:
            # The engine may have closed a reused connection as idle before our bytes arrived.
            stale = connection.reused and not self.first_byte_at
            self._lose(connection.backend, "stale" if stale else "hung_up")
        else:
            why = f"the engine closed the connection inside its answer{f': {error}' if error else ''}"
            self.refuse(RefusalError(502, "engine_failed", why))

    def _died(self, cause: str) -> None:
        backend = self.backend
        if backend is not None:
            backend.dead_answers += 1
            backend.failure = cause
            self._lose(backend, "dead")

    def _lose(self, backend: Backend, reason: str) -> None:
        """Give the request to another engine after this one failed under it."""
        self._drop_connection()
        self.backend = None
        self.first_byte_at = 0.0
        self._dispatcher.retry(self, backend, reason, time.monotonic())

    def refuse(self, refusal: RefusalError) -> None:
        """Answer with an error, or break off an answer that has begun by closing the client's connection."""
        if self.gone:
            return
        if self._head_sent:
            self._end(f"broken: {refusal}")
            self._client.cut()
        else:
            self.status = refusal.status
            self._end(refusal.code)
            self._client.answer_refusal(refusal)

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.drop()

    def _forget_body(self) -> None:
        self._body = b""
        if self.held_bytes:
            self._dispatcher.gate.release(self)

    # --- its end -----------------------------------------------------------------------------------------------------

    def _end(self, outcome: str) -> None:
        now = time.monotonic()
        self.gone = True
        self.outcome = outcome
        self._drop_connection()
        dispatcher = self._dispatcher
        if self.backend is not None:
            dispatcher.done(self, self.backend, now)
        else:
            dispatcher.gate.discard(self)
        self._forget_body()
        self._count(now)
        if dispatcher.access_log:
            plugged_in("access_log")(self, now)

    def _count(self, now: float) -> None:
        metrics = self._dispatcher.metrics
        metrics.bytes_in += self.bytes_in
        metrics.bytes_out += self.bytes_out
        if self.first_byte_at:
            metrics.first_byte.observe(self.first_byte_at - self.started_at)
        if not self.outcome:
            metrics.answered += 1
            metrics.duration.observe(now - self.started_at)
        elif self.outcome == "cancelled":
            metrics.cancelled += 1
        elif self.outcome.startswith("broken"):
            metrics.broken += 1
        else:
            metrics.errors[self.outcome] += 1
        if self.hold_seconds:
            metrics.hold.observe(self.hold_seconds)
        if self.gate_seconds:
            metrics.gate.observe(self.gate_seconds)
