"""Complaint 3: a dead engine is not noticed, or an error leaves an update "already active".

verl-omni #433, trl #6628 and #3433, verl #6583, SkyRL #1605.
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import torch
from complaint_rig import DEADLINE_S, LONG, all_serve, generate, in_flight, set_fault, until

from penstock import Fleet
from penstock.engine.launch import EngineProcess
from penstock.errors import WeightsError
from penstock.fleet.member import State
from sim_fleets import check, impatient

PROMPTS = [[1 + i, 2] for i in range(8)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
async def test_a_dead_engine_is_noticed_and_replaced_and_costs_no_request(fleet: Fleet, number: signal.Signals) -> None:
    await all_serve(fleet)
    member = fleet._roster.members[0]
    assert isinstance(member.process, EngineProcess)
    running = generate(fleet, PROMPTS, LONG)
    await in_flight(fleet, len(PROMPTS))
    impatient(member)  # the deadline that it misses
    os.killpg(member.process.pid, number)
    await until(lambda: member.state is not State.SERVING)
    check(PROMPTS, await running, LONG)
    await all_serve(fleet)


async def test_an_update_after_a_failed_one_commits(fleet: Fleet) -> None:
    """SkyRL #1605: after an error, every later update was refused because one was "already active"."""
    await all_serve(fleet)
    version = fleet.weight_version
    with pytest.raises(WeightsError, match="NaN"):
        await asyncio.wait_for(fleet.update_weights([("w", torch.full((64,), float("nan")))]), DEADLINE_S)
    assert fleet.weight_version == version
    await set_fault(fleet, 1, "refuse", "load")
    report = await asyncio.wait_for(fleet.update_weights([("w", torch.ones(64))]), DEADLINE_S)
    assert list(report.failures) == ["e1"]
    await all_serve(fleet)
    report = await asyncio.wait_for(fleet.update_weights([("w", torch.ones(64))]), DEADLINE_S)
    assert not report.failures
    assert report.version == fleet.weight_version == version + 2
