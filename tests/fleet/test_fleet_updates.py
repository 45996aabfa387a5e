"""Pauses, aborts and weight updates while a fleet of simulated engines generates; every token is checked."""

from __future__ import annotations

import asyncio

import pytest

from patience import WAIT_S
from penstock import Fleet, PauseMode, SamplingParams
from penstock.errors import StateError
from penstock.fleet.member import State
from sim_fleets import LONG, begun, check, made, slowed, stepped, whole

PROMPTS = [[1 + i, 2, 3] for i in range(24)]


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_requests_before_and_during_a_pause_wait_and_none_fails(fleet: Fleet, mode: PauseMode) -> None:
    async with slowed(fleet):
        running = await begun(fleet, PROMPTS, LONG)
        await stepped(fleet, len(PROMPTS))  # so that none is in the queue of an engine, whose pause admits no more
        pausing = asyncio.create_task(fleet.pause_generation(mode))
        if mode is not PauseMode.WAIT:
            await pausing
    await pausing
    late = asyncio.create_task(
        fleet.generate(prompt_token_ids=PROMPTS, sampling_params={"max_tokens": 5, "detokenize": False})
    )
    single = asyncio.create_task(fleet.sample([9], 2, {"max_tokens": 5}))
    completion = asyncio.create_task(
        fleet.completion({"model": "sim-model", "prompt": ["a", "b"], "max_tokens": 3, "n": 2})
    )
    chat = asyncio.create_task(
        fleet.chat_completion({"model": "sim-model", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3})
    )
    if mode is PauseMode.WAIT:
        await asyncio.wait_for(asyncio.shield(running), WAIT_S)  # the engines have made all of it; it is on its way
    before = await made(fleet)
    await asyncio.sleep(0.1)
    assert await made(fleet) == before, "no token is made while paused"
    assert running.done() == (mode is PauseMode.WAIT)
    assert not any(task.done() for task in (late, single, completion, chat))
    assert {status.state for status in await fleet.engines()} == {State.PAUSED}
    with pytest.raises(StateError, match="already paused"):
        await fleet.pause_generation()
    await fleet.resume_generation()
    out = await whole(running, PROMPTS, LONG)
    assert set(out.stop_reasons) == {"length"}, "aborted in the middle, they went on"
    check(PROMPTS, await late, SamplingParams(max_tokens=5))
    assert len(await single) == 2
    assert len((await completion)["choices"]) == 4
    assert len((await chat)["choices"]) == 1
    with pytest.raises(StateError, match="not paused"):
        await fleet.resume_generation()


async def test_abort_ends_what_runs_and_serves_what_comes(fleet: Fleet) -> None:
    async with slowed(fleet):
        running = await begun(fleet, PROMPTS, LONG)
        await stepped(fleet, 2 * len(PROMPTS))
        await fleet.abort_generation()
    out = await whole(running, PROMPTS, LONG)
    assert set(out.stop_reasons) == {"abort"}
    assert all(0 < len(ids) < LONG.max_tokens for ids in out.response_ids), "what was made is kept"
