"""Start a detached fleet: a process of its own session (`owner.py`) launches it and outlives this one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from penstock.errors import ConfigError, PenstockError, UserError
from penstock.fleet.fleet import Fleet
from penstock.fleet.launch import Terms, made
from penstock.fleet.remote import FleetClient, adopt
from penstock.fleet.service import folder, names_this_machine
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
    parallel_starts: int | None = None
    log: Path
    """Where stderr goes."""
    keep_log: bool
    """Leave the log behind after an end in good order."""


async def launch_detached(
    engine: EngineConfig, router: RouterConfig, terms: Terms, parallel_starts: int | None
) -> Fleet:
    """Launch a detached fleet; returns a `Fleet` over it."""
    url = await start_detached(engine, terms.fleet, router, api_key=terms.api_key, parallel_starts=parallel_starts)
    async with AsyncExitStack() as failed:  # the caller has nothing to end it by
        client = FleetClient.to(url)
        failed.push_async_callback(_stop, client)
        fleet = await adopt(client, url, terms)
        failed.pop_all()
    return fleet


async def _stop(client: FleetClient) -> None:
    async with client:
        with suppress(PenstockError):  # it is gone, or ends
            await client.stop()


async def start_detached(
    engine: EngineConfig,
    fleet: FleetConfig,
    router: RouterConfig,
    *,
    api_key: str | None = None,
    parallel_starts: int | None = None,
) -> str:
    """Start a process that launches and owns a fleet; returns the URL of its router when it serves.

    If this call is cancelled before that, or our process ends, the other one ends too.

    Raises:
        PenstockError: what kept it from starting, as `Fleet.launch` raises it.
    """
    if router.url is None and not names_this_machine(router.host):
        raise UserError(
            "a detached fleet is found by its control socket, which needs router.host 127.0.0.1, localhost or "
            f"0.0.0.0, got {router.host!r}; take one of them, or leave detach off"
        )
    log = _log_file(fleet)
    plan = Plan(
        engine=engine,
        fleet=fleet,
        router=router,
        parallel_starts=parallel_starts,
        log=log,
        keep_log=fleet.log_dir is not None,
    )
    # The fleet would ask for a key of our own environment, and nobody here would send it.
    env = {name: value for name, value in os.environ.items() if name != API_KEY_ENV}
    if api_key:
        env[API_KEY_ENV] = api_key
    process, report_fd = _spawn(plan, env)
    async with AsyncExitStack() as undo:
        undo.callback(process.terminate)
        name = "the process of the detached fleet"
        url = await read_start(report_fd, deadline_s(engine, fleet), name, lambda: _says(log))
        undo.pop_all()
    return url


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
        argv = [sys.executable, "-m", "penstock.fleet.owner"]
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
