"""Complaints of users of other systems, each held by a test. The threads are cited where the test is."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from patience import WAIT_S
from penstock import Fleet
from sim_fleets import SIM


@pytest.fixture(scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    """Two simulated engine processes behind a router; restarts are short, and deadlines where a test makes them so."""
    options = {**SIM, "hang_timeout_s": WAIT_S, "health_interval_s": 0.2, "restart_backoff_s": 0.05}
    async with Fleet.launch("sim-model", engines=2, max_restarts=1000, **options) as fleet:
        yield fleet
