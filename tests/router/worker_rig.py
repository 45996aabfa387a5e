"""What tests of several processes share: a connection to each."""

from __future__ import annotations

import asyncio
import json

import psutil
from router_rig import RawClient, Rig

from patience import WAIT_S


async def pid_of(client: RawClient) -> int:
    return json.loads((await client.ask("/router/health", method="GET")).body)["pid"]


async def one_to_each(r: Rig, workers: int = 2) -> dict[int, RawClient]:
    """A connection to each process."""
    clients: dict[int, RawClient] = {}
    async with asyncio.timeout(WAIT_S):
        while len(clients) < workers:
            client = await r.client()
            clients.setdefault(await pid_of(client), client)
    return clients


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
