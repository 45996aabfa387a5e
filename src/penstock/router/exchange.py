"""One request and its answer: held, placed, sent, retried before the first byte, passed back, accounted for.

The dispatcher names an engine; the exchange connects to it and sends. It is driven by its client's connection on one
side and a backend's on the other.
"""

from __future__ import annotations

import logging
import re
import time

import orjson

from penstock.router.answer import Answer
from penstock.router.backend import OWN_SHORTAGES, Backend, BackendConnection, ConnectionUser, Waiting
from penstock.router.client_connection import ClientConnection
from penstock.router.dispatcher import Dispatcher
from penstock.router.gate import Lane, Waiter
from penstock.router.head import CHUNKED, UNTIL_CLOSE, RequestHead, ResponseHead
from penstock.router.http import WHOLE_CHUNK_LIMIT, WHOLE_CHUNK_OPENING, FramingError, RefusalError, shown

REPLAY_LIMIT = 1 << 20
"""Bytes of request body kept for a retry. A request is placed once its body or so much of it has come: a client that
stalls holds neither an engine's connection nor a share of its KV cache. While it is held, no more is read of it."""
_CONTINUE = 100
"""A status that is the router's own to send."""
_INTERIM_LIMIT = 1 << 16
"""Bytes of informational answers that a request may get; its client may not read them, and more may follow."""
_TRACE_ID = re.compile(rb"[0-9A-Fa-f]{2}-([0-9A-Fa-f]{32})-")
"""W3C Trace Context, section 3.2: version, trace id, parent id, flags."""
_access = logging.getLogger("penstock.router.access")


class Exchange(Waiter, ConnectionUser):
    """The life of one request."""

    def __init__(self, client: ClientConnection, request: RequestHead, dispatcher: Dispatcher) -> None:
        self.request = request
        self.backend: Backend | None = None
        """Where it is placed."""
        self.tried: list[Backend] = []
        """Engines that took the request, and then closed the connection without an answer or were dead."""
        self.gone = False
        """Nothing more is to be done: answered, broken, refused, or the client went away."""
        self.bytes_in = self.bytes_out = 0
        self.hold_seconds = self.gate_seconds = 0.0
        self.status = 0
        self.outcome = ""
        """Empty: answered by an engine; `cancelled`: its client went away; `broken: ...`: an engine did not complete
        its answer; any other: the code of the error that the router answered."""
        self.started_at = time.monotonic()
        self.first_byte_at = 0.0
        """When an engine's answer began, by `time.monotonic()`; 0: it did not."""
        self._client = client
        self._dispatcher = dispatcher
        self._connection: BackendConnection | None = None
        self._answer: Answer
        self._body_done = False
        """The whole request has come in, and been sent where a connection is attached."""
        self._replay: bytes | bytearray | memoryview | None = b""
        self._buffered = self._incoming = 0
        """Bytes kept of it, and those that the gate counts while they are still coming in."""
        self._interim_bytes = 0
        self._submitted = False
        """Enough of its body has come, and the gate got it."""
        self._spared: Backend | None = None
        """One of `tried` that may only have closed an idle connection: it gets the request again if no other can."""
        self._head_sent = False
        """The client has the head of the engine's answer."""
        self._announced_close = self._by_close = False
        """The connection of the client ends with the answer; the second: its end is the answer's only end."""

    # --- from the client ---------------------------------------------------------------------------------------------

    def begin(self, piece: bytes | memoryview, *, done: bool) -> None:
        """See `Call`: find an engine."""
        self._body_done = done
        self.bytes_in = len(piece)
        self._replay = piece
        self._buffered = len(self.request.fields) + len(piece)
        self._dispatcher.metrics.requests += 1
        if done or self._buffered > REPLAY_LIMIT:
            self._submit()
        else:
            self._replay = bytearray(piece)
            self._count_incoming(self._buffered)

    def add_body(self, piece: bytes | memoryview, *, done: bool) -> None:
        """See `Call`."""
        self._body_done = done
        self.bytes_in += len(piece)
        connection = self._connection
        if connection is not None:
            connection.transport.write(piece)
        if self._replay is not None:
            if not isinstance(self._replay, bytearray):
                self._replay = bytearray(self._replay)
            self._replay += piece
            self._buffered += len(piece)
            if self._buffered > REPLAY_LIMIT:
                if connection is not None:
                    self._replay = None
                elif not done:
                    self.adjust_reading()
        if not self._submitted:
            if done or self._buffered > REPLAY_LIMIT:
                self._submit()
            else:
                self._count_incoming(len(piece))

    def cancel(self) -> None:
        """See `Call`; so must the engine's work for it."""
        if not self.gone:
            self._dispatcher.gate.discard(self)
            self._end("cancelled")

    def pause(self, *, paused: bool) -> None:
        """See `Call`."""
        if self._connection is not None and self._head_sent:
            self._connection.set_reading(reading=not paused)

    # --- from the gate -----------------------------------------------------------------------------------------------

    def try_place(self) -> Lane | None:
        """See `Waiter`."""
        try:
            found = self._dispatcher.find(self.request, self.tried, self._spared)
        except RefusalError as refusal:
            self.refuse(refusal)
            return None
        if isinstance(found, Lane):
            return found
        self.backend = found
        self._connect(found)
        return None

    def kept_bytes(self) -> int:
        """See `Waiter`."""
        return self._buffered

    def needs(self) -> str:
        """See `Waiter`."""
        version, adapter = self.request.min_weight_version, self.request.adapter
        needs = ([f"weight version {version} or newer"] if version else []) + (
            [f"adapter {shown(adapter)}"] if adapter is not None else []
        )
        return f" with {' and '.join(needs)}" if needs else ""

    def refuse(self, refusal: RefusalError) -> None:
        """Answer it here; where an answer is under way already, break that off."""
        if self.gone:
            return
        self._dispatcher.gate.discard(self)
        if self._head_sent:
            self._break(str(refusal))
            return
        self.status = refusal.status
        self._end(refusal.code)
        self._client.answer_refusal(refusal)

    # --- the way to the engine ---------------------------------------------------------------------------------------

    def _connect(self, backend: Backend) -> None:
        """Send it on a connection of the pool; on a new one where none is idle, or an engine has lost it before."""
        connection = None if self.tried else backend.take()
        if connection is not None:
            self._send(connection)
        else:
            backend.connect(Waiting(self._send, self._not_connected))

    def _send(self, connection: BackendConnection) -> bool:
        """Send everything that has come so far; False: the client has gone meanwhile."""
        if self.gone:
            return False
        self._connection = connection
        self._answer = Answer(self.request)
        connection.user = self
        head = self.request.to_engine(connection.backend.fields)
        connection.transport.write(b"".join((head, self._replay or b"")))
        if self._buffered > REPLAY_LIMIT:
            self._replay = None
            self.adjust_reading()
        return True

    def _not_connected(self, error: OSError | None) -> None:
        """The engine refused, or left the set; nothing was sent, so any engine may have the request."""
        backend = self.backend
        if self.gone or backend is None:
            return
        if error is not None and error.errno in OWN_SHORTAGES:
            why = f"the router cannot open a connection ({error}); raise ulimit -n"
            self.refuse(RefusalError(503, "no_sockets", why))
            return
        self._displace(backend)
        self._dispatcher.backend_refused(backend)
        self._dispatcher.retry(self, self.tried, "refused")

    def adjust_reading(self) -> None:
        """Read from the client only what can be passed on."""
        connection = self._connection
        full = self._buffered > REPLAY_LIMIT if connection is None else connection.write_paused
        self._client.block_body(blocked=full)

    # --- the way back ------------------------------------------------------------------------------------------------

    def received(self, data: bytes) -> None:
        """See `ConnectionUser`."""
        answer = self._answer
        if (
            # A token of a stream: nearly always one whole chunk, which need not be read.
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
            if answer.interim is not None:
                self._pass_interim(answer.interim)
                answer.interim = None
        except FramingError as error:
            self._drop_connection()
            self._break(f"bad answer: {error}")
            return
        except RefusalError as refusal:
            self._drop_connection()
            self.refuse(refusal)
            return
        if answer.response is not None:
            self.bytes_out += len(piece)
            self._client.transport.write(piece if self._head_sent else self._respond(answer.response) + piece)
            if answer.done:
                self._answered()
        elif answer.death:
            self._died(answer.death)

    def _pass_interim(self, interim: list[ResponseHead]) -> None:
        """Pass on informational answers; RefusalError: 502, they are too many."""
        for response in interim:
            head = response.to_client()
            self._interim_bytes += len(head)
            if self._interim_bytes > _INTERIM_LIMIT:
                what = f"the engine sent over {_INTERIM_LIMIT} bytes of informational answers (1xx) and no other"
                raise RefusalError(502, "bad_engine_response", what)
            if self.request.http_1_1 and response.status != _CONTINUE:
                self._client.transport.write(head)

    def _respond(self, response: ResponseHead) -> bytes:
        """Nothing is retried from here on; returns the answer's head as the client gets it."""
        self._head_sent = True
        self._replay = None
        self.status = response.status
        request = self.request
        length = response.length
        self._by_close = length == UNTIL_CLOSE or (length == CHUNKED and not request.http_1_1)
        self._announced_close = self._by_close or not request.keep_alive or not self._body_done
        if self._client.write_paused:
            self.pause(paused=True)
        if self._announced_close:
            return response.to_client(http_1_1=request.http_1_1, connection=b"close")
        return response.to_client() if request.http_1_1 else response.to_client(connection=b"keep-alive")

    def _answered(self) -> None:
        """The answer is complete: the connection is free for the next request, and so is the client's."""
        connection, self._connection = self._connection, None
        response = self._answer.response
        if connection is not None and response is not None:
            connection.user = None
            connection.reused = True
            connection.backend.release(connection, reusable=response.keep_alive and self._body_done)
        self._end("")
        self._client.exchange_over(close=self._announced_close)

    def lost(self, error: Exception | None) -> None:
        """The engine's connection is gone."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._answer.response is None:
            self._unanswered(connection)
        elif self._answer.ends_with_connection and error is None:
            self._answered()
        else:
            self._break(f"the engine closed the connection inside its answer{f': {error}' if error else ''}")

    def _unanswered(self, connection: BackendConnection) -> None:
        """The engine closed the connection before the client had a byte of its answer."""
        # On a connection used before, it may have closed that one as idle before our bytes arrived, or died of them.
        stale = connection.reused and not self.first_byte_at
        if stale:
            self._spared = connection.backend
        self._lose(connection.backend, "stale" if stale else "hung_up", "closed the connection unanswered")

    def _died(self, cause: str) -> None:
        """The engine's answer says that its core is dead."""
        self._drop_connection()
        backend = self.backend
        if backend is not None:
            self._dispatcher.backend_died(backend, cause)
            self._lose(backend, "dead", f"is dead: {cause}")

    def _lose(self, backend: Backend, reason: str, what: str) -> None:
        """The engine broke on this request, or with it: another one gets it, if it can be sent again."""
        again = self._replay is not None
        self._displace(backend)
        self.tried.append(backend)
        self.first_byte_at = 0.0
        if again:
            self._dispatcher.retry(self, self.tried, reason)
        else:
            why = f"{what}, and the request is over {REPLAY_LIMIT} bytes to replay"
            self.refuse(RefusalError(502, "engine_failed", f"engine {backend.name} {why}"))

    def _break(self, reason: str) -> None:
        """The answer cannot be completed: the client must see that, so its connection ends here."""
        if not self._head_sent:
            self.refuse(RefusalError(502, "engine_failed", reason))
            return
        self._end(f"broken: {reason}")
        self._client.cut(reset=self._by_close)

    # --- its end -----------------------------------------------------------------------------------------------------

    def _count_incoming(self, size: int) -> None:
        self._dispatcher.gate.keep(size)
        self._incoming += size

    def _release(self) -> None:
        self._dispatcher.gate.release(self._incoming)
        self._incoming = 0

    def _submit(self) -> None:
        self._submitted = True
        if self._incoming:
            self._release()
        self._dispatcher.gate.submit(self)

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.drop()

    def _displace(self, backend: Backend) -> None:
        """It is not with its engine any longer, and may go to another."""
        self._connection = self.backend = None
        self._dispatcher.left(self.request, backend, time.monotonic(), ok=False)

    def _end(self, outcome: str) -> None:
        now = time.monotonic()
        self.gone = True
        self.outcome = outcome
        if self._connection is not None:
            self._drop_connection()
        dispatcher = self._dispatcher
        if self.backend is not None:
            dispatcher.left(self.request, self.backend, now, ok=not outcome)
        self._replay = None
        if self._incoming:
            self._release()
        self._record(now)
        if dispatcher.access_log:
            _access.info(self._access_line(now))

    def _record(self, now: float) -> None:
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

    def _access_line(self, now: float) -> str:
        request = self.request
        trace = _TRACE_ID.match(request.traceparent)
        line = {
            "method": request.method.decode("latin-1"),
            "target": request.target.decode("latin-1"),
            "status": self.status,
            "engine": None if self.backend is None else self.backend.name,
            "session": request.session_id,
            "group": request.group_id,
            "trace": None if trace is None else trace[1].decode().lower(),
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "seconds": round(now - self.started_at, 6),
            "hold_seconds": round(self.hold_seconds, 6),
            "gate_seconds": round(self.gate_seconds, 6),
            "tried": [backend.name for backend in self.tried],
            "outcome": self.outcome or "ok",
        }
        return orjson.dumps(line).decode()
