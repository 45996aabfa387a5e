"""Which turn a conversation continues: by ids, by meaning, and where it is another than the harness would think."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from wire_clients import WIRES, Chat

from gateway_rig import CALL, THOUGHT, Rig
from penstock.rollout.tokenizer import Tokenizer


def written(call: dict[str, Any], **changed: Any) -> str:
    """A call as smolagents writes it into a text."""
    function = {"name": "add", "arguments": json.loads(call["function"]["arguments"]), **changed}
    return str([{"id": call["id"], "type": "function", "function": function}])


async def called(rig: Rig) -> tuple[Chat, dict[str, Any]]:
    rig.engine.texts = [f"so\n{CALL}", "5"]
    client = Chat(rig)
    client.user("add")
    (call,) = (await client.ask())["tool_calls"]
    return client, call


@pytest.mark.parametrize("head", ["so\nCalling tools:\n", "so\n"])
async def test_a_call_written_as_text_continues_its_turn(rig: Rig, head: str) -> None:
    """smolagents writes the calls behind the assistant's text, and the result as a user's message."""
    client, call = await called(rig)
    client.items.append({"role": "assistant", "content": head + written(call)})
    client.user("Observation: 5")
    await client.ask()
    (row,) = await rig.rows()
    assert len(row["nodes"]) == 2


@pytest.mark.parametrize(
    "text",
    [
        "SUMMARY: I called add (ID) with a=999, the user now wants tea",
        "The tool add failed, ID. Forget it.",
        "so\nCalling tools:\nEDITED",
        "so\nCalling tools:\nCALL and then I slept",
        "The tool add failed, forget it:\nCALL",
        "Calling tools:\nCALL",
        "so\nCalling tools:\n['add', 'ID']",
        "so\nCalling tools:\n[{'id': 'ID', 'name': 'add', 'arguments': {1, 2}}]",
        "so\nCalling tools:\n[{'id': 'ID', 'name': 'add'",
    ],
)
async def test_a_text_that_only_names_a_call_is_what_the_harness_sent(rig: Rig, text: str) -> None:
    client, call = await called(rig)
    text = text.replace("ID", call["id"]) if "EDITED" not in text else text
    text = text.replace("EDITED", written(call, arguments={"a": 999})).replace("CALL", written(call))
    client.items.append({"role": "assistant", "content": text})
    client.user("go on")
    await client.ask()
    assert text in rig.tokenizer.decode(rig.engine.seen[-1])
    assert len(await rig.rows()) == 2
    assert (await rig.http.get("/sessions")).json()["breaks"] == {"edited arguments": 1}


async def test_a_named_response_is_continued_and_not_its_twin(rig: Rig) -> None:
    rig.engine.texts = ["same", "same", "end", "again"]
    await rig.post("/v1/responses", {"input": "x"})
    second = await rig.post("/v1/responses", {"input": "x"})
    third = await rig.post("/v1/responses", {"input": "y", "previous_response_id": second["id"]})
    await rig.post("/v1/responses", {"input": "z", "previous_response_id": third["id"]})
    *_, last = rig.session().nodes.values()
    assert [f"resp_{node.id}" for node in last.path()[:2]] == [second["id"], third["id"]]
    assert sorted(len(row["nodes"]) for row in await rig.rows()) == [1, 3]


# --- forms of equal meaning ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES)
async def test_reasoning_that_comes_back_empty_was_dropped(rig: Rig, wire: type[Chat]) -> None:
    """Clients with omitted thinking send an empty text with our signature."""
    rig.engine.texts = [f"{THOUGHT}five", "six"]
    client = wire(rig)
    client.user("x")
    client.echo(json.loads(json.dumps(await client.ask()).replace("let me see", "")))
    client.user("y")
    await client.ask()
    (row,) = await rig.rows()
    assert len(row["nodes"]) == 2


@pytest.mark.parametrize("wire", WIRES)
async def test_new_ids_of_calls_in_each_request_are_no_edit(rig: Rig, wire: type[Chat]) -> None:
    rig.engine.texts = [f"{CALL}\n{CALL.replace('1,', '2,')}", "mid", "end"]
    client = wire(rig)
    client.user("x")
    client.echo(await client.ask())
    begun = client.items
    for number in (1, 2):
        text = re.sub(r"\b(?:call|fc|toolu)_([0-9a-f]{24})", rf"new{number}-\1", json.dumps(begun))
        client.items = json.loads(text) + client.items[len(begun) :]
        client.echo(await client.ask())
        client.user("z")
    assert [len(row["nodes"]) for row in await rig.rows()] == [3]


async def test_results_that_change_their_calls_are_another_history(rig: Rig) -> None:
    rig.engine.texts = [f"{CALL}\n{CALL.replace('1,', '2,')}", "mid", "end"]
    client = Chat(rig)
    client.user("x")
    client.echo(await client.ask())
    client.echo(await client.ask())
    one, other = (item for item in client.items if item["role"] == "tool")
    one["tool_call_id"], other["tool_call_id"] = other["tool_call_id"], one["tool_call_id"]
    client.user("z")
    await client.ask()
    assert sorted(len(row["nodes"]) for row in await rig.rows()) == [2, 2]
    assert (await rig.http.get("/sessions")).json()["breaks"] == {"edited history": 1}


@pytest.mark.parametrize("given", ["5", '{"q": 1}', '"text"'])
async def test_a_custom_call_with_any_input_continues(rig: Rig, given: str) -> None:
    rig.engine.texts = [f'<tool_call>\n{{"name": "run", "arguments": {{"input": {given}}}}}\n</tool_call>', "done"]
    body: dict[str, Any] = {"input": [{"role": "user", "content": "x"}], "tools": [{"type": "custom", "name": "run"}]}
    (call,) = (await rig.post("/v1/responses", body))["output"]
    assert call["input"] == given.strip('"')
    body["input"] += [call, {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "ok"}]
    await rig.post("/v1/responses", body)
    assert [len(row["nodes"]) for row in await rig.rows()] == [2]


@pytest.mark.parametrize("policy", ["extend", "faithful"])
async def test_half_a_character_in_a_call_s_arguments_is_rendered_as_json(tokenizer: Tokenizer, policy: str) -> None:
    rig = Rig(tokenizer, policy=policy)
    client = Chat(rig)
    client.user("x")
    function = {"name": "add", "arguments": '{"a": "\\ud800"}'}
    call = {"id": "c", "type": "function", "function": function}
    client.items.append({"role": "assistant", "content": None, "tool_calls": [call]})
    client.items.append({"role": "tool", "tool_call_id": "c", "content": "5"})
    await client.ask()
    assert '{"a": "\\ud800"}' in tokenizer.decode(rig.engine.seen[0])
