"""The router of a fleet as a child process."""

from __future__ import annotations

import asyncio
import re
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

API_KEY_ENV = "PENSTOCK_API_KEY"
USAGE = 2
"""Its exit status when it cannot be started as asked."""

_READY = re.compile(r"^penstock router ready on (http://\S+)\n", re.MULTILINE)


class RouterProcess:
    """A running router."""

    def __init__(self, url: str, child: ChildProcess) -> None:
        self.url = url
        self._child = child

    @classmethod
    async def launch(cls, config: RouterConfig, *, log_dir: Path, api_key: str | None) -> Self:
        """Start a router and return when it listens.

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
        if api_key:
            # Not on the command line, which every user of the machine can read.
            options += ["--api-key-env", API_KEY_ENV]
            env[API_KEY_ENV] = api_key
        argv = [sys.executable, "-m", "penstock.router", *options]
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

    def kill(self) -> None:
        """SIGKILL to its whole process group."""
        self._child.kill()


async def _ready(child: ChildProcess) -> str:
    """Wait for the line that names the URL."""
    try:
        async with asyncio.timeout(START_S):
            while True:
                ready = _READY.search(child.said())
                if ready is not None:
                    return ready[1]
                if child.returncode is not None:
                    what = f"ended with status {child.returncode}"
                    break
                # Only its log says which port it got, and a file gives no event.
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        what = f"was not ready within {START_S:g} s"
    lines = telling_lines(child.said())
    if child.returncode == USAGE:
        raise ConfigError(lines)
    raise EngineStartError(f"the router {what}; its log ({child.log}) says:\n{lines}")
