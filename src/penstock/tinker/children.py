"""Child processes that report when they serve and restart when they end."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from penstock.aio import cancelled
from penstock.errors import EngineError, PenstockError
from penstock.http import HttpTransport
from penstock.lifeline import watch_lifeline
from penstock.process import ChildProcess, RestartBudget, keep_running, raise_file_limit
from penstock.start_report import ReportingProcess, StartReport, error_to_json

logger = logging.getLogger(__name__)

_FAILED = 1
STOP_S = 10.0
"""Seconds between SIGTERM and SIGKILL."""
PROBES = 6
MOST_NEW = 10_000
"""Objects made and not freed before the garbage collector runs."""
BACKOFF_S, STEADY_S = 0.2, 60.0
"""Wait before the first restart, and time after which a child counts as healthy again."""


def run_child(serve: Callable[[str], AbstractAsyncContextManager[str]]) -> int:
    """Serve as a child (`python -m MODULE FD OPTIONS`) until a signal; return the status.

    Args:
        serve: context manager that takes the options, serves while its block runs, and yields the URL.
    """
    watch_lifeline()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    raise_file_limit()
    report, options = StartReport(int(sys.argv[1])), sys.argv[2]

    async def run() -> None:
        stopping = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        async with serve(options) as url:
            _spare_collector()
            report.give({"url": url})
            await stopping.wait()

    try:
        uvloop.run(run())
    except PenstockError as error:
        logger.error("%s", error)  # noqa: TRY400 - its message is meant for people
        report.give({"error": error_to_json(error)})
        return _FAILED
    return 0


def _spare_collector() -> None:
    """Exclude imported objects from garbage collection, and collect less often.

    Without this, collection takes a fifth of the time of an API process under load.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(MOST_NEW)


@dataclass(slots=True)
class SupervisedChild:
    """A child process `python -m MODULE FD OPTIONS` of a Penstock module. It reports on FD.

    Args:
        options: JSON values for `serve` of the module; each start reads them again.
        health: path that answers a GET while the process is healthy.
        patience_s: seconds in which `PROBES` probes must all fail before the process is killed and restarted.
    """

    name: str
    module: str
    options: dict[str, Any]
    log: Path
    start_s: float
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    health: str = "/health"
    patience_s: float = 60.0
    url: str = ""
    """Address of the process: an HTTP URL, or the path of a Unix socket."""
    _child: ChildProcess = field(init=False)
    _guard: asyncio.Task[None] = field(init=False)

    @property
    def pid(self) -> int:
        """Process id of the running process."""
        return self._child.pid

    async def start(self) -> None:
        """Start the process, return when it serves, and keep it running until `stop`.

        Raises:
            PenstockError: the error that it reported; EngineStartError: it ended, or was not ready in time.
        """
        self._child = await self._launch()
        budget = RestartBudget(None, STEADY_S, BACKOFF_S)
        self._guard = asyncio.create_task(keep_running(self._ended, self._restart, budget), name=f"guard-{self.name}")

    async def stop(self) -> None:
        """End the started process. Raise the error that broke the watch, if there was one."""
        try:
            await cancelled(self._guard)
        finally:
            await self._child.stop(STOP_S)

    async def _ended(self) -> None:
        watch = asyncio.create_task(self._kill_if_hung(self._child), name=f"probe-{self.name}")
        try:
            status = await self._child.wait()
        finally:
            await cancelled(watch)
        logger.warning("the %s ended with status %d; it is started again (log: %s)", self.name, status, self.log)

    async def _kill_if_hung(self, child: ChildProcess) -> None:
        missed = 0
        while missed < PROBES:
            await asyncio.sleep(self.patience_s / PROBES)  # a hanging process sends no event
            missed = 0 if await self._answers(self.patience_s / PROBES) else missed + 1
        logger.warning("the %s did not answer %d times in a row; it is killed", self.name, PROBES)
        child.kill()

    async def _answers(self, deadline_s: float) -> bool:
        by_socket = self.url.startswith("/")
        http = HttpTransport("http://child", unix_socket=Path(self.url)) if by_socket else HttpTransport(self.url)
        try:
            await http.call("GET", self.health, None, timeout_s=deadline_s)
        except EngineError:
            return False
        finally:
            await http.close()
        return True

    async def _restart(self) -> bool:
        try:
            self._child = await self._launch()
        except PenstockError as error:
            logger.warning("the %s did not start: %s", self.name, error)
            return False
        logger.info("the %s is back", self.name)
        return True

    async def _launch(self) -> ChildProcess:
        child = await ReportingProcess.serving(
            lambda fd: [sys.executable, "-m", self.module, str(fd), json.dumps(self.options)],
            name=self.name,
            log=self.log,
            env=self.env,
            start_s=self.start_s,
        )
        self.url = child.url
        return child
