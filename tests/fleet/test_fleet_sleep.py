"""A fleet that sleeps serves nothing before its memory is back, and its weights where it has dropped them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

from penstock import Fleet, SamplingParams
from penstock.errors import StateError
from sim_fleets import SIM, check_serves, whole

PROMPTS = [[7, 8, i] for i in range(1, 9)]
SHORT = SamplingParams(max_tokens=3)
LONG = SamplingParams(max_tokens=100)


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with Fleet.launch("sim", engines=2, **SIM) as fleet:
        yield fleet


def weights() -> list[tuple[str, torch.Tensor]]:
    return [("w", torch.randn(4))]


def asking(fleet: Fleet, params: SamplingParams = SHORT) -> asyncio.Task:
    return asyncio.create_task(fleet.generate(prompt_token_ids=PROMPTS, sampling_params=params))


async def waits(task: asyncio.Task) -> bool:
    done, _ = await asyncio.wait({task}, timeout=0.1)
    return not done


@pytest.mark.parametrize("tags", [[["weights"], ["kv_cache"]], [None]])
async def test_dropped_weights_are_not_served_however_it_wakes(fleet: Fleet, tags: list[list[str] | None]) -> None:
    running = asking(fleet, LONG)
    await asyncio.sleep(0.05)
    await fleet.sleep(level=2)
    late = asking(fleet)
    with pytest.raises(StateError, match="the engines sleep"):
        await fleet.update_weights(weights())
    for part in tags:
        await fleet.wake_up(part)
        assert await waits(late), "a fleet without weights answered"
    await fleet.pause_generation()
    await fleet.resume_generation()
    assert await waits(late), "a resume let a fleet without weights answer"
    report = await fleet.update_weights(weights())
    await whole(running, PROMPTS, LONG)
    out = await whole(late, PROMPTS, SHORT)
    assert {span.version for spans in out.response_spans for span in spans} == {report.version}
    await check_serves(fleet, engines=2)


async def test_new_weights_come_before_the_kv_cache(fleet: Fleet) -> None:
    """The order of a trainer that shares the GPU: its own memory is still there while it sends."""
    await fleet.sleep(level=2)
    await fleet.wake_up(["weights"])
    await fleet.update_weights(weights())
    late = asking(fleet)
    assert await waits(late), "an engine without KV cache answered"
    await fleet.wake_up(["kv_cache"])
    await whole(late, PROMPTS, SHORT)


@pytest.mark.parametrize("level", [1, 2])
async def test_the_memory_of_weights_comes_back_first(fleet: Fleet, level: int) -> None:
    await fleet.sleep(level=level)
    with pytest.raises(StateError, match=r"wake_up\(\['weights'\]\) before the KV cache, or both at once"):
        await fleet.wake_up(["kv_cache"])
    await fleet.wake_up(["kv_cache", "weights"])
    if level == 2:
        await fleet.update_weights(weights())
    await check_serves(fleet, engines=2)
