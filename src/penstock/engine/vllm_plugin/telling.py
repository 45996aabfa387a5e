"""Adds to vLLM's answers which version made which token and, where a client asks, what each sample has so far.

- Without `PROGRESS_HEADER`, in one piece: the header `SPANS_HEADER`. As a stream: a comment before `[DONE]`, and
  before that the ends of choices of which vLLM says nothing.
- With a number in it, for an answer in one piece: lines of JSON, `{"samples": [...]}` whenever a sample has so many
  tokens more, and at last `{"status", "samples", "versions", "answer"}`, vLLM's own answer in it, of the token endpoint
  without the tokens, which the samples of these lines are.
- With `stream`, for a stream: the header `PROGRESS_HEADER`, and a comment with `{"samples": [...]}` before every event
  that has tokens.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from penstock.engine.vllm_plugin.in_flight import InFlight
from penstock.engine.wire import COMMENT, LINES_TYPE, PROGRESS_HEADER, SPANS_HEADER, STREAM_PROGRESS

MAX_HEADER = 8000
"""Clients refuse longer header lines (aiohttp: 8190). A body of hundreds of prompts has none; send them one by one."""
STREAM_REPORTS = (PROGRESS_HEADER.lower().encode(), STREAM_PROGRESS.encode())
"""Header of a stream that has such comments, by which a client knows an engine with our plugin."""
DONE = b"data: [DONE]"
EVENT = b"data: {"
ABORTED = b'"finish_reason":"abort"'
EMPTY: dict[str, dict[str, Any]] = {"/v1/completions": {"text": ""}, "/v1/chat/completions": {"delta": {}}}
"""What a choice of a stream holds that has no text."""
OK = 200


async def serve(app: Any, scope: Any, receive: Any, send: Any, request: InFlight, wanted: bytes | None) -> None:
    """Let `app` answer, and add what `wanted` (the value of `PROGRESS_HEADER`) says."""
    if wanted is not None and wanted.isdigit():
        await _Lines(send, request).serve(app, scope, receive)
    else:
        await app(
            scope, receive, _with_spans(send, request, scope["path"], progress=wanted == STREAM_PROGRESS.encode())
        )


def _with_spans(send: Any, request: InFlight, path: str, *, progress: bool) -> Any:
    streams = False
    aborts = _Aborts(request, path)

    async def send_more(message: dict[str, Any]) -> None:
        nonlocal streams
        if message["type"] == "http.response.start":
            streams = any(
                k.lower() == b"content-type" and v.startswith(b"text/event-stream") for k, v in message["headers"]
            )
            spans = b"" if streams else orjson.dumps(request.spans())
            if streams and progress:
                message = {**message, "headers": [*message["headers"], STREAM_REPORTS]}
            if len(spans) > len(b"[]") and len(spans) < MAX_HEADER:
                message = {**message, "headers": [*message["headers"], (SPANS_HEADER.lower().encode(), spans)]}
        elif streams and (body := message.get("body")):
            aborts.read(body)
            if progress and (news := request.news()):
                body = _comment({"samples": news}) + body
            place = body.rfind(DONE)
            if place >= 0:
                last = aborts.untold() + _comment({"versions": request.spans()})
                body = body[:place] + last + body[place:]
            message = {**message, "body": body}
        await send(message)

    return send_more


def _comment(content: dict[str, Any]) -> bytes:
    return COMMENT + orjson.dumps(content) + b"\n\n"


class _Aborts:
    """Ends that vLLM's streams leave out.

    It sends no event without a token before a choice's first one, so one that is aborted while it waits would end
    without a finish reason, as if it were whole. Needed until vLLM sends those events; 0.26 and 0.32 do not.
    """

    def __init__(self, request: InFlight, path: str) -> None:
        self._request = request
        self._path = path
        self._first = b""
        self._told: set[int] = set()

    def read(self, body: bytes) -> None:
        """Note what a part of the stream says, which is one event of vLLM's."""
        if not body.startswith(EVENT):
            return
        self._first = self._first or body
        if ABORTED in body:
            choices = _event(body).get("choices", ())
            self._told.update(choice["index"] for choice in choices if choice.get("finish_reason") == "abort")

    def untold(self) -> bytes:
        """An event for each choice that was aborted and whose reader does not know."""
        samples = self._request.samples.values() if self._path in EMPTY else ()
        places = sorted({made.place for made in samples if made.finish == "abort"} - self._told)
        first = _event(self._first) if places and self._first else {}
        if "error" in first:
            return b""
        head = {key: first[key] for key in ("id", "object", "created", "model") if key in first}
        end = {**EMPTY[self._path], "logprobs": None, "finish_reason": "abort", "stop_reason": None} if places else {}
        events = ({**head, "choices": [{"index": place, **end}]} for place in places)
        return b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events)


def _event(body: bytes) -> dict[str, Any]:
    return orjson.loads(body[len(b"data: ") :].partition(b"\n\n")[0])


class _Lines:
    """An answer in one piece as lines of JSON."""

    def __init__(self, send: Any, request: InFlight) -> None:
        self._send = send
        self._request = request
        self._begun = self._over = False
        self._start: dict[str, Any] = {}
        self._answer = bytearray()

    async def serve(self, app: Any, scope: Any, receive: Any) -> None:
        teller = asyncio.create_task(self._tell(), name="penstock-telling")
        try:
            await app(scope, receive, self._keep)
        finally:
            self._over = True
            self._request.moved.set()
            await asyncio.wait((teller,))
        status = self._start["status"]
        if status == OK or self._begun:
            told = orjson.dumps({"status": status, "samples": self._request.news(), "versions": self._request.spans()})
            await self._line(told[:-1] + b',"answer":' + self._json() + b"}\n", last=True)
        else:
            await self._send(self._start)
            await self._send({"type": "http.response.body", "body": bytes(self._answer)})

    async def _tell(self) -> None:
        while True:
            await self._request.moved.wait()
            if self._over:
                return
            self._request.moved.clear()
            await self._line(orjson.dumps({"samples": self._request.news()}) + b"\n")

    def _json(self) -> bytes:
        """The answer as it is: vLLM's JSON is one line. What is none, such as a proxy's error page, as a string."""
        types = [value for name, value in self._start["headers"] if name.lower() == b"content-type"]
        is_json = types and types[0].startswith(b"application/json")
        return bytes(self._answer) if is_json else orjson.dumps(self._answer.decode(errors="replace"))

    async def _keep(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._start = message
        else:
            self._answer += message.get("body", b"")

    async def _line(self, line: bytes, *, last: bool = False) -> None:
        if not self._begun:
            self._begun = True
            headers = [(b"content-type", LINES_TYPE.encode())]
            await self._send({"type": "http.response.start", "status": OK, "headers": headers})
        await self._send({"type": "http.response.body", "body": line, "more_body": not last})
