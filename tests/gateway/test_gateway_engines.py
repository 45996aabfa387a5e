"""The gateway over engines: rows replayed under the version that each token claims, through updates and a death."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest
import torch

from gateway_rig import KEY, auth
from http_engine import HTTPEngine
from nano_models import changed, logprobs_of
from penstock import Fleet
from penstock.gateway.app import build_app
from penstock.gateway.service import Gateway, Tenant
from penstock.gateway.turn import GatewayOptions
from penstock.rollout.chat_template import ChatTemplate
from penstock.rollout.environment import Environment, Task, Turn
from penstock.rollout.episodes import MultiTurnGenerator, Sampler
from penstock.rollout.generator import GeneratorInput, Trajectory
from penstock.rollout.tokenizer import Tokenizer
from penstock.sim.tokens import Model
from penstock.types import Sample, SamplingParams, VersionSpan
from sim_fleets import generated, in_flight, slowed
from sim_verify import verify


class Harness:
    """Chats over one wire, with a gateway over real clients of engines."""

    def __init__(self, client: Sampler, tokenizer: Tokenizer, max_model_len: int = 512) -> None:
        options = GatewayOptions("m", max_model_len)
        self.gateway = Gateway(client, ChatTemplate(tokenizer), options, [Tenant("a", KEY)])
        transport = httpx.ASGITransport(build_app(self.gateway))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=auth(KEY), timeout=120)

    async def chat(self, session: str, messages: list[Any], max_tokens: int = 24) -> None:
        """Ask with OpenAI's own client, and put the answer and a question behind the messages."""
        client = openai.AsyncOpenAI(
            api_key=KEY, base_url=f"http://127.0.0.1/s/{session}/v1", http_client=self.http, timeout=120
        )
        answer = await client.chat.completions.create(model="m", messages=messages, max_tokens=max_tokens)
        messages.append(answer.choices[0].message.model_dump())
        messages.append({"role": "user", "content": f"more {len(messages)}"})

    async def message(self, session: str, messages: list[Any], max_tokens: int = 24) -> None:
        answer = await self.http.post(
            f"/s/{session}/v1/messages", json={"messages": messages, "max_tokens": max_tokens, "stream": False}
        )
        assert answer.status_code == 200, answer.text
        messages.append({"role": "assistant", "content": answer.json()["content"]})
        messages.append({"role": "user", "content": f"more {len(messages)}"})

    async def rows(self, session: str) -> list[dict[str, Any]]:
        answer = await self.http.get(f"/sessions/{session}/rows")
        return [json.loads(line) for line in answer.text.splitlines()]


class Asks(Environment):
    def train_task(self, index: int) -> Task:
        return Task(f"t{index}", f"say {index}")

    def heldout_tasks(self, n: int) -> list[Task]:
        return [self.train_task(-1 - i) for i in range(n)]

    def reward(self, task: Task, response_text: str) -> float:
        del task
        return float(len(response_text) % 2)

    async def step(self, task: Task, responses: Sequence[str]) -> Turn | None:
        return Turn(f"and {task.id}?", done=len(responses) == 3)


def check_simulated(row: dict[str, Any]) -> None:
    """Every token and logprob of each turn is that of its context and claimed versions."""
    ids = [*row["prompt_ids"], *row["response_ids"]]
    start = len(row["prompt_ids"])
    for node in row["nodes"]:
        begin, end = node["end"] - node["tokens"], node["end"]
        spans = [VersionSpan(v, i, i + 1) for i, v in enumerate(row["versions"][begin:end])]
        sample = Sample(
            tuple(row["response_ids"][begin:end]), node["finish"], tuple(row["logprobs"][begin:end]), tuple(spans)
        )
        params = SamplingParams(max_tokens=node["tokens"], stop_token_ids=(2,))
        wrong = verify(ids[: start + begin], sample, params=params, model=Model(vocab_size=1024))
        assert wrong == []


def as_row(t: Trajectory) -> dict[str, Any]:
    """An episode of an environment's turns in the form of the gateway's rows."""
    nodes: list[dict[str, Any]] = []
    begin = 0
    for end, _ in t.turn_rewards:
        finish = "stop" if t.response_ids[end - 1] == 2 else "length"
        nodes.append({"end": end, "tokens": sum(t.loss_mask[begin:end]), "finish": finish})
        begin = end
    names = ("prompt_ids", "response_ids", "loss_mask", "logprobs", "versions")
    return {"nodes": nodes, **{name: getattr(t, name) for name in names}}


async def test_rows_are_exact_through_updates_and_a_death_in_mid_turn(tokenizer: Tokenizer) -> None:
    """Two engine processes behind a router; sixteen sessions while the weights change, and one engine is killed.

    Sixteen episodes of an environment's turns (R28) go through the same.
    """
    async with Fleet.launch(
        "sim-model",
        engines=2,
        profile="sim",
        max_model_len=512,
        control_timeout_s=60.0,
        restart_backoff_s=0.05,
        extra_args={"tokens-per-second": 300},
    ) as fleet:
        harness = Harness(fleet, tokenizer)

        async def episode(number: int) -> None:
            messages: list[Any] = [{"role": "user", "content": f"question {number}"}]
            for _ in range(4):
                await harness.chat(f"s{number}", messages, 60)

        playing = [asyncio.create_task(episode(number)) for number in range(16)]
        batch = GeneratorInput([Asks().train_task(i) for i in range(8)], num_samples=2)
        generator = MultiTurnGenerator(fleet, tokenizer, Asks(), SamplingParams(max_tokens=60), 32)
        turning = asyncio.create_task(generator.generate(batch))
        async with slowed(fleet):  # so that all first turns meet all that comes
            await in_flight(fleet, lambda requests: requests == 32)
            for value in range(2):
                await generated(fleet, 50)
                await asyncio.wait_for(fleet.update_weights([("w", torch.full((64,), float(value)))]), 60)
            await generated(fleet, 50)
            process = fleet._roster.members[0].process
            assert process is not None
            os.killpg(process.pid, signal.SIGKILL)
            await asyncio.wait_for(fleet.update_weights([("w", torch.full((64,), 7.0))]), 60)
        await asyncio.wait_for(asyncio.gather(*playing), 120)
        versions: set[int] = set()
        for number in range(16):
            (row,) = await harness.rows(f"s{number}")
            assert len(row["nodes"]) == 4
            check_simulated(row)
            versions |= set(row["versions"])
        assert len(versions) >= 3
        output = await asyncio.wait_for(turning, 120)
        for t in output.trajectories:
            check_simulated(as_row(t))
        assert len({version for t in output.trajectories for version in t.versions}) >= 3


async def replayed(engine: HTTPEngine, ids: Sequence[int]) -> list[float | None]:
    """Logprob of each token given those before it, as the engine computes a prompt."""
    body = {"prompt": list(ids), "max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}
    answer = await engine.data.http.post("/v1/completions", body, timeout_s=60.0)
    found = answer["choices"][0]["prompt_logprobs"]
    return [None, *(given[str(token)]["logprob"] for token, given in zip(ids[1:], found[1:], strict=True))]


async def check_replayed(live: Any, prompt: Sequence[int], t: dict[str, Any]) -> int:
    """Hold the trained tokens of a row against the engine's prompt logprobs, or the model of their version."""
    ids = [*prompt, *t["response_ids"]]
    now = live.engine.weight_version
    again: dict[int, Sequence[float | None]] = {now: (await replayed(live.engine, ids))[len(prompt) :]}
    for version in set(t["versions"]) - {now}:
        again[version] = logprobs_of(live.history.models[version], prompt, t["response_ids"])
    shifted = (await replayed(live.engine, ids[1:]))[len(prompt) - 1 :]  # one token is missing at the beginning
    differ = 0
    for i, (mask, version) in enumerate(zip(t["loss_mask"], t["versions"], strict=True)):
        if not mask:
            continue
        expected = again[version][i]
        assert expected is not None
        assert abs(expected - t["logprobs"][i]) < 1e-4, (i, version)
        other = shifted[i]
        differ += other is not None and abs(other - t["logprobs"][i]) > 1e-3
    trained = sum(t["loss_mask"])
    assert differ > 0.8 * trained
    return trained


@pytest.mark.vllm
@pytest.mark.timeout(400)
async def test_real_rows_equal_the_engine_s_own_prompt_logprobs(live: Any, tokenizer: Tokenizer) -> None:
    """Both wires, several sessions at once, an update in the middle, a retry and a branch; then turns of R28."""
    harness = Harness(live.engine, tokenizer)

    async def episode(number: int, ask: Any) -> None:
        messages: list[Any] = [{"role": "user", "content": f"question {number}"}]
        for _ in range(3):
            await ask(f"s{number}", messages)
        messages[2]["content"] = "another"  # a branch after the first answer
        await ask(f"s{number}", messages[:3])

    with live.hold.at(6):
        playing = [asyncio.create_task(episode(i, (harness.chat, harness.message)[i % 2])) for i in range(4)]
        await live.hold.reached(2)  # an answer may end by itself before that, but not each of its session's
        await live.update(changed(live.history.latest, 77))
    await asyncio.gather(*playing)
    sampled = trained = 0
    for i in range(4):
        rows = await harness.rows(f"s{i}")
        assert len(rows) >= 2
        for row in rows:
            trained += await check_replayed(live, row["prompt_ids"], row)
        sampled += harness.gateway.find(Tenant("a", KEY), f"s{i}").sampled_tokens
    assert trained == sampled
    generator = MultiTurnGenerator(live.engine, tokenizer, Asks(), SamplingParams(max_tokens=20), 8)
    output = await generator.generate(GeneratorInput([Asks().train_task(i) for i in range(3)], num_samples=2))
    for t in output.trajectories:
        await check_replayed(live, t.prompt_ids, as_row(t))
