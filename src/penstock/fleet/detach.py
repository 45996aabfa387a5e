"""`python -m penstock.fleet.detach`: holds a detached fleet until it is told to stop, by its control socket or SIGTERM.

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
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from penstock.config import EngineConfig, FleetConfig, RouterConfig, Section
from penstock.engine.client import in_thread
from penstock.errors import ConfigError, EngineStartError, PenstockError, UserError
from penstock.fleet.fleet import Fleet
from penstock.fleet.options import made
from penstock.fleet.service import error_of, error_to_json, folder, socket_of
from penstock.parsing import parse_json

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


MARGIN_S = 60.0
"""What a start may take besides its engines."""
JOIN_RAY_S = 150.0
"""The same where a Ray cluster has to be started or joined before."""
SPAWN_S = 60.0
"""Deadline of the process that leaves the holder behind, which takes a second on an idle machine."""


async def start_detached(
    engine: EngineConfig,
    fleet: FleetConfig,
    router: RouterConfig,
    *,
    api_key: str | None = None,
    parallel_starts: int | None = None,
) -> str:
    """Start a process that launches and holds a fleet; returns the URL of its router when it serves.

    Given up before that, by cancelling or by our own end, it does not stay.

    Raises:
        PenstockError: what kept it from starting, as `Fleet.launch` raises it.
    """
    log = _log_file(fleet)
    plan = Plan(
        engine=engine,
        fleet=fleet,
        router=router,
        parallel_starts=parallel_starts,
        log=log,
        keep_log=fleet.log_dir is not None,
    )
    # A key of our own environment would be asked for by the fleet, and nobody here would send it.
    env = {name: value for name, value in os.environ.items() if name != API_KEY_ENV}
    if api_key:
        env[API_KEY_ENV] = api_key
    read_fd, write_fd = os.pipe()
    with os.fdopen(read_fd, "rb") as output:
        try:
            with os.fdopen(write_fd, "wb"):
                await in_thread(lambda: _spawn(plan, env, log, write_fd))
        except asyncio.CancelledError:  # it has begun all the same
            os.set_blocking(read_fd, False)
            _give_up(orjson.loads(output.readline() or b"{}").get("pid", 0))
            raise
        lines = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), output)
        try:
            return await _outcome(lines, log, deadline_s(engine, fleet))
        finally:
            pipe.close()


def deadline_s(engine: EngineConfig, fleet: FleetConfig) -> float:
    """Seconds that a start may take. Ray may take as long to find room for an engine as that then takes to start."""
    if fleet.launcher == "ray":
        return 2 * engine.start_timeout_s * max(1, fleet.engines) + JOIN_RAY_S
    return engine.start_timeout_s * max(1, fleet.engines) + MARGIN_S


async def _outcome(lines: asyncio.StreamReader, log: Path, limit_s: float) -> str:
    """The URL that the daemon says; before it says one, it does not outlive this call."""
    pid = 0
    try:
        async with asyncio.timeout(limit_s):
            while line := await lines.readline():
                said: dict[str, Any] = parse_json(line, "what the detached fleet says", EngineStartError)
                pid = said.get("pid", pid)
                if url := _url(said):
                    return url
    except BaseException as error:
        _give_up(pid)
        if isinstance(error, TimeoutError):
            raise EngineStartError(f"the detached fleet was not there within {limit_s:g} s; see {log}") from error
        raise
    raise EngineStartError(_ended(log))


def _give_up(pid: int) -> None:
    if pid:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def _url(said: dict[str, Any]) -> str | None:
    if "error" in said:
        raise error_of(said["error"])
    return said.get("url")


def _ended(log: Path) -> str:
    return f"the process of the detached fleet ended; its log ({log}) says:\n{log.read_text()[-2000:]}"


def _spawn(plan: Plan, env: dict[str, str], log: Path, stdout: int) -> None:
    with log.open("ab") as errors:
        argv = [sys.executable, "-m", "penstock.fleet.detach"]
        given = plan.model_dump_json().encode()
        try:
            subprocess.run(argv, input=given, stdout=stdout, stderr=errors, env=env, check=False, timeout=SPAWN_S)
        except subprocess.TimeoutExpired:
            what = f"the process that starts a detached fleet had not done so within {SPAWN_S:g} s"
            raise EngineStartError(f"{what}; its log ({log}) says:\n{log.read_text()[-2000:]}") from None


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
