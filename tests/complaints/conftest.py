"""Complaints of users of other systems, each held by a test. The threads are cited where the test is."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from penstock import Fleet


@pytest.fixture(scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    """Two simulated engine processes behind a router; restarts are short, and deadlines where a test makes them so."""
    async with Fleet.launch(
        "sim-model",
        engines=2,
        profile="sim",
        max_model_len=512,
        control_timeout_s=60.0,
        hang_timeout_s=60.0,
        health_interval_s=0.2,
        restart_backoff_s=0.05,
        max_restarts=1000,
        extra_args={"tokens-per-second": 500},
    ) as fleet:
        yield fleet
