"""One request and its answer: held, placed, sent, retried before the first byte, passed back, accounted for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.router.head import CHUNKED, UNTIL_CLOSE, RequestHead, ResponseHead
from penstock.router.http import RefusalError, shown

if TYPE_CHECKING:
    from penstock.router.backend import Engine
    from penstock.router.backend_connection import EngineConnection
    from penstock.router.client_connection import ClientConnection
    from penstock.router.dispatcher import Dispatcher
    from penstock.router.gate import Lane

REPLAY_LIMIT = 1 << 20
"""Bytes of request body kept for a retry. A request is placed once its body or so much of it has come: a client that
stalls holds neither an engine's connection nor a share of its KV cache. While it is held, no more is read of it."""
_CONTINUE = 100
"""A status that is the router's own to send."""
_INTERIM_LIMIT = 1 << 16
"""Bytes of informational answers that a request may get; its client may not read them, and more may follow."""


class Exchange:
    """The life of one request, driven by its client's connection on one side and an engine's on the other."""

    __slots__ = (
        "_announced_close",
        "_buffered",
        "_by_close",
        "_connection",
        "_head_sent",
        "_interim_bytes",
        "_kept",
        "_replay",
        "_stale",
        "_submitted",
        "_waiting",
        "body_done",
        "bytes_in",
        "bytes_out",
        "client",
        "dispatcher",
        "engine",
        "first_byte_at",
        "gate_seconds",
        "gone",
        "hold_seconds",
        "outcome",
        "patience_used",
        "request",
        "started_at",
        "status",
        "tried",
    )

    def __init__(self, client: ClientConnection, request: RequestHead, dispatcher: Dispatcher) -> None:
        self.client = client
        self.request = request
        self.dispatcher = dispatcher
        self.body_done = False
        """The whole request has come in, and been sent where a connection is attached."""
        self.gone = False
        """Nothing more is to be done: answered, broken, refused, or the client went away."""
        self.engine: Engine | None = None
        self.tried: list[Engine] = []
        """Engines that took the request and closed the connection without an answer."""
        self.hold_seconds = 0.0
        self.gate_seconds = 0.0
        self.patience_used = 0.0
        self.bytes_in = 0
        self.bytes_out = 0
        self.status = 0
        self.outcome = ""
        self.started_at = time.monotonic()
        self.first_byte_at = 0.0
        """A byte of an engine's answer has come, at this time."""
        self._connection: EngineConnection | None = None
        self._replay: bytes | bytearray | memoryview | None = b""
        self._buffered = 0
        self._kept = 0
        """Bytes that the gate counts while they are still coming in."""
        self._interim_bytes = 0
        self._submitted = False
        """Enough of its body has come, and the gate got it."""
        self._waiting = False
        """The gate may have it."""
        self._stale = False
        """It met a stale connection and had its second go at the same engine."""
        self._head_sent = False
        """The client has the head of the engine's answer."""
        self._announced_close = False
        self._by_close = False
        """For this client the answer's end is the end of its connection."""

    # --- from the client ---------------------------------------------------------------------------------------------

    def begin(self, piece: bytes | memoryview, *, done: bool) -> None:
        """See `Call`: find an engine."""
        self.body_done = done
        self.bytes_in = len(piece)
        self._replay = piece
        self._buffered = len(self.request.fields) + len(piece)
        self.dispatcher.metrics.requests += 1
        if done or self._buffered > REPLAY_LIMIT:
            self._submit()
        else:
            self._replay = bytearray(piece)
            self._keep(self._buffered)

    def add_body(self, piece: bytes | memoryview, *, done: bool) -> None:
        """See `Call`."""
        self.body_done = done
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
                self._keep(len(piece))

    def cancel(self) -> None:
        """The client has gone; so must the engine's work for it."""
        if not self.gone:
            self._leave_gate()
            self._end("cancelled")

    def pause(self, *, paused: bool) -> None:
        """The client's side is full, or has room again."""
        if self._connection is not None and self._head_sent:
            self._connection.set_reading(reading=not paused)

    # --- from the gate and the dispatcher ----------------------------------------------------------------------------

    def try_place(self) -> Lane | None:
        """Send it to an engine, or say what it has to wait for."""
        return self.dispatcher.try_place(self)

    def held(self) -> int:
        """It waits from now on; no more bytes of it are kept than the answer says."""
        self._waiting = True
        return self._buffered

    def needs(self) -> str:
        """What its headers ask of an engine, for the message that there was none."""
        version, adapter = self.request.min_weight_version, self.request.adapter
        needs = ([f"weight version {version} or newer"] if version else []) + (
            [f"adapter {shown(adapter)}"] if adapter is not None else []
        )
        return f" with {' and '.join(needs)}" if needs else ""

    def refuse(self, refusal: RefusalError) -> None:
        """Answer it here; where an answer is under way already, break that off."""
        if self.gone:
            return
        self._leave_gate()
        if self._head_sent:
            self.broken(str(refusal))
            return
        self.status = refusal.status
        self._end(refusal.code)
        self.client.answer_refusal(refusal)

    def place(self, engine: Engine) -> None:
        """An engine is chosen, and the request is accounted for there."""
        self._waiting = False
        self.engine = engine
        engine.connect(self)

    # --- from the engine's pool --------------------------------------------------------------------------------------

    def connected(self, connection: EngineConnection) -> None:
        """Send everything that has come so far."""
        self._connection = connection
        connection.send(self, self._replay or b"")
        if self._buffered > REPLAY_LIMIT:
            self._replay = None
            self.adjust_reading()

    def not_connected(self, engine: Engine) -> None:
        """The engine refused, or left the set; nothing was sent, so any engine may have the request."""
        self._displace()
        self.dispatcher.engine_refused(engine)
        self.dispatcher.replace(self, "refused")

    # --- from the engine's connection --------------------------------------------------------------------------------

    def adjust_reading(self) -> None:
        """Read from the client only what can be passed on."""
        connection = self._connection
        full = self._buffered > REPLAY_LIMIT if connection is None else connection.write_paused
        self.client.block_body(blocked=full)

    def first_byte(self, now: float) -> None:
        """An answer begins; `now` is `time.monotonic()`."""
        if not self.first_byte_at:
            self.first_byte_at = now

    def interim(self, response: ResponseHead) -> None:
        """An informational answer (1xx) before the real one; RefusalError: 502, they are too many."""
        head = response.to_client()
        self._interim_bytes += len(head)
        if self._interim_bytes > _INTERIM_LIMIT:
            what = f"the engine sent over {_INTERIM_LIMIT} bytes of informational answers (1xx) and no other"
            raise RefusalError(502, "bad_engine_response", what)
        if self.request.http_1_1 and response.status != _CONTINUE:
            self.client.transport.write(head)

    def respond(self, response: ResponseHead) -> bytes:
        """The answer is to be passed on, so nothing is retried from here on; returns its head as the client gets it."""
        self._head_sent = True
        self._replay = None
        self.status = response.status
        request = self.request
        length = response.length
        self._by_close = length == UNTIL_CLOSE or (length == CHUNKED and not request.http_1_1)
        self._announced_close = self._by_close or not request.keep_alive or not self.body_done
        if self.client.write_paused:
            self.pause(paused=True)
        if self._announced_close:
            return response.to_client(http_1_1=request.http_1_1, connection=b"close")
        return response.to_client() if request.http_1_1 else response.to_client(connection=b"keep-alive")

    def answered(self) -> None:
        """The answer is complete."""
        self._connection = None
        self._end("")
        self.client.exchange_over(close=self._announced_close)

    def failed(self, refusal: RefusalError) -> None:
        """The engine's answer is no HTTP; its connection is closed already."""
        self._connection = None
        self.refuse(refusal)

    def broken(self, reason: str) -> None:
        """The answer cannot be completed: the client must see that, so its connection ends here."""
        if not self._head_sent:
            self.failed(RefusalError(502, "engine_failed", reason))
            return
        self._end(f"broken: {reason}")
        self.client.cut(reset=self._by_close)

    def unanswered(self, connection: EngineConnection) -> None:
        """The engine closed the connection before the client had a byte of its answer."""
        engine = connection.engine
        if self._replay is None or self._stale or self.first_byte_at or not connection.reused or engine.removed:
            self._lose(engine, "hung_up", "closed the connection unanswered")
        else:  # most likely it had closed the idle connection before our bytes arrived
            self._connection = None
            self._stale = True
            self.dispatcher.metrics.retries["stale"] += 1
            engine.connect(self, fresh=True)

    def engine_died(self, engine: Engine, cause: str) -> None:
        """The engine's answer says that its core is dead; its connection is closed already."""
        self.dispatcher.engine_died(engine, cause)
        self._lose(engine, "dead", f"is dead: {cause}")

    def _lose(self, engine: Engine, reason: str, what: str) -> None:
        """The engine broke on this request, or with it: another one gets it, if it can be sent again."""
        again = self._replay is not None
        self._displace()
        self.tried.append(engine)
        self.first_byte_at = 0.0
        self._stale = False
        if again:
            self.dispatcher.replace(self, reason)
        else:
            why = f"{what}, and the request is over {REPLAY_LIMIT} bytes to replay"
            self.refuse(RefusalError(502, "engine_failed", f"engine {engine.name} {why}"))

    # --- its end -----------------------------------------------------------------------------------------------------

    def _keep(self, size: int) -> None:
        self.dispatcher.gate.keep(size)
        self._kept += size

    def _release(self) -> None:
        if self._kept:
            self.dispatcher.gate.release(self._kept)
            self._kept = 0

    def _submit(self) -> None:
        self._submitted = True
        self._release()
        self.dispatcher.gate.submit(self)

    def _leave_gate(self) -> None:
        if self._waiting:
            self._waiting = False
            self.dispatcher.gate.discard(self)

    def _displace(self) -> None:
        """It is not with its engine any longer, and may go to another."""
        self._connection = None
        if self.engine is not None:
            self.dispatcher.left(self, self.engine, time.monotonic(), ok=False)
            self.engine = None

    def _end(self, outcome: str) -> None:
        now = time.monotonic()
        self.gone = True
        self.outcome = outcome
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.drop()
        if self.engine is not None:
            self.dispatcher.left(self, self.engine, now, ok=not outcome)
        self._replay = None
        self._release()
        self.dispatcher.metrics.record(self, now)
        if self.dispatcher.on_end is not None:
            self.dispatcher.on_end(self)
