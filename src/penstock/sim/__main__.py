"""Runs one simulated engine until SIGTERM or SIGINT: `python -m penstock.sim port=8000 fault=hang:phase=pause`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable

from penstock.errors import PenstockError, UserError
from penstock.lifeline import watch_lifeline
from penstock.process import raise_file_limit
from penstock.sim.config import SimConfig
from penstock.sim.server import SimServer

API_KEY_ENV = "PENSTOCK_API_KEY"


def main() -> int:
    """Serve, and return the exit status: 2 for bad options, 1 if the start failed."""
    watch_lifeline()
    try:
        # A launcher passes the key in the environment, where other users of the machine cannot see it.
        key = os.environ.get(API_KEY_ENV) or None
        config = SimConfig.read(sys.argv[1:], api_key=key)
        ready = f"penstock-sim ready {config.name}"
        asyncio.run(serve(config, lambda url: print(ready, url, flush=True)))  # noqa: T201
    except PenstockError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2 if isinstance(error, UserError) else 1
    return 0


async def serve(config: SimConfig, ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. Call `ready` with the address once the server listens.

    Raises:
        EngineStartError: the port is taken.
    """
    raise_file_limit()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with SimServer(config, own_process=True) as server:
        ready(server.url)
        await stop.wait()


if __name__ == "__main__":
    sys.exit(main())
