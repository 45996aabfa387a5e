"""One call to the router's own endpoints: its body is collected, its answer is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from penstock.errors import PenstockError
from penstock.router.admin_calls import Answer, execute
from penstock.router.head import RequestHead
from penstock.router.refusal import RefusalError, response

if TYPE_CHECKING:
    from penstock.router.client_connection import ClientConnection
    from penstock.router.dispatcher import Dispatcher

_MAX_BODY = 4 << 20


class AdminCall:
    """One admin request."""

    def __init__(self, client: ClientConnection, request: RequestHead, dispatcher: Dispatcher) -> None:
        self._client = client
        self._request = request
        self._dispatcher = dispatcher
        self._body = bytearray()
        self._done = False
        self._started = False
        self._waiting: asyncio.Task[None] | None = None

    def add_body(self, piece: bytes | memoryview, *, done: bool) -> None:
        """See `Call`."""
        self._body += piece
        self._done = done
        if len(self._body) > _MAX_BODY:
            raise RefusalError(413, "body_too_large", f"an admin body is at most {_MAX_BODY} bytes")
        if done and self._started:
            self._execute()

    def begin(self, piece: bytes | memoryview, *, done: bool) -> None:
        """See `Call`."""
        self.add_body(piece, done=done)
        self._started = True
        if self._request.length < 0:
            raise RefusalError(411, "length_required", "send an admin body with Content-Length")
        if self._done:
            self._execute()

    def refuse(self, refusal: RefusalError) -> None:
        """See `Call`."""
        self._dispatcher.metrics.rejected[refusal.code] += 1
        self._client.answer_refusal(refusal)

    def cancel(self) -> None:
        """The client has gone; what it asked for is done all the same."""

    def pause(self, *, paused: bool) -> None:
        """Answers are small."""

    def _execute(self) -> None:
        method = "GET" if self._request.method == b"HEAD" else self._request.method.decode()
        path = self._request.target.partition(b"?")[0].decode()
        port = self._dispatcher.shared_port
        body = bytes(self._body)
        try:
            if port is None or not port.answers(self._client.transport):
                self._answer(execute(self._dispatcher, method, path, body))
            else:
                answer = port.call(self._dispatcher, method, path, body)
                self._waiting = asyncio.get_running_loop().create_task(self._wait(answer))
        except RefusalError as refusal:
            self.refuse(refusal)

    async def _wait(self, answer: Awaitable[Answer]) -> None:
        try:
            self._answer(await answer)
        except PenstockError as error:
            if not self._client.transport.is_closing():
                # Any other error than a refusal says that another process is gone, or too slow.
                self.refuse(
                    error if isinstance(error, RefusalError) else RefusalError(503, "no_worker", f"{error}; retry")
                )

    def _answer(self, answer: Answer) -> None:
        if self._client.transport.is_closing():
            return
        content, content_type = answer
        close = not self._request.keep_alive
        head_only = self._request.method == b"HEAD"
        self._client.answer(
            response(200, content, content_type=content_type, close=close, head_only=head_only), close=close
        )
