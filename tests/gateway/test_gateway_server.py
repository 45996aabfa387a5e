"""What clients can do to the gateway's server: long bodies, idle connections, slow heads, bodies that come late."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from gateway_rig import KEY, Rig, auth
from patience import WAIT_S
from penstock import asgi as server
from penstock.gateway.app import serving
from penstock.gateway.graph import Row
from penstock.rollout.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize("path", [CHAT, "/v1/messages/count_tokens"])
async def test_a_conversation_that_is_slow_to_encode_holds_up_nobody(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """The slow encoding ends only after another client was answered."""
    rig = Rig(tokenizer, max_model_len=50_000)
    answered, encode = threading.Event(), tokenizer.encode_exact

    def slow(text: str, most: int | None = None) -> list[int]:
        assert "slow" not in text or answered.wait(WAIT_S)
        return encode(text, most)

    monkeypatch.setattr(tokenizer, "encode_exact", slow)
    given = {"messages": [{"role": "user", "content": "slow" * 5000}], "max_tokens": 9}
    asking = asyncio.create_task(rig.http.post(path, json=given, timeout=WAIT_S))
    await asyncio.sleep(0.1)
    assert (await rig.http.get("/health")).status_code == 200
    answered.set()
    assert (await asking).status_code == 200


async def _ended(reader: asyncio.StreamReader) -> bool:
    """Whether the server closes the connection in time."""
    try:
        async with asyncio.timeout(WAIT_S):
            return await reader.read() == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


async def test_idle_connections_are_bounded_and_the_oldest_make_room(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 8)
    async with (
        serving(rig.gateway) as base,
        httpx.AsyncClient(base_url=base, timeout=WAIT_S) as http,
    ):
        port = int(base.rsplit(":", 1)[1])
        assert (await http.get("/health")).status_code == 200  # and this connection is kept
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        for reader, _ in connections[:12]:
            assert await _ended(reader)
        answer = await http.post(CHAT, json=BODY, headers=auth(KEY))
        assert answer.status_code == 200
        for _, writer in connections:
            writer.close()


async def test_a_turn_under_way_is_not_cut_off_for_new_connections(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 2)
    rig.engine.hold = asyncio.Event()
    async with (
        serving(rig.gateway) as base,
        httpx.AsyncClient(base_url=base, timeout=WAIT_S) as http,
    ):
        asking = asyncio.create_task(http.post(CHAT, json=BODY, headers=auth(KEY)))
        await asyncio.wait_for(rig.engine.asked.wait(), WAIT_S)
        connections = [await asyncio.open_connection("127.0.0.1", int(base.rsplit(":", 1)[1])) for _ in range(5)]
        assert await _ended(connections[0][0])
        rig.engine.hold.set()
        assert (await asking).status_code == 200
        for _, writer in connections:
            writer.close()


@pytest.mark.parametrize("begun", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET"])
async def test_a_head_has_a_deadline(rig: Rig, monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    first, _, second = begun.rpartition(b"\r\n\r\n")
    if not first:
        monkeypatch.setattr(server, "HEAD_S", 0.2)
    async with serving(rig.gateway) as base:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(base.rsplit(":", 1)[1]))
        if first:  # a second request, which begins when the first is answered
            writer.write(first + b"\r\n\r\n")
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
            monkeypatch.setattr(server, "HEAD_S", 0.2)
            begun = second
        writer.write(begun)
        assert await _ended(reader)
        writer.close()


@pytest.mark.parametrize("policy", ["extend", "faithful"])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages/count_tokens"])
async def test_a_prompt_far_over_the_context_is_refused_unread(tokenizer: Tokenizer, policy: str, path: str) -> None:
    """Encoding three bodies of 4 MiB took 3.8 GB and ten seconds, and then they were refused by their length."""
    rig = Rig(tokenizer, max_model_len=1000, policy=policy)
    first = await rig.post(CHAT, BODY)
    long = {"role": "user", "content": "a" * (4 << 20)}
    for messages in ([long], [*BODY["messages"], first["choices"][0]["message"], long]):
        answer = await rig.http.post(path, json={"messages": messages, "max_tokens": 5})
        assert answer.status_code == 400
        assert "characters; at most 32000 are read where 1000 tokens fit" in answer.json()["error"]["message"]
        assert answer.json()["error"].get("code") == "context_length_exceeded"


@pytest.mark.parametrize("depth", [900, 100_000])
async def test_what_is_nested_too_deeply_is_a_400(rig: Rig, depth: int) -> None:
    nested = json.dumps(0).join(('{"a":' * depth, "}" * depth))
    function = f'{{"type": "function", "function": {{"name": "f", "parameters": {nested}}}}}'
    body = f'{{"messages": [{{"role": "user", "content": "a"}}], "tools": [{function}]}}'
    assert (await rig.http.post(CHAT, content=body)).status_code == 400
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": nested}}
    messages = [*BODY["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}, *BODY["messages"]]
    answer = await rig.http.post(CHAT, json={"messages": messages})
    assert answer.status_code in {200, 400}
    assert depth < 1000 or answer.json()["error"]["code"] == "context_length_exceeded"


async def test_a_report_builds_no_rows(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1.2 million tokens of context it took 1.2 s, in which no turn went on."""
    await rig.post(CHAT, BODY)
    monkeypatch.setattr(Row, "trajectory", None)
    report = (await rig.http.get("/sessions")).json()
    assert report["trained_tokens"] == report["sampled_tokens"] > 0


async def test_asking_for_models_or_a_count_opens_no_session(rig: Rig) -> None:
    assert (await rig.http.get("/v1/models")).json()["data"][0]["id"] == "m"
    assert (await rig.post("/v1/messages/count_tokens", BODY))["input_tokens"] > 1
    assert rig.gateway.sessions(rig.gateway.tenant_of(KEY)) == []
