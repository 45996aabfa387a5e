"""Read an engine's answer as it arrives: its head, where its body ends, and whether it says that the engine is dead.

vLLM's API server outlives its engine core by about a second. In vLLM 0.26 and 0.32 it then answers 500 with the message
of `EngineDeadError`; a stream, which has its 200 already, begins with an event that holds the same error, as Penstock's
lines of progress do. Any other error says something of the request and nothing of the engine.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from penstock.router.head import CHUNKED, RequestHead, ResponseHead, parse_response
from penstock.router.http import (
    BodyReader,
    ChunkedReader,
    CloseReader,
    FramingError,
    LengthReader,
    RefusalError,
)

_DEAD_MESSAGE = "EngineCore encountered an issue"
"""How the message of vLLM's `EngineDeadError` begins."""
_MAX_SUSPECT = 16_384
"""Bytes of an answer, framing and all, that are read at most before it goes on: such an error has about 200."""
_LINES, _EVENTS = b"application/x-ndjson", b"text/event-stream"
_LINE_END = re.compile(rb"\n")
_EVENT_END = re.compile(rb"\r?\n\r?\n")
_MAX_HEAD = 262_144
"""Bytes; an engine's head is trusted more than a client's, but not without bound."""
_SWITCHING, _FINAL = 101, 200


class Answer:
    """One answer. `feed` it, then read what it has become.

    Args:
        request: what it answers.
    """

    def __init__(self, request: RequestHead) -> None:
        self.response: ResponseHead | None = None
        """Its head, once it may go to the client."""
        self.interim: list[ResponseHead] | None = None
        """Informational answers (1xx) that came before it, to be taken out by the reader."""
        self.death = ""
        """The error of an engine whose core is dead; such an answer has no `response`."""
        self.done = False
        self.between_chunks = False
        """It is passed on as it comes, and the next byte is the first of a chunk."""
        self._request = request
        self._body: BodyReader | None = None
        self._payload: list[bytes] | None = None
        """Where chunks are taken apart for a client of HTTP/1.0."""
        self._suspect: Suspect | None = None
        self._buffer = b""
        """What came of the head, or of the body of a suspect."""

    @property
    def ends_with_connection(self) -> bool:
        """Whether its end is the end of the engine's connection."""
        return isinstance(self._body, CloseReader)

    def feed(self, data: bytes) -> bytes:
        """Read on; returns what of the body goes to the client, behind `response` where that has just come.

        Raises:
            FramingError: the body is not well-formed, or more came than the answer.
            RefusalError: 502, the head is not one of HTTP.
        """
        if self._body is not None:
            return self._follow(self._body, data, 0)
        return self._read_head(data) if self._suspect is None else self._read_suspect(self._suspect, data)

    def _read_head(self, data: bytes) -> bytes:
        if self._buffer:
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
                return b""
            response = parse_response(data[start:end], self._request.method)
            if response.status >= _FINAL:
                break
            if response.status == _SWITCHING:
                raise RefusalError(502, "bad_engine_response", "the engine switched protocols, which was not asked for")
            self.interim = [*(self.interim or ()), response]
            start = end
        if is_suspect(response):
            self._suspect = Suspect(response)
            return self._read_suspect(self._suspect, data[end:])
        return self._begin(response, data, end)

    def _read_suspect(self, suspect: Suspect, data: bytes) -> bytes:
        self._buffer += data
        known, self.death = suspect.judge(data)
        if not known or self.death:
            return b""
        body, self._buffer, self._suspect = self._buffer, b"", None
        return self._begin(suspect.response, body, 0)

    def _begin(self, response: ResponseHead, data: bytes, start: int) -> bytes:
        length = response.length
        if length == len(data) - start:  # all of it is here
            self.response, self.done = response, True
            return data[start:]
        if length == CHUNKED:
            self._payload = None if self._request.http_1_1 else []
            body: BodyReader = ChunkedReader(self._payload)
        else:
            body = CloseReader() if length < 0 else LengthReader(length)
        piece = self._follow(body, data, start)
        self.response, self._body = response, body
        return piece

    def _follow(self, body: BodyReader, data: bytes, start: int) -> bytes:
        if body.feed(data, start) < len(data):
            # Bytes after the answer: it is not the answer to this request, or the next one's would not be.
            raise FramingError("the engine sent more than its answer")
        self.done = body.done
        if self._payload is None:
            self.between_chunks = body.between_chunks and not body.done
            return data[start:]
        piece = b"".join(self._payload)
        self._payload.clear()
        return piece


def is_suspect(response: ResponseHead) -> bool:
    """Whether the beginning of the body has to be seen before the head goes to the client."""
    if response.status == 500:  # noqa: PLR2004 - the HTTP status
        return 0 < response.length <= _MAX_SUSPECT or response.length == CHUNKED
    return response.status == 200 and response.length == CHUNKED and _is_stream(response)  # noqa: PLR2004


class Suspect:
    """An answer whose body may begin with the death of its core; sees the body as it comes."""

    def __init__(self, response: ResponseHead) -> None:
        self.response = response
        self._payload: list[bytes] = []
        chunked = response.length == CHUNKED
        self._reader: BodyReader = ChunkedReader(self._payload) if chunked else LengthReader(response.length)
        self._body = b""

    def judge(self, data: bytes) -> tuple[bool, str]:
        """Whether enough of the body is here with `data`, its next piece, and the cause of death; empty: none.

        Raises:
            FramingError: the body is not well-formed.
        """
        end = self._reader.feed(data)
        self._body += b"".join(self._payload) if self.response.length == CHUNKED else data[:end]
        self._payload.clear()
        body, done = self._body, self._reader.done or self._reader.size >= _MAX_SUSPECT
        if _is_stream(self.response):
            is_lines = self.response.content_type.startswith(_LINES)
            first, *rest = (_LINE_END if is_lines else _EVENT_END).split(body, 1)
            body = first if is_lines else first.partition(b"data:")[2]
            done = done or bool(rest)
        return (True, _cause(body)) if done else (False, "")


def _is_stream(response: ResponseHead) -> bool:
    return response.content_type.startswith((_LINES, _EVENTS))


def _cause(content: bytes) -> str:
    if _DEAD_MESSAGE.encode() not in content:
        return ""
    try:
        answer: Any = orjson.loads(content)
    except orjson.JSONDecodeError:
        return ""
    match answer:
        case {"error": {"message": str(message)}} | {"answer": {"error": {"message": str(message)}}} if (
            message.startswith(_DEAD_MESSAGE)
        ):
            return message
        case _:
            return ""
