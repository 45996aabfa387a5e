"""Adds versions and progress to vLLM's own answers and streams, for clients of OpenAI's API; see `progress.py`."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import json
import re
from typing import Any

from penstock.plugin.progress import RequestProgress
from penstock.wire import GENERATE, MAX_SPANS_HEADER, PROGRESS_HEADER, SPANS_HEADER, STREAM_PROGRESS, comment

STREAM_REPORTS = (PROGRESS_HEADER.lower().encode(), STREAM_PROGRESS.encode())
"""Header of a stream with such comments. A client recognises an engine with our plugin by it."""
DONE = b"data: [DONE]"
_TOKEN_ID = re.compile(rb'"token_id":([0-9]+)')
"""Token id of a logprob; within a JSON string, its quotes would be escaped."""


class AnswerReporter:
    """Adds a header to vLLM's answer, or comments to its stream."""

    def __init__(self, send: Any, request: RequestProgress, path: str, *, progress: bool) -> None:
        self._send = send
        self._request = request
        self._progress = progress
        self._path = path
        self._streams = False
        self._start: dict[str, Any] | None = None
        """Held back until the token endpoint's answer is complete, because the length changes."""
        self._answer = bytearray()

    async def send(self, message: dict[str, Any]) -> None:
        in_tokens = self._path == GENERATE
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *self._more_headers(message["headers"])]}
            if in_tokens and not self._streams:
                self._start = message
                return
        elif self._start is not None:
            self._answer += message.get("body", b"")
            if message.get("more_body"):
                return
            answer = name_tokens(bytes(self._answer))
            headers = [pair for pair in self._start["headers"] if pair[0].lower() != b"content-length"]
            headers.append((b"content-length", str(len(answer)).encode()))
            await self._send({**self._start, "headers": headers})
            message = {"type": "http.response.body", "body": answer}
        elif self._streams and (body := message.get("body")):
            message = {**message, "body": self._more_body(name_tokens(body) if in_tokens else body)}
        await self._send(message)

    def _more_headers(self, headers: Any) -> list[tuple[bytes, bytes]]:
        kind = next((value for name, value in headers if name.lower() == b"content-type"), b"")
        self._streams = kind.startswith(b"text/event-stream")
        if self._streams:
            return [STREAM_REPORTS] if self._progress else []
        spans = json.dumps(self._request.spans(), separators=(",", ":")).encode()  # ASCII, whatever the adapters' names
        return [(SPANS_HEADER.lower().encode(), spans)] if len(b"[]") < len(spans) < MAX_SPANS_HEADER else []

    def _more_body(self, body: bytes) -> bytes:
        if self._progress and (updates := self._request.take_updates()):
            body = comment({"samples": updates}) + body
        before, done, after = body.rpartition(DONE)
        if not done:
            return body
        return before + comment({"versions": self._request.spans()}) + done + after


def name_tokens(answer: bytes) -> bytes:
    """Add `"token": "token_id:N"` to an answer's logprobs, which vLLM 0.32 leaves out.

    Training clients of others (verifiers, prime-rl) compare the sampled ids with these names.
    """
    return _TOKEN_ID.sub(rb'"token":"token_id:\1","token_id":\1', answer)
