"""An engine whose core is dead, and whose API server still answers: left out, reported, and no request lost to it."""

from __future__ import annotations

import asyncio
import json

import pytest
from router_rig import Answer, answer_name, both_loops, chunk, read_chunks, reply, request, rig, says, stays

from patience import WAIT_S
from penstock.router import dispatcher

MESSAGE = "EngineCore encountered an issue. See stack trace (above) for the root cause."
ERROR = {"error": {"message": MESSAGE, "type": "InternalServerError", "param": None, "code": 500}}
JSON = "Content-Type: application/json\r\n"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(content: object) -> bytes:
    return chunk(b"data: " + json.dumps(content).encode() + b"\n\n")


DEAD = reply(json.dumps(ERROR).encode(), "500 Internal Server Error", JSON)
DEAD_STREAM = STREAM + event(ERROR) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
DYING = {
    "plain": says(DEAD),
    "plain, in pieces": says(DEAD[:40], DEAD[40:150], DEAD[150:]),
    "stream": says(DEAD_STREAM),
    "stream, in pieces": says(STREAM, *[DEAD_STREAM[i : i + 60] for i in range(len(STREAM), len(DEAD_STREAM), 60)]),
}


@both_loops
@pytest.mark.parametrize("dying", DYING.values(), ids=DYING)
async def test_a_dead_core_trips_the_breaker_and_loses_no_request(dying: Answer, monkeypatch, *, process: bool) -> None:
    monkeypatch.setitem(dispatcher._BREAKER_S, "dead", 0.3)  # not in a process of its own
    async with rig(dying, answer_name, process=process, policy="round-robin") as r:
        answer = await (await r.client()).ask(body=b"x" * (2 << 20))
        assert (answer.status, answer.body) == (200, b"e1")
        assert [len(seen.body) for b in r.backends for seen in b.seen] == [2 << 20] * 2
        state = await r.settled()
        assert [(e.breaker_openings, e.dead_answers, e.failure) for e in state.engines] == [(1, 1, MESSAGE), (0, 0, "")]
        text = (await (await r.client()).ask("/metrics", method="GET")).body.decode()
        assert 'penstock_router_engine_dead_answers_total{engine="e0"} 1.0\n' in text
        assert 'penstock_router_retries_total{reason="dead"} 1.0\n' in text
        r.backends[0].answer = answer_name
        await r.until(lambda state: not state.engines[0].down)


async def test_a_request_that_finds_two_dead_engines_is_refused() -> None:
    async with rig(*[says(DEAD)] * 3) as r:
        answer = await (await r.client()).ask()
        assert (answer.status, answer.header("x-penstock-error")) == (502, "engines_failed")
        assert sorted(len(b.seen) for b in r.backends) == [0, 1, 1]


ORDINARY = {
    "another 500": reply(
        b'{"error": {"message": "CUDA out of memory", "code": 500}}', "500 Internal Server Error", JSON
    ),
    "the words inside": reply(
        json.dumps({"error": {"message": f"bad prompt: {MESSAGE}"}}).encode(), "500 Internal Server Error", JSON
    ),
    "no JSON": reply(MESSAGE.encode(), "500 Internal Server Error"),
    "a 400 with the words": reply(json.dumps(ERROR).encode(), "400 Bad Request", JSON),
    "a 200 with the words": reply(json.dumps(ERROR).encode(), "200 OK", JSON),
    "an empty 500": reply(b"", "500 Internal Server Error"),
    "a long 500": reply(b"x" * 40_000, "500 Internal Server Error"),
    "text with the words": STREAM + event({"choices": [{"text": MESSAGE}]}) + b"0\r\n\r\n",
    "an empty stream": STREAM + b"0\r\n\r\n",
    "other events": STREAM + chunk(b": ping\r\n\r\n") + b"0\r\n\r\n",
}


@pytest.mark.parametrize("answer", ORDINARY.values(), ids=ORDINARY)
async def test_any_other_error_is_passed_on_and_trips_nothing(answer: bytes) -> None:
    async with rig(says(answer)) as r:
        client = await r.client()
        for _ in range(2):
            await client.send(request())
            assert (await client.receive()).status == int(answer.split()[1])
        state = await r.settled()
        assert (state.engines[0].down, state.engines[0].dead_answers) == (False, 0)


async def test_a_stream_is_held_back_no_longer_than_its_first_chunk() -> None:
    for piece in (STREAM + chunk(b": no data\n"), STREAM + b"fffff\r\ndata: " + b"x" * 20_000):
        async with rig(says(piece, then=stays)) as r:
            client = await r.client()
            await client.send(request())
            async with asyncio.timeout(WAIT_S):
                assert (await client.head())[0] == 200


async def test_a_death_after_the_first_event_ends_the_stream_as_the_engine_ended_it() -> None:
    first = event({"choices": [{"text": "a"}]})
    dying = says(STREAM + first, event(ERROR), chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    async with rig(dying, answer_name, policy="round-robin") as r:
        client = await r.client()
        await client.send(request())
        assert (await client.head())[0] == 200
        events = [piece async for piece in read_chunks(client.reader)]
        assert len(events) == 3
        assert json.loads(events[1].removeprefix(b"data: ")) == ERROR
