"""The router of a fleet as a child process."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Any, Self

from penstock.config import RouterConfig
from penstock.engine.process import telling_lines
from penstock.errors import ConfigError, EngineStartError
from penstock.process import ChildProcess, read_report

logger = logging.getLogger(__name__)

START_S = 30.0
"""Deadline of its start, which takes a fraction of a second on an idle machine."""
STOP_S = 5.0
"""Between SIGTERM and SIGKILL."""

API_KEY_ENV, ADMIN_KEY_ENV = "PENSTOCK_API_KEY", "PENSTOCK_ROUTER_ADMIN_KEY"


class RouterProcess:
    """A running router."""

    def __init__(self, url: str, child: ChildProcess) -> None:
        self.url = url
        self._child = child

    @classmethod
    async def launch(
        cls, config: RouterConfig, *, log_dir: Path, api_key: str | None, admin_key: str | None = None
    ) -> Self:
        """Start a router and return when it listens.

        Args:
            config: its options.
            log_dir: of its log.
            api_key: what clients must send; None: nothing.
            admin_key: what calls that change the router must send; None: `api_key`.

        Raises:
            ConfigError: it refused its options, such as a port that is taken.
            EngineStartError: it ended or was not ready within `START_S` seconds; it is gone, and the message holds the
                telling lines of its log.
        """
        options: list[str] = []
        for name, value in config.model_dump(exclude={"kind", "url"}).items():
            option = name.replace("_", "-")
            if isinstance(value, bool):
                options.append(f"--{option}" if value else f"--no-{option}")
            else:
                options += [f"--{option}", str(value)]
        env: dict[str, str] = {}
        # Not on the command line, which every user of the machine can read.
        for option, name, key in (
            ("--api-key-env", API_KEY_ENV, api_key),
            ("--admin-key-env", ADMIN_KEY_ENV, admin_key),
        ):
            if key:
                options += [option, name]
                env[name] = key
        read_fd, write_fd = os.pipe()
        try:
            child = await ChildProcess.start(
                [sys.executable, "-m", "penstock.router", *options, "--ready-fd", str(write_fd)],
                name="router",
                log=log_dir / "router.log",
                env=env,
                pass_fds=(write_fd,),
            )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        try:
            url = await _ready(child, read_fd)
        except BaseException:
            child.kill()
            await child.wait()
            raise
        return cls(url, child)

    async def wait(self) -> int:
        """Wait until it has ended; returns its exit status."""
        return await self._child.wait()

    async def stop(self) -> None:
        """End it."""
        await self._child.stop(STOP_S)

    def kill(self) -> None:
        """SIGKILL to its whole process group."""
        self._child.kill()


async def _ready(child: ChildProcess, pipe: int) -> str:
    """Wait for the router's report on its pipe; returns its URL."""
    report: dict[str, Any] = {}
    try:
        async with asyncio.timeout(START_S):
            report = await read_report(pipe, START_S)
            what = "" if report else f"ended with status {await child.wait()}"
    except (EngineStartError, TimeoutError) as error:
        what = str(error) or f"was not ready within {START_S:g} s"
    if "url" in report:
        if report.get("log_error"):
            logger.warning("the router serves, but cannot write its log %s: %s", child.log, report["log_error"])
        return str(report["url"])
    if report:
        raise (
            ConfigError(report["error"]) if report.get("usage") else EngineStartError(f"the router: {report['error']}")
        )
    try:
        said = telling_lines(child.said())
    except OSError as error:  # its folder may be gone
        said = f"nothing, since it cannot be read: {error.strerror}"
    raise EngineStartError(f"the router {what}; its log ({child.log}) says:\n{said}")
