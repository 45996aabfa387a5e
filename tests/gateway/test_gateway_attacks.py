"""Faults that an attack on the gateway found: each test failed before its mend."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from wire_clients import WIRES, Chat

from gateway_rig import KEY, THOUGHT, Rig, auth
from penstock.errors import ConfigError
from penstock.gateway.agent import AgentGenerator, Episode
from penstock.gateway.app import serving
from penstock.gateway.graph import Limits
from penstock.gateway.messages import ToolCall
from penstock.gateway.responses import ResponsesDialect
from penstock.rollout.environment import Environment, Task
from penstock.rollout.generator import GeneratorInput
from penstock.rollout.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"


def test_many_items_of_an_assistant_are_joined_in_linear_time() -> None:
    """40,000 of them took eleven seconds."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    began = time.process_time()
    request = ResponsesDialect().read({"input": [{"role": "user", "content": "x"}, *[call] * 40_000]})
    assert time.process_time() - began < 4
    assert [len(message.calls) for message in request.messages] == [0, 40_000]


async def test_half_a_character_in_a_call_is_no_500(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer)
    rig.engine.texts = ['<tool_call>\n{"name": "add", "arguments": {"a": "\\ud800"}}\n</tool_call>']
    tool = {"name": "add", "input_schema": {"type": "object"}}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 200, "tools": [tool]}
    answer = await rig.post("/v1/messages", body)
    assert answer["content"][0]["name"] == "add"


@pytest.mark.parametrize("wire", WIRES)
async def test_edited_reasoning_is_a_branch(tokenizer: Tokenizer, wire: type[Chat]) -> None:
    rig = Rig(tokenizer)
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


async def test_a_call_that_was_removed_is_an_edit(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer)
    rig.engine.texts = [f'{THOUGHT}<tool_call>\n{{"name": "add", "arguments": {{"a": 1}}}}\n</tool_call>', "done"]
    tool = {"name": "add", "input_schema": {"type": "object"}}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 200, "tools": [tool]}
    blocks = (await rig.post("/v1/messages", body))["content"]
    kept = [block for block in blocks if block["type"] == "thinking"]
    body["messages"] += [
        {"role": "assistant", "content": [*kept, {"type": "text", "text": "I shall not add"}]},
        {"role": "user", "content": "go on"},
    ]
    await rig.post("/v1/messages", body)
    assert len(await rig.rows()) == 2
    assert (await rig.http.get("/sessions")).json()["breaks"] == {"edited arguments": 1}


async def test_a_later_turn_continues_the_sibling_whose_ids_it_carries(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer)
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


async def test_a_session_cannot_lift_its_tenant_s_limits(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer, limits=Limits(max_turns=1))
    opened = await rig.post("/sessions", {"max_turns": 99, "max_tokens": 500})
    body = {"messages": [{"role": "user", "content": "x"}]}
    await rig.post(CHAT, body, **auth(opened["api_key"]))
    refused = await rig.http.post(CHAT, json=body, headers=auth(opened["api_key"]))
    assert refused.json()["error"]["code"] == "budget_exceeded"


def test_equal_numbers_are_no_edit() -> None:
    assert ToolCall("a", "f", '{"x": 1.0}').meaning == ToolCall("a", "f", '{"x": 1}').meaning
    assert ToolCall("a", "f", '{"x": 1.5}').meaning != ToolCall("a", "f", '{"x": 1}').meaning


async def test_a_path_without_v1_says_so(tokenizer: Tokenizer) -> None:
    answer = await Rig(tokenizer).http.post("/chat/completions", json={})
    assert answer.status_code == 404
    assert "ends in /v1" in answer.json()["error"]["message"]


class Tasks(Environment):
    def train_task(self, index: int) -> Task:
        return Task(f"t{index}", "x", {"answer": "hidden", "n": index})

    def heldout_tasks(self, n: int) -> list[Task]:
        return [self.train_task(-1 - i) for i in range(n)]

    def reward(self, task: Task, response_text: str) -> float:
        del task, response_text
        return 1.0


async def rewards(rig: Rig, agent: Any, numbers: Sequence[int], timeout_s: float = 30.0) -> list[float]:
    async with serving(rig.gateway) as base:
        made = AgentGenerator(rig.gateway, base, rig.tenant, Tasks(), agent, timeout_s=timeout_s)
        return (await made.generate(GeneratorInput([Tasks().train_task(i) for i in numbers]))).rewards


async def ask(rig: Rig, episode: Episode) -> None:
    await rig.post(CHAT, {"messages": [{"role": "user", "content": "x"}]}, **auth(episode.api_key))


@pytest.mark.parametrize("error", [OSError("no descriptors"), asyncio.CancelledError()])
async def test_an_episode_s_error_ends_that_episode_alone(tokenizer: Tokenizer, error: BaseException) -> None:
    rig = Rig(tokenizer)

    async def agent(episode: Episode) -> float:
        await ask(rig, episode)
        if episode.task.metadata["n"]:
            raise error
        return 0.5

    assert await rewards(rig, agent, [0, 1]) == [0.5, 0.0]


async def test_an_agent_that_swallows_its_cancellation_has_no_reward(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer)

    async def agent(episode: Episode) -> float:
        await ask(rig, episode)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return 1.0
        return 0.0

    assert await rewards(rig, agent, [0], timeout_s=6.0) == [0.0]


def test_an_agent_gets_no_hidden_answer() -> None:
    episode = Episode(Tasks().train_task(0), "http://127.0.0.1:1", KEY, "m", "s")
    assert "hidden" not in str(episode.environment())


def test_a_misspelled_place_of_a_command_is_refused(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer)
    with pytest.raises(ConfigError, match=r"has '\{promt\}'; known: \{prompt\}"):
        AgentGenerator(rig.gateway, "", rig.tenant, Tasks(), ["run", "{promt}"])
