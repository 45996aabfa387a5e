from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import tinker_rig


@pytest.fixture(scope="session")
async def shared_fleet() -> AsyncIterator[None]:
    """Two simulated engines for all tests that want nothing special of them."""
    async with tinker_rig.fleet_of(2) as found:
        tinker_rig.SHARED.append(found)
        yield
        tinker_rig.SHARED.clear()
