"""Clients that know nothing of us get whole answers through pauses with abort and sleeps of the simulated engine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest
import torch
from sim_http import Client, sim_client

from patience import WAIT_S
from penstock.engine.control import ControlClient
from penstock.sim import SimConfig
from penstock.weights.shared_memory import SharedMemoryStore

TOKENS = 60
CONFIG = SimConfig(tokens_per_second=1000)
VERSIONS = itertools.count(1)


@pytest.fixture
async def engine() -> AsyncIterator[tuple[Client, ControlClient]]:
    async with sim_client(CONFIG) as sim:
        control = ControlClient("e", sim.server.url)
        yield sim, control
        await control.close()


async def made(sim: Client, tokens: int) -> None:
    stats = sim.server.engine.stats
    until = stats.generation_tokens + tokens
    async with asyncio.timeout(WAIT_S):
        while stats.generation_tokens < until:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0)


async def still(sim: Client) -> bool:
    """No token is made in a tenth of a second, in which 100 could be."""
    before = sim.server.engine.stats.generation_tokens
    await asyncio.sleep(0.1)
    return sim.server.engine.stats.generation_tokens == before


async def update(control: ControlClient) -> None:
    store = SharedMemoryStore()
    version = next(VERSIONS)
    await control.prepare_weights(store.publish(version, [("w", torch.ones(2))]))
    await control.apply_weights(version)
    store.close()


BODY = {"model": "sim-model", "max_tokens": TOKENS, "seed": 5}
KINDS = {
    "tokens": lambda sim: sim.generate(TOKENS, seed=5, n=2),
    "completion": lambda sim: sim.post("/v1/completions", {**BODY, "prompt": [1, 2], "n": 2}),
    "chat": lambda sim: sim.post("/v1/chat/completions", {**BODY, "messages": [{"role": "user", "content": "a"}]}),
    "chat stream": lambda sim: sim.events(
        "/v1/chat/completions", {**BODY, "messages": [{"role": "user", "content": "a"}], "stream": True}
    ),
}


def told(answer):
    """Without names and times; of a stream its text, however it was cut in pieces, and its end."""
    if isinstance(answer, list):
        choices = [c for event in answer if isinstance(event, dict) for c in event["choices"]]
        text = "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)
        return text, [c["finish_reason"] for c in choices if c["finish_reason"]], answer[-1]
    return {key: value for key, value in answer.items() if key not in ("id", "request_id", "created")}


@pytest.mark.parametrize("how", ["/pause?mode=abort", "/sleep?level=1", "/sleep?level=2"])
@pytest.mark.parametrize("kind", KINDS)
async def test_it_sees_nothing_but_a_delay(engine, kind, how):
    sim, control = engine
    undisturbed = told(await KINDS[kind](sim))
    request = asyncio.create_task(KINDS[kind](sim))
    await made(sim, 20)
    await sim.post(how)
    assert await still(sim)
    assert not request.done()
    await sim.post("/resume" if "pause" in how else "/wake_up")
    if "2" in how:
        assert await still(sim), "there are no weights"
        await update(control)
        # Other weights make other tokens behind the update: all of them, to the end.
        answer = told(await request)
        reasons = answer[1] if isinstance(answer, tuple) else [c["finish_reason"] for c in answer["choices"]]
        assert set(reasons) == {"length"}
    else:
        assert told(await request) == undisturbed


async def test_who_paused_resumes_and_no_wake_up_does(engine):
    sim, control = engine
    request = asyncio.create_task(sim.generate(TOKENS))
    await made(sim, 10)
    await sim.post("/pause?mode=abort")
    await sim.post("/sleep?level=1")
    await sim.post("/wake_up")
    assert await still(sim)
    await update(control)
    assert await still(sim), "an update of an engine that is paused leaves it paused"
    await sim.post("/resume")
    assert (await request)["choices"][0]["finish_reason"] == "length"


async def test_a_resume_while_the_memory_is_away_waits_for_it(engine):
    sim, _ = engine
    request = asyncio.create_task(sim.generate(TOKENS))
    await made(sim, 10)
    await sim.post("/pause?mode=keep")
    await sim.post("/sleep?level=1")
    await sim.post("/resume")
    assert await still(sim)
    await sim.post("/wake_up?tags=weights")
    assert await still(sim)
    await sim.post("/wake_up?tags=kv_cache")
    assert (await request)["choices"][0]["finish_reason"] == "length"


async def test_dropped_weights_that_came_natively_count(engine):
    sim, control = engine
    await control.native.init({})
    await sim.post("/sleep?level=2")
    await sim.post("/wake_up?tags=weights")
    await control.native.update({}, version=5)
    request = asyncio.create_task(sim.generate(TOKENS))
    assert await still(sim), "KV is not back"
    await sim.post("/wake_up?tags=kv_cache")
    (choice,) = (await request)["choices"]
    assert choice["weight_versions"] == [{"version": "5", "start": 0, "end": TOKENS}]


@pytest.mark.parametrize("ending", ["/abort_requests", "/pause?mode=abort&release=true"])
async def test_it_ends_early_where_that_was_asked_for(engine, ending):
    sim, _ = engine
    request = asyncio.create_task(sim.generate(TOKENS))
    await made(sim, 10)
    await sim.post("/pause?mode=abort")
    await sim.post(ending, {})
    (choice,) = (await request)["choices"]
    assert choice["finish_reason"] == "abort"
    assert 0 < len(choice["token_ids"]) < TOKENS
    await sim.post("/resume")
    assert (await sim.generate(3))["choices"][0]["finish_reason"] == "length"
