"""Complaint 3: a dead engine is not noticed, or an error leaves an update "already active".

verl-omni #433, trl #6628 and #3433, verl #6583, SkyRL #1605.
"""

from __future__ import annotations

import asyncio
import signal

import pytest
import torch

from patience import WAIT_S
from penstock import Fleet
from penstock.errors import WeightsError
from sim_fleets import LONG, all_serve, impatient, returned, set_fault, strike, under_way, whole

PROMPTS = [[1 + i, 2] for i in range(8)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
async def test_a_dead_engine_is_noticed_and_replaced_and_costs_no_request(fleet: Fleet, number: signal.Signals) -> None:
    member = fleet._roster.members[0]
    before = len(member.lifecycle.history)
    running = await under_way(fleet, PROMPTS, LONG)
    impatient(member)  # the deadline that it misses
    strike(member, number)
    await whole(running, PROMPTS, LONG)
    await returned(fleet, member, before)
    await all_serve(fleet)


async def test_an_update_after_a_failed_one_commits(fleet: Fleet) -> None:
    """SkyRL #1605: after an error, every later update was refused because one was "already active"."""
    version = fleet.weight_version
    with pytest.raises(WeightsError, match="NaN"):
        await asyncio.wait_for(fleet.update_weights([("w", torch.full((64,), float("nan")))]), WAIT_S)
    assert fleet.weight_version == version
    await set_fault(fleet._roster.members[1], kind="refuse", phase="load")
    report = await asyncio.wait_for(fleet.update_weights([("w", torch.ones(64))]), WAIT_S)
    assert list(report.failures) == ["e1"]
    await all_serve(fleet)
    report = await asyncio.wait_for(fleet.update_weights([("w", torch.ones(64))]), WAIT_S)
    assert not report.failures
    assert report.version == fleet.weight_version == version + 2
