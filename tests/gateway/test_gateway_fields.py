"""Fields that are not served are refused or ignored, on each wire; and what rows say of sampling."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from wire_clients import Chat

from gateway_rig import Rig
from penstock.rollout.tokenizer import Tokenizer

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}]
    return {"input" if path == RESPONSES else "messages": messages, "model": "m", "max_tokens": 9, **fields}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"response_format": SCHEMA}),
        (CHAT, {"response_format": {"type": "json_object"}}),
        (CHAT, {"logit_bias": {"5": -100}}),
        (CHAT, {"functions": [{"name": "f"}]}),
        (RESPONSES, {"text": {"format": SCHEMA}}),
        (RESPONSES, {"background": True}),
        (RESPONSES, {"prompt": {"id": "p"}}),
        (MESSAGES, {"mcp_servers": [{"name": "s"}]}),
        (MESSAGES, {"output_config": {"format": SCHEMA}}),
    ],
)
async def test_fields_that_would_change_the_answer_are_refused(rig: Rig, path: str, fields: dict[str, Any]) -> None:
    answer = await rig.http.post(path, json=body_of(path, **fields))
    assert answer.status_code == 400
    assert f"{next(iter(fields))} is not served here" in answer.text
    assert rig.engine.seen == []


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"logprobs": True, "reasoning_effort": "high"}),
        (RESPONSES, {"reasoning": {"effort": "high"}, "truncation": "auto"}),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 9}}),
        (CHAT, {"response_format": {"type": "text"}, "logprobs": False, "user": "u", "store": False, "n": 1}),
        (RESPONSES, {"text": {"format": {"type": "text"}, "verbosity": "low"}, "include": ["x"], "store": True}),
        (MESSAGES, {"metadata": {"user_id": "u"}, "output_config": {"effort": "low"}, "stop_sequences": []}),
    ],
)
async def test_other_fields_are_ignored(rig: Rig, path: str, fields: dict[str, Any]) -> None:
    await rig.post(path, body_of(path, **fields))


async def test_a_row_says_how_each_turn_was_sampled(rig: Rig) -> None:
    client = Chat(rig)
    client.user("say")
    body = body_of(CHAT, temperature=0.5, top_p=0.9, top_k=7, seed=3, stop=["x"], repetition_penalty=1.5)
    await rig.post(CHAT, body)
    (row,) = await rig.rows()
    said = row["nodes"][0]["sampling"]
    sampled = rig.engine.params[0]
    assert {name: said[name] for name in ("temperature", "top_p", "top_k", "seed")} == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3,
    }  # fmt: skip
    assert said["stop"] == ["x"]
    assert said["repetition_penalty"] == sampled.repetition_penalty == 1.5
    assert said["max_tokens"] == sampled.max_tokens == 9


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_a_prefill_is_refused(rig: Rig, path: str) -> None:
    """A turn for it would put a second assistant's message behind the first."""
    body = body_of(path)
    body["input" if path == RESPONSES else "messages"].append({"role": "assistant", "content": "The answer is"})
    answer = await rig.http.post(path, json=body)
    assert answer.status_code == 400
    assert "the last message is the assistant's" in answer.text
    assert rig.engine.seen == []


async def test_a_developer_item_behind_a_named_response_is_a_message_of_its_own(rig: Rig) -> None:
    rig.engine.texts = ["one", "two", "three"]
    first = await rig.post(RESPONSES, {"instructions": "be kind", "input": "say"})
    developer = [{"role": "developer", "content": "be short"}, {"role": "user", "content": "more"}]
    second = await rig.post(RESPONSES, {"previous_response_id": first["id"], "input": developer})
    (row,) = await rig.rows()
    assert [node["cause"] for node in row["nodes"]] == ["", ""]
    text = rig.tokenizer.decode([*row["prompt_ids"], *row["response_ids"]])
    assert text.index("be kind") < text.index("one") < text.index("be short") < text.index("more")
    await rig.post(RESPONSES, {"previous_response_id": second["id"], "instructions": "be rude", "input": "again"})
    rows = await rig.rows()
    assert rows[-1]["nodes"][0]["cause"] == "other system prompt"
    text = rig.tokenizer.decode(rows[-1]["prompt_ids"])
    assert "be rude" in text
    assert "be kind" not in text
    assert "be short" in text


@pytest.mark.parametrize("role", ["user", "tool"])
async def test_a_text_with_our_marks_keeps_its_content(tokenizer: Tokenizer, role: str) -> None:
    from gateway_rig import CALL

    rig = Rig(tokenizer)
    rig.engine.texts = [CALL, "ok"]
    client = Chat(rig)
    client.user("begin")
    answer = await client.ask()
    text = "before penstock7mark3 between penstock7called3 after"
    client.items.append(answer)
    if role == "tool":
        client.items.append({"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": text})
    else:
        client.items.append({"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "5"})
        client.user(text)
    await client.ask()
    (row,) = await rig.rows()
    assert text in tokenizer.decode(row["response_ids"])


@pytest.mark.parametrize("what", ["tools", "calls", "messages"])
async def test_a_long_body_is_rendered_in_a_thread(
    tokenizer: Tokenizer, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is long of: 100,000 tools held up all sessions for two seconds."""
    rig = Rig(tokenizer, max_model_len=100_000)
    threads = set[int]()
    real = rig.gateway.codec.prompt_of

    def prompt_of(*given: Any) -> Any:
        threads.add(threading.get_ident())
        return real(*given)

    monkeypatch.setattr(rig.gateway.codec, "prompt_of", prompt_of)
    body, long = body_of(CHAT), "x" * 20_000
    if what == "tools":
        body["tools"] = [{"type": "function", "function": {"name": "add", "description": long}}]
    elif what == "calls":
        call = {"id": "c", "function": {"name": "add", "arguments": json.dumps({"a": long})}}
        body["messages"] += [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c"}]
    else:
        body["messages"] *= 1000
    await rig.post(CHAT, body)
    assert threads
    assert threading.get_ident() not in threads
    await rig.post(CHAT, body_of(CHAT))
    assert threading.get_ident() in threads
