"""Engines under Ray actors, on an existing cluster or on a local one started for them."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from penstock.errors import ConfigError, DeadlineError, EngineDeadError, EngineError, EngineHTTPError
from penstock.fleet.calls import CallClient
from penstock.fleet.engines import LaunchedEngines
from penstock.fleet.ray_driver import PREFIX
from penstock.process import GONE_S, ChildProcess
from penstock.settings import EngineConfig, FleetConfig

logger = logging.getLogger(__name__)

OPEN_S = 90.0
"""Deadline of joining or starting a cluster; Ray itself tries an absent one for many minutes."""

REACH_S = 5.0
"""Deadline of a first connection to a cluster's address."""

LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Makes Ray listen on loopback only, as on systems where it supports no clusters."""

MARGIN_S = 30.0
"""Seconds that a call may take beyond the engine's own time. A killed engine has ended by then, or its node is lost."""

SHUTDOWN_S = 20.0
"""Seconds that Ray may take to leave a cluster, or to end its own."""

FOREVER_S = 10 * 365 * 24 * 3600.0
"""Deadline of a call that waits for an engine's end; the driver's end also ends the call."""


class Driver(CallClient):
    """The process that drives Ray for a fleet."""

    def __init__(self, child: ChildProcess, folder: Path) -> None:
        super().__init__(folder / "driver.sock", PREFIX, "the process that drives Ray")
        self.child = child
        self.folder = folder

    @classmethod
    async def start(cls, log: Path, env: Mapping[str, str]) -> Self:
        """Start the process; its output and Ray's go to `log`. Its folder goes with it."""
        with ExitStack() as undo, socket.socket(socket.AF_UNIX) as listening:
            folder = Path(tempfile.mkdtemp(prefix="ray-"))
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            listening.bind(str(folder / "driver.sock"))
            listening.listen()  # calls wait in the queue until it has started
            fd = listening.fileno()
            argv = (sys.executable, "-m", "penstock.fleet.ray_driver", str(fd))
            child = await ChildProcess.start(argv, name="ray", log=log, env=env, pass_fds=(fd,), scratch=folder)
            undo.pop_all()
        return cls(child, folder)

    async def ask(self, name: str, /, *, deadline_s: float, **arguments: Any) -> Any:
        """Call a method of `RayDriver`; EngineDeadError: its process ended or failed."""
        try:
            return await self.call(name, deadline_s=deadline_s, **arguments)
        except (EngineDeadError, EngineHTTPError) as error:
            said = " ".join(self.child.said().splitlines()[-3:])
            raise EngineDeadError(f"the process that drives Ray failed: {said or error}") from error


class RayEngine:
    """The process of an engine under an actor; see `member.EngineHandle`."""

    def __init__(self, name: str, url: str, driver: Driver) -> None:
        self.name = name
        self.url = url
        self._driver = driver
        self._ended = asyncio.create_task(self._until_ended(), name=f"ray-{name}")
        self._killing: asyncio.Task[Any] | None = None

    async def wait(self) -> int:
        """Wait for its end; return its exit status, that of SIGKILL if its node is lost."""
        return await asyncio.shield(self._ended)

    async def stop(self, timeout_s: float) -> Sequence[int]:
        """End its process group by SIGTERM, and after `timeout_s` seconds by SIGKILL; its GPUs are Ray's."""
        if not self._ended.done():
            try:
                await self._driver.ask("stop", deadline_s=timeout_s + MARGIN_S, engine=self.name, timeout_s=timeout_s)
            except EngineError as error:
                logger.warning("engine %s did not end in good order: %s", self.name, error)
                self._driver.child.kill()  # it has ended or hangs: engines end with it
            asyncio.get_running_loop().call_later(GONE_S, self._ended.cancel)
            await self.wait()
        return ()

    def kill(self) -> None:
        if self._killing is None:
            self._killing = asyncio.create_task(self.stop(0.0), name=f"ray-kill-{self.name}")

    async def _until_ended(self) -> int:
        try:
            return await self._driver.ask("wait", deadline_s=FOREVER_S, engine=self.name)
        except (EngineError, asyncio.CancelledError):  # engines end with the driver; or it says nothing
            return -signal.SIGKILL


class RayLauncher(LaunchedEngines):
    """Places engines by Ray. The first `launch` joins the cluster.

    It reads `ray_address`, `ray_cpus`, `ray_gpus`, `ray_placement_group` and the number of engines in `fleet`. Without
    `api_key` (vllm-router without a key), engines stay on this node.
    """

    def __init__(self, config: EngineConfig, fleet: FleetConfig, **options: Any) -> None:
        super().__init__(**options)
        self._config = config
        self._fleet = fleet
        self._joining = asyncio.Lock()
        self._driver: Driver | None = None

    @staticmethod
    def check_installed() -> None:
        """Raise ConfigError, with the command that installs Ray, if it is missing."""
        if find_spec("ray") is None:
            raise ConfigError("fleet.launcher is ray, which is not installed; pip install 'penstock[ray]'")

    async def launch(self, name: str, gpus: Sequence[str]) -> RayEngine:
        """Start an engine on a node with room; return once it is ready. Ray chooses GPUs.

        Raises:
            ConfigError: there is no cluster, or its node refuses its configuration.
            EngineStartError: there was no room, or it did not start.
        """
        del gpus
        config, driver = self._config, await self._joined()
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.release, name)
            given = {"config": config.model_dump(mode="json"), "log_dir": str(self.log_dir), "api_key": self.api_key}
            deadline_s = 2 * config.start_timeout_s + MARGIN_S
            url = await driver.ask("start", deadline_s=deadline_s, engine=name, **given)
            undo.pop_all()
        return RayEngine(name, url, driver)

    async def release(self, name: str) -> None:
        if self._driver is not None:
            with suppress(EngineDeadError):  # Ray has then freed its bundles
                await self._driver.ask("release", deadline_s=MARGIN_S, engine=name)

    async def close(self) -> None:
        """Leave the cluster, which frees everything left there; a cluster of our own ends."""
        if self._driver is not None:
            await self._driver.child.stop(SHUTDOWN_S)
            await self._driver.close()
            self._driver = None

    async def _joined(self) -> Driver:
        """Return the driver; start it if there is none or it has ended."""
        async with self._joining:
            if self._driver is not None and self._driver.child.returncode is None:
                return self._driver
            await self.close()
            async with AsyncExitStack() as undo:
                undo.push_async_callback(self.close)
                driver = await self._join()
                undo.pop_all()
            return driver

    async def _join(self) -> Driver:
        ray: Any = sys.modules.get("ray")  # a process that has not imported Ray has joined no cluster
        here = ray.get_runtime_context().gcs_address if ray is not None and ray.is_initialized() else None
        address = self._fleet.ray_address or os.environ.get("RAY_ADDRESS") or here or "local"
        await _reach(address)
        env = {"RAY_USAGE_STATS_ENABLED": "0"}
        if address == "local":
            env |= LOOPBACK | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        driver = self._driver = await Driver.start(self.log_dir / "ray.log", env)
        of_ray = self._fleet.model_dump(include={"launcher", "engines", "ray_cpus", "ray_gpus", "ray_placement_group"})
        there = {"address": address, "folder": str(driver.folder), "fleet": of_ray}
        try:
            await driver.ask("open", deadline_s=OPEN_S, config=self._config.model_dump(mode="json"), **there)
        except DeadlineError as error:
            driver.child.kill()
            why = (
                f"no answer within {OPEN_S:g} s, log: {driver.child.log}; if it asks for a token, set "
                "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's"
            )
            raise _unreachable(address, why) from error
        return driver


async def _reach(address: str) -> None:
    """Raise ConfigError where no program listens at an address of the form HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        return
    try:
        async with asyncio.timeout(REACH_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, OverflowError, TimeoutError, ValueError) as error:  # also for an impossible port or name
        raise _unreachable(address, str(error) or f"no answer within {REACH_S:g} s") from error
    writer.close()


def _unreachable(address: str, why: str) -> ConfigError:
    return ConfigError(
        f"no Ray cluster is at {address} ({why}); start one with `ray start --head`, or leave fleet.ray_address and "
        "RAY_ADDRESS out to have one for this fleet alone"
    )
