"""Whole services for the real SDK, and clients that are closed before their service ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import tinker
from penstock.config import TrainConfig
from penstock.router_settings import RouterConfig
from penstock.settings import EngineConfig, FleetConfig
from penstock.tinker.service import Service, ServiceConfig, serving

T = TypeVar("T")
MODEL = Path(__file__).parents[2] / "examples" / "models" / "sorter-0.8m"
BASE = "sorter"
PROMPT, ANSWER = "<56 25 75=", "25 56 75"
OPEN: list[tinker.ServiceClient] = []


@asynccontextmanager
async def service_of(
    data: Path, profile: Any = "sim", *, engines: int = 1, name: str = BASE, **more: Any
) -> AsyncIterator[Service]:
    engine = EngineConfig(model=str(MODEL), profile=profile, served_model_name=name, max_model_len=512, **more)
    config = ServiceConfig(engine, FleetConfig(engines=engines), RouterConfig(), TrainConfig(threads=1), data)
    async with serving(config) as running:
        try:
            yield running
        finally:
            await call(close_clients)


def client_of(url: str) -> tinker.ServiceClient:
    client = tinker.ServiceClient(base_url=url, api_key="tml-of-a-test")
    OPEN.append(client)
    return client


def close_clients() -> None:
    """Close what is open; a client that is left says for minutes that its heartbeat failed, which fails no test."""
    while OPEN:
        with suppress(TimeoutError):
            OPEN.pop().close("success").result(timeout=60.0)


async def call(work: Callable[[], T]) -> T:
    """The SDK's clients block."""
    return await asyncio.to_thread(work)
