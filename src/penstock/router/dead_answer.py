"""Answers in which vLLM says that its engine core is dead, which its API server outlives by about a second.

In vLLM 0.26 and 0.32 an answer is a 500 with the message of `EngineDeadError`; a stream, which has its 200 already,
begins with an event that holds the same error, as Penstock's lines of progress do. Any other error says something of
the request and nothing of the engine.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from penstock.router.framing import ChunkedReader, LengthReader
from penstock.router.head import CHUNKED, ResponseHead

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
