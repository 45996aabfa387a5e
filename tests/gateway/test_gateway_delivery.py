"""Which answers count as read, whose a retry is, and what a client that goes away can still have."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from gateway_rig import KEY, Rig, auth
from patience import WAIT_S
from penstock.errors import EngineError
from penstock.gateway import app, service
from penstock.gateway.app import build_app, serving
from penstock.rollout.tokenizer import Tokenizer
from penstock.types import Sample, VersionSpan

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "x"}]}
RETRY = {"X-Stainless-Retry-Count": "1"}
LONG = 300_000
"""Tokens of an answer that a small socket does not take at once."""


def kept(rig: Rig) -> Any:
    (one,) = rig.gateway.sessions(rig.tenant)
    return one


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - it waits for what has no event
            await asyncio.sleep(0.01)


@pytest.fixture
def small_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server's sockets take a few kilobytes at once."""
    real = app.listening

    def listening(host: str, port: int, what: str) -> socket.socket:
        listener = real(host, port, what)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    monkeypatch.setattr(app, "listening", listening)


async def cut_off(base: str, request: bytes) -> None:
    """Send a request, read the beginning of its answer, and reset the connection."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((urlsplit(base).hostname, urlsplit(base).port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
    writer.write(request)
    assert b"200 OK" in await reader.readexactly(200)
    writer.transport.abort()


async def left_at_the_end_of_its_turn(rig: Rig) -> int:
    """Ask, and leave in the moment in which the turn ends; return the status."""
    rig.engine.hold = asyncio.Event()
    sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    sent.put_nowait({"type": "http.request", "body": json.dumps(BODY).encode(), "more_body": False})
    answers: list[Any] = []

    async def send(message: Any) -> None:
        answers.append(message)

    headers = [(b"authorization", f"Bearer {KEY}".encode())]
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers, "query_string": b"", "root_path": ""}
    asking = asyncio.create_task(build_app(rig.gateway)(scope, sent.get, send))
    await rig.engine.asked.wait()
    sent.put_nowait({"type": "http.disconnect"})
    rig.engine.hold.set()
    await asyncio.wait_for(asking, WAIT_S)
    return answers[0]["status"]


async def test_a_client_that_leaves_as_its_turn_ends_has_not_read_it(rig: Rig) -> None:
    assert await left_at_the_end_of_its_turn(rig) == 499
    await rig.http.post(CHAT, content=json.dumps(BODY).encode())
    assert len(rig.engine.seen) == 1


async def test_a_retry_of_a_failed_turn_is_a_turn_of_its_own(rig: Rig) -> None:
    """Four equal requests at once, one of which fails: its client must not get the answer of another."""
    real, number = rig.engine.sample, 0

    async def sample(*given: Any) -> list[Sample]:
        nonlocal number
        number += 1
        if number == 3:
            await asyncio.sleep(0.05)
            raise EngineError("died")
        await asyncio.sleep(0.02 * number)
        return await real(*given)

    rig.gateway._sample = sample

    async def client() -> str:
        answer = await rig.http.post(CHAT, json=BODY)
        while answer.status_code != 200:
            answer = await rig.http.post(CHAT, json=BODY, headers=RETRY)
        return answer.json()["id"]

    assert len(set(await asyncio.gather(*(client() for _ in range(4))))) == 4
    assert len(await rig.rows()) == 4


@pytest.mark.parametrize("headers", [RETRY, {}])
async def test_a_retry_of_two_equal_requests_reads_its_own_turn(rig: Rig, headers: dict[str, str]) -> None:
    rig.engine.hold = asyncio.Event()
    async with (
        serving(rig.gateway) as base,
        httpx.AsyncClient(base_url=base, headers=auth(KEY), timeout=WAIT_S) as http,
    ):
        first = asyncio.create_task(http.post(CHAT, json=BODY))
        await until(lambda: len(rig.engine.seen) == 1)
        second = asyncio.create_task(http.post(CHAT, json=BODY))
        await until(lambda: len(rig.engine.seen) == 2)
        first.cancel()
        await until(lambda: kept(rig).turns[0].is_unread)
        again = asyncio.create_task(http.post(CHAT, json=BODY, headers=headers))
        await until(lambda: kept(rig).turns[0].waiters)
        rig.engine.hold.set()
        assert (await again).json()["id"] != (await second).json()["id"]
    assert len(rig.engine.seen) == 2


@pytest.mark.usefixtures("small_sockets")
@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_was_cut_off_is_read_again(tokenizer: Tokenizer, *, stream: bool) -> None:
    rig = Rig(tokenizer, max_model_len=2 * LONG)

    async def sample(*given: Any) -> list[Sample]:
        rig.engine.seen.append(list(given[0]))
        made = (*[12] * (LONG - 1), 2)
        return [Sample(made, "stop", (-0.5,) * LONG, (VersionSpan(0, 0, LONG),))]

    rig.gateway._sample = sample
    data = json.dumps({**BODY, "stream": stream}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(data)}\r\n\r\n"
    async with serving(rig.gateway) as base:
        await cut_off(base, head.encode() + data)
        await until(lambda: kept(rig).turns[0].is_unread)
        async with httpx.AsyncClient(base_url=base, headers=auth(KEY), timeout=WAIT_S) as http:
            answer = await http.post(CHAT, content=data)
            assert answer.text.endswith("data: [DONE]\n\n" if stream else "}")
            await until(lambda: kept(rig).turns[0].delivered)
    assert len(rig.engine.seen) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_read_answer_is_not_given_to_an_equal_request(rig: Rig, *, stream: bool) -> None:
    ids = set[str]()
    for _ in range(2):
        answer = await rig.http.post(CHAT, json={**BODY, "stream": stream})
        ids.add(answer.headers["X-Penstock-Node"])
        assert answer.headers["X-Penstock-Node"] in answer.text
    assert len(ids) == len(rig.engine.seen) == 2


async def test_read_turns_are_let_go_of_and_failed_ones_at_once(rig: Rig) -> None:
    for number in range(service.MOST_REPLAYED + 5):
        await rig.post(CHAT, {"messages": [{"role": "user", "content": str(number)}]})
    assert len(kept(rig).turns) == service.MOST_REPLAYED + 1
    rig.engine.error = EngineError("died")
    assert (await rig.http.post(CHAT, json=BODY)).status_code == 503
    assert [turn.failed for turn in kept(rig).turns] == [False] * service.MOST_REPLAYED


# --- the end of a session --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_sockets")
async def test_rows_of_finish_that_did_not_arrive_are_given_again(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer, max_model_len=2 * LONG)
    rig.engine.texts = ["a" * 2000]
    await rig.post("/s/one/v1/chat/completions", BODY)
    node = next(iter(rig.session("one").nodes.values()))
    count = LONG // 10
    node.sample = Sample((12,) * count, "stop", (-0.123456789,) * count, (VersionSpan(0, 0, count),))
    head = f"POST /sessions/one/finish HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
    async with serving(rig.gateway) as base:
        await cut_off(base, f"{head}Content-Length: 0\r\n\r\n".encode())
        async with httpx.AsyncClient(base_url=base, headers=auth(KEY), timeout=WAIT_S) as http:
            await asyncio.sleep(0.3)
            refused = await http.post("/s/one/v1/chat/completions", json=BODY)
            assert (refused.status_code, "was finished" in refused.text) == (404, True)
            (row,) = (await http.post("/sessions/one/finish")).text.splitlines()
            assert json.loads(row)["session"] == "one"
            gone = await http.post("/sessions/one/finish")
    assert gone.status_code == 404
    assert "forgotten as soon as its rows are sent" in gone.text


@pytest.mark.parametrize("name", ["..", ".", "a?b", "#", "a%2fb", " ", "a b", "", {"a": 1}, True, "x" * 201])
async def test_a_session_s_name_stands_in_a_path_as_it_is(rig: Rig, name: Any) -> None:
    answer = await rig.http.post("/sessions", json={"session": name})
    assert answer.status_code == 400
    assert "session" in answer.text
    assert rig.gateway.sessions(rig.tenant) == []
