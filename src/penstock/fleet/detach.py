"""A detached fleet: a process of its own session launches and owns it, and outlives the one that asked for it.

`python -m penstock.fleet.detach` is that process. It has its `Plan` as JSON on stdin, and answers on stdout with a line
of JSON that has the fleet's URL, or the error that kept it from starting. It ends by its control socket or by SIGTERM,
and its engines and router with it, however it ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import orjson

from penstock.errors import ConfigError, PenstockError, UserError, error_to_json
from penstock.fleet.fleet import Fleet
from penstock.fleet.launch import Terms, made
from penstock.fleet.remote import FleetClient, adopt
from penstock.fleet.service import folder, names_this_machine, socket_of
from penstock.process import read_start
from penstock.settings import EngineConfig, FleetConfig, RouterConfig, Section

API_KEY_ENV = "PENSTOCK_API_KEY"
MARGIN_S = 60.0
"""What a start may take besides its engines."""
JOIN_RAY_S = 150.0
"""The same where a Ray cluster has to be started or joined before."""


class Plan(Section):
    """What the process is started with."""

    engine: EngineConfig
    fleet: FleetConfig
    router: RouterConfig
    log: Path
    """Where stderr goes."""
    keep_log: bool
    """Leave the log behind after an end in good order."""


async def launch_detached(engine: EngineConfig, router: RouterConfig, terms: Terms) -> Fleet:
    """Launch a detached fleet, and return a `Fleet` over it when it serves.

    If this call is cancelled before that, or our process ends, the other one ends too.

    Raises:
        PenstockError: what kept it from starting, as `Fleet.launch` raises it.
    """
    if router.url is None and not names_this_machine(router.host):
        raise UserError(
            "a detached fleet is found by its control socket, which needs router.host 127.0.0.1, localhost or "
            f"0.0.0.0, got {router.host!r}; take one of them, or leave detach off"
        )
    fleet = terms.fleet
    log = _log_file(fleet)
    # The fleet would ask for a key of our own environment, and nobody here would send it.
    env = {name: value for name, value in os.environ.items() if name != API_KEY_ENV}
    if terms.api_key:
        env[API_KEY_ENV] = terms.api_key
    plan = Plan(engine=engine, fleet=fleet, router=router, log=log, keep_log=fleet.log_dir is not None)
    process, report_fd = _spawn(plan, env)
    async with AsyncExitStack() as undo:
        undo.callback(process.terminate)
        name = "the process of the detached fleet"
        url = await read_start(report_fd, deadline_s(engine, fleet), name, lambda: _says(log))
        undo.pop_all()
        client = FleetClient.to(url)
        undo.push_async_callback(_stop, client)
        adopted = await adopt(client, url, terms)
        undo.pop_all()
    return adopted


async def _stop(client: FleetClient) -> None:
    async with client:
        with suppress(PenstockError):  # it is gone, or ends
            await client.stop()


def deadline_s(engine: EngineConfig, fleet: FleetConfig) -> float:
    """Return how long a start may take. Ray may search for room for an engine for as long as that takes to start."""
    if fleet.launcher == "ray":
        return 2 * engine.start_timeout_s * max(1, fleet.engines) + JOIN_RAY_S
    return engine.start_timeout_s * max(1, fleet.engines) + MARGIN_S


def _says(log: Path) -> str:
    return f"its log ({log}) says:\n{log.read_text()[-2000:]}"


def _spawn(plan: Plan, env: dict[str, str]) -> tuple[subprocess.Popen[bytes], int]:
    """Start the process; returns it, and where its report can be read."""
    read_fd, write_fd = os.pipe()
    with plan.log.open("ab") as log, os.fdopen(write_fd, "wb") as report:
        argv = [sys.executable, "-m", "penstock.fleet.detach"]
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=report, stderr=log, env=env, start_new_session=True
        )
    # Reaped when it ends before us.
    threading.Thread(
        target=process.communicate, args=(plan.model_dump_json().encode(),), name="detached-fleet", daemon=True
    ).start()
    return process, read_fd


def _log_file(fleet: FleetConfig) -> Path:
    if fleet.log_dir is not None:
        log = made(fleet.log_dir).absolute() / "fleet.log"
        try:
            log.open("ab").close()
        except OSError as error:
            raise ConfigError(f"{log} cannot be written: {error.strerror}; choose another fleet.log_dir") from error
        return log
    handle, path = tempfile.mkstemp(prefix="fleet-", suffix=".log", dir=folder())
    os.close(handle)
    return Path(path)


# --- the process that owns the fleet ---------------------------------------------------------------------------------


def main() -> int:
    """Own the fleet, and return the exit status."""
    plan = Plan.model_validate_json(sys.stdin.buffer.read())
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
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
    async with Fleet.launch(plan.engine, fleet=plan.fleet, router=plan.router, api_key=api_key) as fleet:
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
