"""The router of a fleet as a child process."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
from pathlib import Path
from typing import Self

from penstock.config import RouterConfig
from penstock.engine.process import telling_lines
from penstock.errors import ConfigError, EngineStartError
from penstock.process import ChildProcess

START_S = 30.0
"""Deadline of its start, which takes a fraction of a second on an idle machine."""
LOOK_S = 0.02
"""Between two looks into its log."""
STOP_S = 5.0
"""Between SIGTERM and SIGKILL."""

_READY = re.compile(r"^penstock router ready on (http://\S+)$", re.MULTILINE)


class RouterProcess:
    """A running router."""

    def __init__(self, url: str, child: ChildProcess) -> None:
        self.url = url
        self._child = child

    @classmethod
    async def launch(cls, config: RouterConfig, *, log_dir: Path, api_key: str | None) -> Self:
        """Start a router and return when it listens.

        Raises:
            ConfigError: the port is taken; nothing was started.
            EngineStartError: it ended or was not ready within `START_S` seconds; it is gone, and the message holds the
                telling lines of its log.
        """
        _check_port(config)
        options = [
            part for name, value in config.model_dump().items() for part in (f"--{name.replace('_', '-')}", str(value))
        ]
        argv = [sys.executable, "-m", "penstock.router", *options]
        # The key is not on the command line, which every user of the machine can read.
        env = {"PENSTOCK_API_KEY": api_key} if api_key else {}
        child = await ChildProcess.start(argv, name="router", log=log_dir / "router.log", env=env)
        try:
            url = await _ready(child)
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


async def _ready(child: ChildProcess) -> str:
    try:
        async with asyncio.timeout(START_S):
            while True:
                ready = _READY.search(child.log.read_text(errors="replace"))
                if ready is not None:
                    return ready[1]
                if child.returncode is not None:
                    what = f"ended with status {child.returncode}"
                    break
                # Only its log says which port it got, and a file gives no event.
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        what = f"was not ready within {START_S:g} s"
    lines = telling_lines(child.log.read_text(errors="replace"))
    raise EngineStartError(f"the router {what}; its log ({child.log}) says:\n{lines}")


def _check_port(config: RouterConfig) -> None:
    """Refuse a taken port before anything is started; a race lost after this is an EngineStartError."""
    if config.port == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            raise ConfigError(
                f"router port {config.port} of {config.host} cannot be used: {error.strerror}; choose another, or 0 "
                "for any free one"
            ) from None
