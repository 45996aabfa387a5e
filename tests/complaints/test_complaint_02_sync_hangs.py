"""Complaint 2: weight synchronisation hangs without an error.

trl #6797, #6796 and #6913; verl #6967 (a race at the group's first sync), #7990 (many requests outstanding) and #3873.
"""

from __future__ import annotations

import asyncio

import pytest
import torch

from patience import WAIT_S
from penstock import Fleet
from penstock.errors import TransferError, UpdateError, WeightsError
from penstock.sim import SimConfig, SimServer
from sim_fleets import LONG, all_serve, begun, impatient, set_fault, slowed, under_way, whole

MANY = [[1 + i, 2] for i in range(200)]
WEIGHTS = [("w", torch.ones(64))]


async def test_an_engine_that_hangs_in_an_update_is_named_within_the_deadline(fleet: Fleet) -> None:
    """While it loads; `tests/fleet/test_update_matrix.py` has the other phases."""
    running = await under_way(fleet, MANY[:8], LONG)
    member = fleet._roster.members[1]
    await set_fault(member, kind="hang", phase="load")
    impatient(member)
    report = await asyncio.wait_for(fleet.update_weights(WEIGHTS), WAIT_S)
    assert list(report.failures) == ["e1"]
    assert [engine.engine for engine in report.engines] == ["e0"]
    await whole(running, MANY[:8], LONG)
    await all_serve(fleet)


async def test_updates_pass_many_outstanding_requests(fleet: Fleet) -> None:
    """verl #7990: an update that waits for requests which wait for the update."""
    async with slowed(fleet):
        running = await begun(fleet, MANY, LONG)
        for _ in range(3):
            report = await asyncio.wait_for(fleet.update_weights(WEIGHTS), WAIT_S)
            assert not report.failures
            assert any(engine.preempted for engine in report.engines)
    await whole(running, MANY, LONG)


@pytest.mark.timeout(180)
async def test_an_engine_that_never_joins_the_first_broadcast_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl #6967: the group's first sync, in which one side waits for the other."""
    monkeypatch.setattr("penstock.weights.broadcast.BroadcastSource.join", lambda *_: None)
    monkeypatch.setattr("penstock.fleet.transports.SEND_SHARE", 0.05)  # of a minute, to form the group
    config = SimConfig(max_model_len=512)
    async with SimServer(config) as server, Fleet.connect([server.url], weight_transport="broadcast") as fleet:
        with pytest.raises((TransferError, UpdateError, WeightsError), match="e0"):
            await asyncio.wait_for(fleet.update_weights(WEIGHTS), WAIT_S)
        assert fleet.weight_version == 0
