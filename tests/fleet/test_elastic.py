"""Engines that come and go while requests and updates run: nothing lost, nothing of other weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from launched_rig import launched
from test_attach import states

from patience import WAIT_S
from penstock import Fleet, SamplingParams
from penstock.errors import StateError, UserError
from penstock.fleet.member import State
from sim_fleets import SIM, begun, check_serves, router_process, slowed, whole

PARAMS = SamplingParams(max_tokens=400, detokenize=False)
PROMPTS = [[1 + i, 2] for i in range(16)]


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with launched(2, drain_timeout_s=WAIT_S) as (fleet, _):
        yield fleet


async def test_an_engine_joins_a_paused_fleet_paused_and_a_drained_one_is_paused_and_updated_with_it(
    fleet: Fleet,
) -> None:
    async with slowed(fleet):
        running = await begun(fleet, PROMPTS, PARAMS)
        await fleet.pause_generation()
    assert not await fleet.drain("e0", timeout_s=0.2), "what it has is frozen"
    (name,) = await fleet.add_engines()
    assert await states(fleet) == {"e0": State.DRAINING, "e1": State.PAUSED, name: State.PAUSED}
    report = await fleet.update_weights([("w", torch.ones(2))])
    assert [update.engine for update in report.engines] == ["e0", "e1", name]
    for member in fleet._roster.members:
        assert (await member.control.info()).paused
    await fleet.resume_generation()
    out = await whole(running, PROMPTS, PARAMS)
    assert {span.version for spans in out.response_spans for span in spans} == {0, 1}
    assert await fleet.drain("e0")
    assert fleet._roster.members[0].lifecycle.reason == "takes no new session"
    await fleet.remove("e0")
    await check_serves(fleet, engines=2)


async def test_a_router_that_dies_meanwhile_does_not_end_a_drain(tmp_path: Path) -> None:
    async with Fleet.launch("sim-model", engines=2, drain_timeout_s=WAIT_S, log_dir=tmp_path, **SIM) as fleet:
        async with slowed(fleet):
            running = await begun(fleet, PROMPTS, PARAMS)
            await fleet.pause_generation()
        leaving = asyncio.create_task(fleet.remove("e0"))
        assert await fleet._roster.until(lambda: fleet._roster.members[0].state is State.DRAINING, deadline_s=WAIT_S)
        await asyncio.sleep(0.2)  # the router is asked every 50 ms
        assert not leaving.done()
        router_process(fleet.url).kill()
        await asyncio.sleep(0.2)
        await fleet.resume_generation()
        await asyncio.wait_for(leaving, WAIT_S)
        assert (await states(fleet))["e0"] is State.STOPPED
        await whole(running, PROMPTS, PARAMS)
        await check_serves(fleet, engines=1)


async def test_sessions_end_where_they_live_before_an_engine_is_drained(fleet: Fleet) -> None:
    params = {"max_tokens": 3}
    for session in range(4):
        await fleet.sample([1, session], 1, params, session_id=f"s{session}")
    made = {s.name: s.stats.generation_tokens for s in await fleet.engines() if s.stats is not None}
    assert set(made.values()) == {6}, "two sessions on each"
    assert not await fleet.drain("e0", timeout_s=0.2)
    for session in range(4):
        await fleet.sample([1, session, 5], 1, params, session_id=f"s{session}")
    made = {s.name: s.stats.generation_tokens for s in await fleet.engines() if s.stats is not None}
    assert set(made.values()) == {12}, "their later turns still go where they live"
    await fleet.remove("e0", timeout_s=WAIT_S)
    for session in range(4):
        await fleet.sample([1, session, 6], 1, params, session_id=f"s{session}")
    await check_serves(fleet, engines=1)


async def test_the_last_engines_stay_and_errors_name_what_is_there(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UserError, match="there is no engine 'e7'; the fleet has e0, e1"):
        await fleet.drain("e7")
    with pytest.raises(UserError, match="there is no engine 2"):
        await fleet.remove(2)
    with pytest.raises(UserError, match="the number of engines to add is a whole number from 1 to 4094, got 0"):
        await fleet.add_engines(0)
    assert await fleet.drain(0, timeout_s=0.0), "it is idle"
    with pytest.raises(
        UserError,
        match=r"without engine e1 the fleet would have 0 engines, .*min_engines=1; add one first",
    ):
        await fleet.remove("e1")
    await fleet.remove("e0")
    assert "engine e0 stays draining: is being removed; it takes no new request, and leaves when " in caplog.text
    with pytest.raises(UserError, match=r"there is no engine 'e7'; the fleet has e1$"):
        await fleet.drain("e7")
    with pytest.raises(StateError, match="engine e0 has left the fleet already"):
        await fleet.remove("e0")
    with pytest.raises(StateError, match="engine e0 does not serve, it is stopped"):
        await fleet.drain("e0")
    await check_serves(fleet, engines=1)


async def test_a_dead_engine_is_taken_out() -> None:
    async with launched(2, max_restarts=0) as (fleet, launcher):
        launcher.processes[0].kill()
        assert await fleet._roster.until(lambda: fleet._roster.members[0].state is State.DEAD, deadline_s=WAIT_S)
        assert (await states(fleet))["e0"] is State.DEAD
        assert await fleet.add_engines() == ("e2",)
        await fleet.remove("e0")
        assert await states(fleet) == {"e0": State.STOPPED, "e1": State.SERVING, "e2": State.SERVING}
        await check_serves(fleet, engines=2)


async def test_engines_of_others_cannot_be_added_to_but_can_leave(fleet: Fleet) -> None:
    async with Fleet.connect([s.url for s in await fleet.engines()], api_key=fleet.key_of("e0")) as found:
        with pytest.raises(StateError, match="were started by someone else"):
            await found.add_engines()
        await found.remove("e1")
        await check_serves(found, engines=1)
    await check_serves(fleet, engines=2)
