from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from penstock import Fleet
from sim_fleets import SIM, check_serves


@pytest.fixture(scope="module")  # where nobody uses it, its keeper would stand still for as long as a test blocks
async def shared_fleet() -> AsyncIterator[Fleet]:
    async with Fleet.launch("sim-model", engines=3, **SIM) as fleet:
        yield fleet


@pytest.fixture
async def fleet(shared_fleet: Fleet) -> AsyncIterator[Fleet]:
    """Three simulated engine processes and a router, shared by a module; each test leaves it serving on all engines."""
    yield shared_fleet
    await check_serves(shared_fleet, engines=3)
