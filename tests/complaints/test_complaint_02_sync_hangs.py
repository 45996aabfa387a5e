"""Complaint 2: weight synchronisation hangs without an error.

trl #6797, #6796 and #6913; verl #6967 (a race at the group's first sync), #7990 (many requests outstanding) and #3873.
"""

from __future__ import annotations

import asyncio

import pytest
import torch
from complaint_rig import DEADLINE_S, LONG, all_serve, generate, in_flight, set_fault

from penstock import Fleet
from penstock.errors import TransferError, UpdateError, WeightsError
from penstock.sim import SimConfig, SimServer
from sim_fleets import check, impatient

MANY = [[1 + i, 2] for i in range(200)]


@pytest.mark.parametrize("phase", ["prepare", "pause", "load", "resume"])
async def test_an_engine_that_hangs_in_an_update_is_named_within_the_deadline(fleet: Fleet, phase: str) -> None:
    await all_serve(fleet)
    running = generate(fleet, MANY[:8], LONG)
    await in_flight(fleet, 8)
    await set_fault(fleet, 1, "hang", phase)
    impatient(fleet._roster.members[1])
    report = await asyncio.wait_for(fleet.update_weights([("w", torch.ones(64))]), DEADLINE_S)
    assert list(report.failures) == ["e1"]
    assert [engine.engine for engine in report.engines] == ["e0"]
    check(MANY[:8], await running, LONG)
    await all_serve(fleet)


async def test_updates_pass_many_outstanding_requests(fleet: Fleet) -> None:
    """verl #7990: an update that waits for requests which wait for the update."""
    await all_serve(fleet)
    met = 0
    while met < 3:
        running = generate(fleet, MANY, LONG)
        await in_flight(fleet, len(MANY) // 2)
        report = await asyncio.wait_for(fleet.update_weights([("w", torch.full((64,), float(met)))]), DEADLINE_S)
        assert not report.failures
        met += any(engine.preempted for engine in report.engines)
        check(MANY, await running, LONG)


@pytest.mark.timeout(180)
async def test_an_engine_that_never_joins_the_first_broadcast_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl #6967: the group's first sync, in which one side waits for the other."""
    monkeypatch.setattr("penstock.weights.broadcast.BroadcastSource.join", lambda *_: None)
    monkeypatch.setattr("penstock.fleet.stores.SEND_SHARE", 0.05)  # of a minute, to form the group
    config = SimConfig(max_model_len=512)
    async with SimServer(config) as server, Fleet.connect([server.url], weight_transport="broadcast") as fleet:
        with pytest.raises((TransferError, UpdateError, WeightsError), match="e0"):
            await asyncio.wait_for(fleet.update_weights([("w", torch.ones(64))]), DEADLINE_S)
        assert fleet.weight_version == 0
