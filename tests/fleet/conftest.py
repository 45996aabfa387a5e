from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from sim_fleets import SIM, check_serves

from penstock import Fleet


@pytest.fixture(scope="session")
async def shared_fleet() -> AsyncIterator[Fleet]:
    async with Fleet.launch("sim-model", engines=3, **SIM) as fleet:
        yield fleet


@pytest.fixture
async def fleet(shared_fleet: Fleet) -> AsyncIterator[Fleet]:
    """Three simulated engine processes and a router, shared by the tests; each leaves it serving on all engines."""
    yield shared_fleet
    await check_serves(shared_fleet, engines=3)
