"""Answers in which vLLM says that its engine core is dead, which its API server outlives by about a second.

In vLLM 0.26 and 0.32 an answer is a 500 with the message of `EngineDeadError`; a stream, which has its 200 already,
begins with an event that holds the same error, as Penstock's lines of progress do. Any other error says something of
the request and nothing of the engine.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from penstock.router.framing import ChunkedReader
from penstock.router.head import CHUNKED, ResponseHead

_MESSAGE = "EngineCore encountered an issue"
"""How the message of vLLM's `EngineDeadError` begins."""
_MOST = 16_384
"""Bytes of an answer that are looked at: such an error has about 200."""
_LINES, _EVENTS = b"application/x-ndjson", b"text/event-stream"
_LINE_END = re.compile(rb"\n")
_EVENT_END = re.compile(rb"\r?\n\r?\n")


def is_suspect(response: ResponseHead) -> bool:
    """Whether the beginning of the body has to be seen before the head goes to the client."""
    if response.status == 500:  # noqa: PLR2004 - the HTTP status
        return 0 < response.length <= _MOST or response.length == CHUNKED
    return response.status == 200 and response.length == CHUNKED and _is_stream(response)  # noqa: PLR2004


def judge(response: ResponseHead, body: bytes) -> tuple[bool, str]:
    """Whether enough of a suspect answer's body is here, and the cause of death that it gives; empty: none.

    Raises:
        FramingError: the body is not well-formed.
    """
    done = len(body) >= response.length
    if response.length == CHUNKED:
        payload: list[bytes] = []
        reader = ChunkedReader(payload)
        reader.feed(body)
        done = reader.done
        body = b"".join(payload)
    if _is_stream(response):
        is_lines = response.content_type.startswith(_LINES)
        first, *rest = (_LINE_END if is_lines else _EVENT_END).split(body, 1)
        body = first if is_lines else first.partition(b"data:")[2]
        done = done or bool(rest)
    if not done and len(body) < _MOST:
        return False, ""
    return True, _cause(body)


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
