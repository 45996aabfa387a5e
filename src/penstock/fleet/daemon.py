"""`python -m penstock.fleet.daemon`: holds a detached fleet until it is told to stop, by its control socket or SIGTERM.

It is the launcher of its engines and router in every respect, in a session of its own and nobody's child: they end
when it ends, however that is. Its configuration comes as JSON on stdin. It answers on stdout with a line that names its
process, and one that names the fleet's URL or the error that kept it from starting.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import orjson

from penstock.config import EngineConfig, FleetConfig, RouterConfig, Section
from penstock.errors import PenstockError, UserError
from penstock.fleet.control_wire import error_to_json
from penstock.fleet.fleet import Fleet
from penstock.fleet.sockets import socket_of

API_KEY_ENV = "PENSTOCK_API_KEY"


class Plan(Section):
    """What a daemon is started with."""

    engine: EngineConfig
    fleet: FleetConfig
    router: RouterConfig
    parallel_starts: int | None = None
    log: Path
    """Where stderr goes."""
    keep_log: bool
    """Leave the log behind after an end in good order."""


def main() -> int:
    """Leave the starter, hold the fleet, and return the exit status."""
    plan = Plan.model_validate_json(sys.stdin.buffer.read())
    if daemon := os.fork():
        _say({"pid": daemon})  # said by us, since the starter hears it for certain when we have ended
        os._exit(0)  # the starter waits for us alone: the daemon is nobody's child
    os.setsid()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("penstock").setLevel(logging.INFO)
    try:
        asyncio.run(hold(plan, os.environ.get(API_KEY_ENV) or None))
    except PenstockError as error:
        _say({"error": error_to_json(error)})
        return 1
    except BrokenPipeError:
        return 1  # whoever wanted this fleet was gone before it was there
    if not plan.keep_log:
        plan.log.unlink(missing_ok=True)
    return 0


async def hold(plan: Plan, api_key: str | None) -> None:
    """Launch the fleet, say where it is, and keep it until somebody stops it."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    opening = Fleet.launch(
        plan.engine,
        fleet=plan.fleet,
        router=plan.router,
        api_key=api_key,
        parallel_starts=plan.parallel_starts,
    )
    starting = asyncio.create_task(opening.__aenter__())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait((starting,))
        raise UserError("it was stopped before it had started")
    async with await starting as fleet:
        if fleet.endpoint is None or socket_of(fleet.url) is None:
            raise UserError(f"a detached fleet needs a router address of this machine, and {fleet.url} names another")
        fleet.endpoint.detached = True
        _say({"url": fleet.url})
        os.dup2(2, 1)  # the starter sees the end of our stdout
        asked = asyncio.create_task(fleet.endpoint.stopping.wait())
        await asyncio.wait((asked, stopped), return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    stopped.cancel()


def _say(line: dict[str, Any]) -> None:
    sys.stdout.buffer.write(orjson.dumps(line) + b"\n")
    with contextlib.suppress(ValueError):
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
