"""Chat completions, Responses and Anthropic messages: what goes in and out, and one exact row whatever comes back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from wire_clients import ECHOES, WIRES, Chat

from gateway_rig import CALL, KEY, PARAMETERS, THOUGHT, Rig, auth, events_of
from penstock.errors import DeadlineError
from penstock.gateway.app import serving
from penstock.gateway.dialect import dumps
from penstock.rollout.tokenizer import Tokenizer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ECHOES)
@pytest.mark.parametrize("wire", WIRES)
async def test_a_tool_turn_is_extended_whatever_the_harness_sends_back(
    rig: Rig, wire: type[Chat], how: str, *, stream: bool
) -> None:
    rig.engine.texts = [f"{THOUGHT}calling\n{CALL}\n{CALL}", f"{THOUGHT}so 5", "bye"]
    client = wire(rig, stream=stream)
    client.user("add 1 and 2")
    first = await client.ask()
    assert client.seen(first) == ("calling", "let me see", [{"a": 1, "b": [2, 3]}] * 2)
    client.echo(first, how)
    second = await client.ask()
    assert client.seen(second) == ("so 5", "let me see", [])
    client.echo(second, how)
    client.user("thanks")
    assert client.seen(await client.ask()) == ("bye", None, [])
    (row,) = await rig.rows()
    assert [node["cause"] for node in row["nodes"]] == ["", "", ""]
    assert all(node["trained"] for node in row["nodes"])
    text = rig.tokenizer.decode(row["response_ids"], skip_special_tokens=False)
    assert text.count(CALL) == 2  # as sampled, and never rendered again
    assert text.count("let me see") == 2  # thinking of earlier turns stays
    assert text.count("<tool_response>\n5\n</tool_response>") == 2
    assert row["versions"][0] == 0
    assert row["versions"][-1] == 2
    assert set(rig.engine.sessions) == {"a/default"}
    assert rig.engine.params[0].stop_token_ids == (2,)


@pytest.mark.parametrize("wire", WIRES)
async def test_one_conversation_may_change_its_wire_s_form_of_text(rig: Rig, wire: type[Chat]) -> None:
    """Parts for strings, and white space at the ends."""
    rig.engine.texts = ["one", "two"]
    client = wire(rig)
    client.user("say")
    answer = await client.ask()
    client.echo(answer)
    kind = "input_text" if client.path == "/v1/responses" else "text"
    client.items[-2 if len(client.items) > 1 else 0]["content"] = [{"type": kind, "text": "say\n"}]
    client.user("more")
    await client.ask()
    (row,) = await rig.rows()
    assert len(row["nodes"]) == 2


async def test_tokens_are_counted_as_the_turn_will_count_them(rig: Rig) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
    counted = await rig.post("/v1/messages/count_tokens", body)
    answer = await rig.post("/v1/messages", body)
    assert counted["input_tokens"] == answer["usage"]["input_tokens"] == len(rig.engine.seen[0])


async def test_limits_of_tokens_show_as_each_wire_says_it(rig: Rig) -> None:
    rig.engine.texts = ["too long a text"] * 3
    user = [{"role": "user", "content": "x"}]
    chat = await rig.post("/v1/chat/completions", {"messages": user, "max_completion_tokens": 3})
    assert chat["choices"][0]["finish_reason"] == "length"
    response = await rig.post("/v1/responses", {"input": "x", "max_output_tokens": 3})
    assert (response["status"], response["incomplete_details"]["reason"]) == ("incomplete", "max_output_tokens")
    assert response["output"][-1]["status"] == "incomplete"
    message = await rig.post("/v1/messages", {"messages": user, "max_tokens": 3})
    assert message["stop_reason"] == "max_tokens"
    assert [params.max_tokens for params in rig.engine.params] == [3, 3, 3]


@pytest.mark.parametrize("wire", WIRES)
async def test_an_error_before_the_stream_begins_keeps_its_status(rig: Rig, wire: type[Chat]) -> None:
    rig.engine.error = DeadlineError("no answer", seconds=1.0)
    client = wire(rig)
    client.user("x")
    for stream in (False, True):
        answer = await rig.http.post(client.path, json={**client.body, "stream": stream})
        assert answer.status_code == 503
        assert "no engine could answer" in answer.json()["error"]["message"]
    assert await rig.rows() == []


@pytest.mark.parametrize("wire", WIRES)
async def test_a_stream_that_fails_later_says_that_it_is_not_whole(tokenizer: Tokenizer, wire: type[Chat]) -> None:
    rig = Rig(tokenizer, keepalive_s=0.01)
    rig.engine.hold = asyncio.Event()
    rig.engine.error = DeadlineError("no answer", seconds=1.0)
    client = wire(rig)
    client.user("x")
    asking = asyncio.create_task(rig.http.post(client.path, json={**client.body, "stream": True}))
    await rig.engine.asked.wait()
    for _ in range(20):  # the machine may stand still in one of them
        await asyncio.sleep(0.01)
    rig.engine.hold.set()
    text = (await asking).text
    assert text.startswith(": keepalive\n\n")
    last = events_of(text)[-1]
    assert "no engine could answer" in str(last)
    assert "[DONE]" not in text
    assert last.get("type") in (None, "error", "response.failed")


async def test_the_official_clients_read_answers_and_streams(tokenizer: Tokenizer) -> None:
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    rig = Rig(tokenizer)
    rig.engine.texts = [f"{THOUGHT}hi\n{CALL}"] * 6
    async with serving(rig.gateway) as base:
        await _official(openai, anthropic, base)
    assert sum(sum(row["loss_mask"]) for row in await rig.rows()) == sum(len(ids) for ids in rig.engine.made)


async def _official(openai: Any, anthropic: Any, base: str) -> None:
    user: Any = [{"role": "user", "content": "x"}]
    function: Any = {"name": "add", "parameters": {}}
    client = openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=KEY)
    tools: Any = [{"type": "function", "function": function}]
    chat = await client.chat.completions.create(model="m", messages=user, tools=tools)
    assert chat.choices[0].message.tool_calls[0].function.name == "add"
    chunks = [c async for c in await client.chat.completions.create(model="m", messages=user, tools=tools, stream=True)]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    items: Any = [{"type": "function", **function, "strict": False}]
    response = await client.responses.create(model="m", input="x", tools=items)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    async with client.responses.stream(model="m", input="x", tools=items) as stream:
        kinds = [event.type async for event in stream]
        assert kinds[-1] == "response.completed"
        assert (await stream.get_final_response()).output_text == "hi"
    claude = anthropic.AsyncAnthropic(base_url=base, api_key=KEY)
    uses: Any = [{"name": "add", "input_schema": {"type": "object"}}]
    message = await claude.messages.create(model="m", max_tokens=200, messages=user, tools=uses)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    async with claude.messages.stream(model="m", max_tokens=200, messages=user, tools=uses) as stream:
        final = await stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[2].input == {"a": 1, "b": [2, 3]}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/chat/completions", {}, 400, "malformed request: 'messages' is missing"),
        ("/v1/responses", {}, 400, "malformed request: 'input' is missing"),
        ("/v1/messages", {"messages": [], "stop_sequences": [1]}, 400, "stop_sequences is a text or a list of texts"),
        ("/v1/chat/completions", {"messages": []}, 400, "template"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 2}, 400, "n=2"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "text"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "top_p": 7}, 400, "top_p"),
        ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}, 404, "resp"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "text"),
        ("/v1/messages", [], 400, "object"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "context length"),
    ],
)
async def test_wrong_requests_are_refused_in_the_wire_s_form(
    rig: Rig, path: str, body: Any, status: int, message: str
) -> None:
    answer = await rig.http.post(path, json=body, headers=auth(KEY))
    assert answer.status_code == status, answer.text
    assert message in answer.json()["error"]["message"]
    assert rig.engine.seen == []


def test_integers_of_more_than_64_bits_are_written() -> None:
    assert dumps({"a": 10**30}) == b'{"a":1000000000000000000000000000000}'


async def test_half_a_character_in_a_call_is_no_500(rig: Rig) -> None:
    rig.engine.texts = ['<tool_call>\n{"name": "add", "arguments": {"a": "\\ud800"}}\n</tool_call>']
    tool = {"name": "add", "input_schema": {"type": "object"}}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 200, "tools": [tool]}
    answer = await rig.post("/v1/messages", body)
    assert answer["content"][0]["name"] == "add"


async def test_a_thread_of_messages_goes_on_with_its_tools_and_system_prompt(rig: Rig) -> None:
    """Anthropic's SDK sends only new messages, and the whole again where the thread is unknown."""
    rig.engine.texts = [CALL, "three"]
    tools = [{"name": "add", "input_schema": PARAMETERS}]
    question = {"role": "user", "content": "1 + 2?"}
    whole = {"max_tokens": 400, "system": "Add.", "tools": tools, "messages": [question]}
    first = await rig.post("/v1/messages?beta=true", {**whole, "thread": {"type": "create"}})
    (use,) = [block for block in first["content"] if block["type"] == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "3"}
    more = {"max_tokens": 400, "messages": [{"role": "user", "content": [result]}]}
    unknown = {"type": "continue", "previous_message_id": "msg_" + "0" * 24}
    refused = await rig.http.post("/v1/messages", json={**more, "thread": unknown})
    assert (refused.status_code, refused.json()["error"]["details"]) == (404, {"error_code": "thread_not_found"})
    thread = {"type": "continue", "previous_message_id": first["id"]}
    counted = await rig.post("/v1/messages/count_tokens", {**more, "thread": thread})
    second = await rig.post("/v1/messages", {**more, "thread": thread})
    assert counted["input_tokens"] == second["usage"]["input_tokens"]
    third = {"max_tokens": 400, "messages": [{"role": "user", "content": "sure?"}]}
    await rig.post("/v1/messages", {**third, "thread": {**thread, "previous_message_id": second["id"]}})
    (row,) = await rig.rows()
    assert [node["cause"] for node in row["nodes"]] == ["", "", ""]
    assert "Add." in rig.tokenizer.decode(row["prompt_ids"])
