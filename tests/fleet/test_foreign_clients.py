"""Through a fleet's pauses and sleeps, clients that know nothing of us get whole answers from the router."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import torch

from patience import WAIT_S
from penstock.control_types import PauseMode
from penstock.fleet.fleet import Fleet
from penstock.types import SamplingParams
from sim_fleets import in_flight, slowed, stepped

TOKENS = 1200
BODY = {"model": "sim-model", "prompt": [1, 2, 3], "max_tokens": TOKENS, "n": 2}


@pytest.fixture(scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    async with Fleet.launch("sim-model", 2, profile="sim", max_model_len=4096) as fleet:
        yield fleet


async def ask(fleet: Fleet) -> tuple[list[str], list[list[int]]]:
    """How each choice of a plain request ended, and the versions of the first."""
    async with aiohttp.ClientSession() as session, session.post(f"{fleet.url}/v1/completions", json=BODY) as answer:
        choices = (await answer.json())["choices"]
        return [c["finish_reason"] for c in choices], json.loads(answer.headers["X-Penstock-Weight-Versions"])[0]


async def paused(fleet: Fleet) -> None:
    await fleet.pause_generation(PauseMode.ABORT)
    await fleet.resume_generation()


async def asleep_and_updated(fleet: Fleet) -> None:
    await fleet.pause_generation(PauseMode.ABORT)
    await fleet.sleep(2)
    await fleet.wake_up(["weights"])
    await fleet.update_weights([("w", torch.ones(2))])
    await fleet.wake_up(["kv_cache"])
    await fleet.resume_generation()


@pytest.mark.parametrize(("between", "updates"), [(paused, 0), (asleep_and_updated, 1)])
async def test_the_answer_of_a_client_that_knows_nothing_of_us_is_whole(
    fleet: Fleet, between: Any, updates: int
) -> None:
    start = fleet.weight_version
    async with slowed(fleet):
        foreign = asyncio.create_task(ask(fleet))
        ours = asyncio.create_task(fleet.sample([4, 5], 2, SamplingParams(max_tokens=TOKENS)))
        await in_flight(fleet, lambda samples: samples == 4)
        await stepped(fleet, 4)
        await between(fleet)
    reasons, spans = await asyncio.wait_for(foreign, WAIT_S)
    assert reasons == ["length"] * 2
    assert [version for version, _, _ in spans] == list(range(start, start + updates + 1))
    assert (spans[0][1], spans[-1][2]) == (0, TOKENS)
    for sample in await asyncio.wait_for(ours, WAIT_S):
        assert [span.version for span in sample.spans] == list(range(start, start + updates + 1))
    assert fleet.counters.continued == 0, "our client sends nothing again either"
