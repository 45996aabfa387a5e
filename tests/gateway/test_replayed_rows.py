"""Rows of all three wires replayed: by engines started afresh for each version, and through an update that keeps KV."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gateway_engines import Harness

from gateway_rig import KEY
from http_engine import HTTPEngine
from nano_models import changed
from penstock.engine.command import server_command
from penstock.engine.launch import EngineProcess
from penstock.gateway.service import Tenant
from penstock.rollout.tokenizer import Tokenizer
from penstock.settings import EngineConfig

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

TENANT = Tenant("a", KEY)


async def turn(harness: Harness, wire: int, session: str, said: list[Any], most: int, **sampling: float) -> None:
    """Ask over a wire, and put the answer and a question behind what was said."""
    path, name, limit = (
        ("chat/completions", "messages", "max_tokens"),
        ("responses", "input", "max_output_tokens"),
        ("messages", "messages", "max_tokens"),
    )[wire]
    answer = await harness.http.post(f"/s/{session}/v1/{path}", json={**sampling, name: said, limit: most})
    assert answer.status_code == 200, answer.text
    given = answer.json()
    if wire == 0:
        said.append(given["choices"][0]["message"])
    elif wire == 1:
        said.extend(given["output"])
    else:
        said.append({"role": "assistant", "content": given["content"]})
    said.append({"role": "user", "content": f"more {len(said)}"})


async def computed(engine: HTTPEngine, ids: Sequence[int], temperature: float) -> list[float]:
    """Logprob of each token but the first, as the engine computes a prompt, at a temperature."""
    body = {"prompt": list(ids), "max_tokens": 1, "prompt_logprobs": -1}
    answer = await engine.data.http.post("/v1/completions", body, timeout_s=60.0)
    found: list[float] = []
    for token, given in zip(ids[1:], answer["choices"][0]["prompt_logprobs"][1:], strict=True):
        values = torch.tensor([entry["logprob"] for entry in given.values()]) / temperature
        found.append(given[str(token)]["logprob"] / temperature - float(values.logsumexp(0)))
    return found


async def fresh_engine(stack: AsyncExitStack, live: Any, version: int, folder: Path) -> HTTPEngine:
    """Start an engine from files with the weights of a version."""
    shutil.copytree(live.model_path, folder)
    live.history.models[version].save_pretrained(folder)
    config = EngineConfig(
        model=str(folder), max_model_len=1024, dtype="float32", profile="cpu", extra_args={"max-logprobs": -1}
    )
    process = await EngineProcess.launch(server_command(config, api_key=KEY), name=folder.name, log_dir=folder)
    stack.push_async_callback(process.stop)
    engine = await HTTPEngine.connect(process.url, name=folder.name, api_key=KEY)
    stack.push_async_callback(engine.teardown)
    return engine


@pytest.mark.slow
async def test_rows_are_what_fresh_engines_of_their_versions_compute(
    live: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """An update in the middle, two temperatures; with one token less at the beginning the logprobs are others."""
    harness = Harness(live.engine, tokenizer, 1024)
    temperatures = {f"s{i}": (1.0, 0.7)[i // 3] for i in range(6)}

    async def episode(number: int) -> None:
        said: list[Any] = [{"role": "user", "content": f"question {number}"}]
        for _ in range(3):
            await turn(harness, number % 3, f"s{number}", said, 40, temperature=temperatures[f"s{number}"])

    before = live.engine.weight_version
    with live.hold.at(10):
        playing = [asyncio.create_task(episode(number)) for number in range(6)]
        await live.hold.reached(3)  # an answer may end by itself before that, but not each of its session's
        after = (await live.update(changed(live.history.latest, 78))).version
    await asyncio.gather(*playing)
    seen: set[int] = set()
    async with AsyncExitStack() as stack:
        fresh = {
            version: await fresh_engine(stack, live, version, tmp_path / f"v{version}") for version in (before, after)
        }
        for name, temperature in temperatures.items():
            session = harness.gateway.find(TENANT, name)
            trained = differ = 0
            for row in session.rows():
                t = row.trajectory(reward=0.0)
                ids, start = [*t.prompt_ids, *t.response_ids], len(t.prompt_ids)
                again = {v: (await computed(fresh[v], ids, temperature))[start - 1 :] for v in set(t.versions)}
                shifted = {v: (await computed(fresh[v], ids[1:], temperature))[start - 2 :] for v in set(t.versions)}
                for i in (i for i, mask in enumerate(t.loss_mask) if mask):
                    assert abs(again[t.versions[i]][i] - t.logprobs[i]) < 1e-4, (name, i)
                    differ += abs(shifted[t.versions[i]][i] - t.logprobs[i]) > 1e-3
                    trained += 1
                seen |= set(t.versions)
            assert trained == session.sampled_tokens
            assert differ > 0.8 * trained
    assert seen == {before, after}


async def test_rows_through_an_update_that_keeps_kv_are_replayed_with_it_repeated(
    live: Any, tokenizer: Tokenizer
) -> None:
    harness = Harness(live.engine, tokenizer, 1024)
    conversations: list[list[Any]] = [[{"role": "user", "content": f"question {i}"}] for i in range(24)]

    async def ask(number: int) -> None:
        await turn(harness, number % 3, f"k{number}", conversations[number], 400)

    with live.hold.at(3):
        asking = [asyncio.create_task(ask(number)) for number in range(24)]
        await live.hold.reached(12)  # some answers may end by themselves before that
        kept = (await live.update(changed(live.history.latest, 79), "keep_in_flight")).engines[0].kept
    assert kept >= 12
    await asyncio.gather(*asking)
    await asyncio.gather(*(ask(number) for number in range(24)))
    crossed: list[float] = []
    shifted: list[float] = []
    for number in range(24):
        session = harness.gateway.find(TENANT, f"k{number}")
        for row in session.rows():
            context = list(row.leaf.path()[0].added)
            for node in row.leaf.path():
                context += node.added if node.parent else ()
                assert live.history.worst_difference(context, node.sample) < 1e-4
                shifted.append(live.history.worst_difference(context[1:], node.sample))
                spans = node.sample.spans
                if any(span.kv_kept for span in spans):
                    alone = replace(node.sample, spans=tuple(replace(span, kv_kept=False) for span in spans))
                    crossed.append(live.history.worst_difference(context, alone))
                context += node.sample.token_ids
    assert len(crossed) == kept
    for found in (shifted, crossed):
        assert sum(difference > 1e-3 for difference in found) > 0.8 * len(found)
