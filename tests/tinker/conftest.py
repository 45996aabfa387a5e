from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest
import tinker_rig

if TYPE_CHECKING:
    from penstock.tinker.service import Service


@pytest.fixture(scope="session")
async def shared_fleet() -> AsyncIterator[None]:
    """Two simulated engines for all tests that want nothing special of them."""
    async with tinker_rig.fleet_of(2) as found:
        tinker_rig.SHARED.append(found)
        yield
        tinker_rig.SHARED.clear()


@pytest.fixture(scope="session")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    """The whole service over a real vLLM CPU engine."""
    from sdk_rig import service_of

    async with service_of(tmp_path_factory.mktemp("real"), "cpu") as running:
        yield running
