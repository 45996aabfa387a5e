"""`python -m penstock.fleet.owner`: own a detached fleet until it is told to stop, by its control socket or SIGTERM.

Its engines and router end when it ends, however that is. Its configuration comes as JSON on stdin (`detach.Plan`). It
answers on stdout with a line of JSON that has the fleet's URL, or the error that kept it from starting.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from contextlib import suppress
from typing import Any

import orjson

from penstock.errors import PenstockError, UserError, error_to_json
from penstock.fleet.detach import API_KEY_ENV, Plan
from penstock.fleet.fleet import Fleet
from penstock.fleet.service import socket_of


def main() -> int:
    """Own the fleet, and return the exit status."""
    plan = Plan.model_validate_json(sys.stdin.buffer.read())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("penstock").setLevel(logging.INFO)
    try:
        asyncio.run(_own(plan, os.environ.get(API_KEY_ENV) or None))
    except asyncio.CancelledError:
        _report({"error": error_to_json(UserError("it was stopped before it had started"))})
        return 1
    except PenstockError as error:
        _report({"error": error_to_json(error)})
        return 1
    except BrokenPipeError:
        return 1  # the starter was gone before the fleet was there
    if not plan.keep_log:
        plan.log.unlink(missing_ok=True)
    return 0


async def _own(plan: Plan, api_key: str | None) -> None:
    """Launch the fleet, report where it is, and keep it until it is stopped. Cancelled by a signal before it serves."""
    owner = asyncio.current_task()

    def stop() -> None:
        if owner is not None and not owner.cancelling():  # a second signal does not cut the teardown short
            owner.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    async with Fleet.launch(
        plan.engine,
        fleet=plan.fleet,
        router=plan.router,
        api_key=api_key,
        parallel_starts=plan.parallel_starts,
    ) as fleet:
        if fleet.endpoint is None or socket_of(fleet.url) is None:
            raise UserError(
                "a detached fleet is found by its control socket, which needs a router on 127.0.0.1, and "
                f"{fleet.url} may be another machine's; leave detach off"
            )
        fleet.endpoint.log = plan.log
        _report({"url": fleet.url})
        os.dup2(2, 1)
        with suppress(asyncio.CancelledError):
            await fleet.endpoint.stopping.wait()


def _report(line: dict[str, Any]) -> None:
    with suppress(ValueError):  # of a stdout that was closed
        sys.stdout.buffer.write(orjson.dumps(line) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
