"""Faults that an attack on the gateway found: each test failed before its mend."""

from __future__ import annotations

import json

import pytest
from wire_clients import WIRES, Chat

from gateway_rig import THOUGHT, Rig
from penstock.gateway.messages import ToolCall


async def test_half_a_character_in_a_call_is_no_500(rig: Rig) -> None:
    rig.engine.texts = ['<tool_call>\n{"name": "add", "arguments": {"a": "\\ud800"}}\n</tool_call>']
    tool = {"name": "add", "input_schema": {"type": "object"}}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 200, "tools": [tool]}
    answer = await rig.post("/v1/messages", body)
    assert answer["content"][0]["name"] == "add"


@pytest.mark.parametrize("wire", WIRES)
async def test_edited_reasoning_is_a_branch(rig: Rig, wire: type[Chat]) -> None:
    rig.engine.texts = [f"{THOUGHT}five", "six", "seven"]
    client = wire(rig)
    client.user("x")
    answer = await client.ask()
    client.echo(json.loads(json.dumps(answer).replace("let me see", "no idea")))
    client.user("y")
    client.echo(await client.ask())
    client.user("z")
    await client.ask()  # continues the branch
    rows = await rig.rows()
    assert sorted(len(row["nodes"]) for row in rows) == [1, 2]
    assert (await rig.http.get("/sessions")).json()["breaks"] == {"edited reasoning": 1}


async def test_a_later_turn_continues_the_sibling_whose_ids_it_carries(rig: Rig) -> None:
    rig.engine.texts = ["same", "same", "same again", "same again", "end"]
    asked = [{"role": "user", "content": "x"}]
    first = await rig.post("/v1/responses", {"input": asked})
    second = await rig.post("/v1/responses", {"input": asked})
    both = [[*asked, *given["output"], {"role": "user", "content": "y"}] for given in (first, second)]
    for items in both:
        items.extend((await rig.post("/v1/responses", {"input": items}))["output"])
    stripped = {
        name: value for name, value in both[0][-1].items() if name != "id"
    }  # only the first answer's id is left
    await rig.post("/v1/responses", {"input": [*both[0][:-1], stripped, {"role": "user", "content": "z"}]})
    *_, last = rig.session().nodes.values()
    assert last.path()[0].id in first["id"]


def test_equal_numbers_are_no_edit() -> None:
    assert ToolCall("a", "f", '{"x": 1.0}').meaning == ToolCall("a", "f", '{"x": 1}').meaning
    assert ToolCall("a", "f", '{"x": 1.5}').meaning != ToolCall("a", "f", '{"x": 1}').meaning
