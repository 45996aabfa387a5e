"""Which turn a conversation continues: by ids, by meaning, and where it is another than the harness would think."""

from __future__ import annotations

import json
from typing import Any

import pytest
from wire_clients import Chat

from gateway_rig import CALL, Rig
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
async def test_a_call_written_as_text_continues_its_turn(tokenizer: Tokenizer, head: str) -> None:
    """smolagents writes the calls behind the assistant's text, and the result as a user's message."""
    rig = Rig(tokenizer)
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
async def test_a_text_that_only_names_a_call_is_what_the_harness_sent(tokenizer: Tokenizer, text: str) -> None:
    rig = Rig(tokenizer)
    client, call = await called(rig)
    text = text.replace("ID", call["id"]) if "EDITED" not in text else text
    text = text.replace("EDITED", written(call, arguments={"a": 999})).replace("CALL", written(call))
    client.items.append({"role": "assistant", "content": text})
    client.user("go on")
    await client.ask()
    assert text in tokenizer.decode(rig.engine.seen[-1])
    assert len(await rig.rows()) == 2
    assert (await rig.http.get("/sessions")).json()["breaks"] == {"edited arguments": 1}


async def test_a_named_response_is_continued_and_not_its_twin(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer)
    rig.engine.texts = ["same", "same", "end", "again"]
    await rig.post("/v1/responses", {"input": "x"})
    second = await rig.post("/v1/responses", {"input": "x"})
    third = await rig.post("/v1/responses", {"input": "y", "previous_response_id": second["id"]})
    await rig.post("/v1/responses", {"input": "z", "previous_response_id": third["id"]})
    *_, last = rig.session().nodes.values()
    assert [f"resp_{node.id}" for node in last.path()[:2]] == [second["id"], third["id"]]
    assert sorted(len(row["nodes"]) for row in await rig.rows()) == [1, 3]


async def test_a_thread_goes_on_from_the_message_that_it_names(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer)
    rig.engine.texts = ["same", "same", "end"]
    asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 50}
    await rig.post("/v1/messages", asked)
    second = await rig.post("/v1/messages", asked)
    thread = {"type": "continue", "previous_message_id": second["id"]}
    await rig.post("/v1/messages", {**asked, "thread": thread})
    *_, last = rig.session().nodes.values()
    assert f"msg_{last.path()[0].id}" == second["id"]
