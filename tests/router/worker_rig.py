"""What tests of several processes share: a connection to each, and a hub whose calls a test can hold up."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import psutil
from router_rig import DATA_PATHS, Backend, RawClient, Rig

from penstock.config import RouterConfig
from penstock.router.admin_client import RouterAdmin
from penstock.router.hub import Hub


async def pid_of(client: RawClient) -> int:
    return json.loads((await client.ask("/router/health", method="GET")).body)["pid"]


async def one_to_each(r: Rig, workers: int = 2) -> dict[int, RawClient]:
    """A connection to each process."""
    clients: dict[int, RawClient] = {}
    async with asyncio.timeout(20):
        while len(clients) < workers:
            client = await r.client()
            clients.setdefault(await pid_of(client), client)
    return clients


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@asynccontextmanager
async def hub_here(*answers: Any) -> AsyncIterator[Rig]:
    """The hub in this process, its workers in theirs."""
    async with AsyncExitStack() as stack:
        hub = Hub(RouterConfig(workers=2, engine_metrics_interval_s=0, data_paths=DATA_PATHS, allowed_hosts="test"))
        stack.push_async_callback(hub.close)
        await hub.start()
        backends = [await Backend(answer, f"e{i}").start() for i, answer in enumerate(answers)]
        for backend in backends:
            stack.push_async_callback(backend.stop)
        admin = RouterAdmin(hub.url)
        stack.push_async_callback(admin.close)
        r = Rig(hub.url, admin, backends, None, os.getpid())
        stack.callback(lambda: [client.close() for client in r.clients])
        await r.announce([backend.entry() for backend in backends])
        yield r
