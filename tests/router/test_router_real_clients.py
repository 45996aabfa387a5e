"""The client that people use against the router process: openai, 1 MB answers and streams included."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from router_rig import Backend, Reader, Rig, Seen, Writer, chunk, reply, rig

MB = 2**20
TEXT = "".join(f"{i:07} " for i in range(MB // 8))
EVENTS = 64
MESSAGES = [{"role": "user", "content": "say something"}]


def event(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    piece = {"id": "c", "object": "chat.completion.chunk", "choices": [choice]}
    return b"data: " + json.dumps(piece).encode() + b"\n\n"


async def stream(writer: Writer, events: int) -> None:
    """`TEXT` as chat events, each a chunk of its own, and the end that OpenAI has."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    part = len(TEXT) // EVENTS
    for i in range(events):
        writer.write(chunk(event(TEXT[i * part : (i + 1) * part])))
        await writer.drain()
    if events == EVENTS:
        writer.write(chunk(event("", "stop")) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def chat() -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": TEXT}, "finish_reason": "stop"}
    body = {"id": "c", "object": "chat.completion", "created": 1, "model": "big", "choices": [choice]}
    return reply(json.dumps(body).encode(), headers=JSON)


def failure(status: int, reason: str) -> bytes:
    error = {"message": "the engine says no", "type": "EngineSays", "param": None, "code": status}
    return reply(json.dumps({"error": error}).encode(), f"{status} {reason}", JSON)


JSON = "Content-Type: application/json\r\n"
FIXED = {
    "big": chat(),
    "broken": reply(TEXT.encode())[: MB // 2],
    "fail-400": failure(400, "Bad Request"),
    "fail-429": failure(429, "Too Many Requests"),
    "fail-500": failure(500, "Internal Server Error"),
}


async def answer(backend: Backend, seen: Seen, reader: Reader, writer: Writer) -> None:  # noqa: ARG001
    """What the engine does is in the model's name."""
    what = json.loads(seen.body)["model"]
    if what in {"stream", "broken-stream"}:
        await stream(writer, EVENTS if what == "stream" else EVENTS // 2)
    else:
        writer.write(FIXED[what])
    if what.startswith("broken"):
        writer.close()


@pytest.fixture(scope="module")
async def scripted() -> AsyncIterator[Rig]:
    """A router process before two engines that do as `answer` says."""
    async with rig(answer, answer, process=True, max_hold_s=0.3) as made:
        yield made


def client(rig: Rig) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0, timeout=60)


async def test_openai_a_megabyte_whole_and_as_a_stream(scripted):
    async with client(scripted) as c:
        whole = await c.chat.completions.create(model="big", messages=MESSAGES)
        assert whole.choices[0].message.content == TEXT
        pieces = [
            p.choices[0].delta.content
            async for p in await c.chat.completions.create(model="stream", messages=MESSAGES, stream=True)
        ]
        assert len(pieces) == EVENTS + 1
        assert "".join(pieces) == TEXT


async def test_openai_errors_of_engines_are_its_own_types(scripted):
    async with client(scripted) as c:
        for status, kind in (
            (400, openai.BadRequestError),
            (429, openai.RateLimitError),
            (500, openai.InternalServerError),
        ):
            with pytest.raises(kind, match="the engine says no") as error:
                await c.chat.completions.create(model=f"fail-{status}", messages=MESSAGES)
            assert (error.value.status_code, error.value.type) == (status, "EngineSays")
            assert "x-penstock-error" not in error.value.response.headers


async def test_openai_errors_of_the_router_itself():
    async with rig(process=True, max_hold_s=0.1) as empty, client(empty) as c:
        with pytest.raises(openai.InternalServerError) as error:
            await c.chat.completions.create(model="x", messages=MESSAGES)
        assert error.value.status_code == 503
        assert error.value.body["type"]
        assert int(error.value.response.headers["retry-after"]) >= 1
        with pytest.raises(openai.PermissionDeniedError, match="every engine"):
            await c.with_options(base_url=empty.url).post("/pause", cast_to=object)


async def test_openai_sees_an_engine_die_in_its_stream(scripted):
    async with client(scripted) as c:
        pieces = await c.chat.completions.create(model="broken-stream", messages=MESSAGES, stream=True)
        received: list[str] = []
        with pytest.raises(openai.APIConnectionError):
            await collect(pieces, received)
        assert "".join(received) == TEXT[: MB // 2], "what came before is not lost"
        with pytest.raises(openai.APIConnectionError):
            await c.chat.completions.create(model="broken", messages=MESSAGES)


async def collect(pieces: AsyncIterator[Any], into: list[str]) -> None:
    async for piece in pieces:
        into.append(piece.choices[0].delta.content)  # noqa: PERF401 - kept where the rest does not come
