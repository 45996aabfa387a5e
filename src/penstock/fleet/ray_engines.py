"""Engines under Ray actors: on the nodes of a cluster that exists, or on a local one started for them."""

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
from typing import Any

from penstock.errors import ConfigError, DeadlineError, EngineDeadError, EngineError, EngineHTTPError
from penstock.fleet.calls import CallClient
from penstock.fleet.engines import EngineFactory
from penstock.fleet.ray_driver import PREFIX, ActorPlan
from penstock.process import ChildProcess
from penstock.settings import EngineConfig, FleetConfig

logger = logging.getLogger(__name__)

OPEN_S = 90.0
"""Deadline of joining or starting a cluster; Ray itself tries one that is not there for many minutes."""

REACH_S = 5.0
"""Deadline of a first connection to a cluster's address."""

ROOM_S = 5.0
"""So long a cluster may take to say that it has room."""

LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""A Ray that may not be part of a larger cluster, as on systems where it has none, listens on loopback only."""

MARGIN_S = 30.0
"""What a call may take besides the engine's own time. An engine that is killed has ended then: its node is lost."""

SHUTDOWN_S = 20.0
"""What Ray may take to leave a cluster, or to end one of its own."""

FOREVER_S = 10 * 365 * 24 * 3600.0
"""Of a call that is answered when an engine ends, or with the driver's end."""


class Driver(CallClient):
    """The process that drives Ray for a fleet."""

    def __init__(self, child: ChildProcess, path: Path) -> None:
        super().__init__(path, PREFIX, "the process that drives Ray")
        self.child = child

    @classmethod
    async def start(cls, log: Path, env: Mapping[str, str], folder: Path) -> Driver:
        """Start the process; its output and Ray's go to `log`, and `folder`, which has its socket, goes with it."""
        path = folder / "driver.sock"
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            listening.listen()  # calls wait in the queue until it has started
            fd = listening.fileno()
            argv = (sys.executable, "-m", "penstock.fleet.ray_driver", str(fd))
            child = await ChildProcess.start(argv, name="ray", log=log, env=env, pass_fds=(fd,), scratch=folder)
        return cls(child, path)

    async def ask(self, name: str, /, *, deadline_s: float, **arguments: Any) -> Any:
        """Call a method of `RayDriver`; raises as it does, or EngineDeadError where the process ended or failed."""
        try:
            return (await self.call(name, deadline_s=deadline_s, **arguments))["result"]
        except (EngineDeadError, EngineHTTPError) as error:
            said = " ".join(self.child.said().splitlines()[-3:])
            raise EngineDeadError(f"the process that drives Ray failed: {said or error}") from error

    async def end(self) -> None:
        """Leave the cluster; one of its own ends. Ending twice is harmless."""
        with suppress(EngineError):
            await self.ask("close", deadline_s=SHUTDOWN_S)
        await self.close()
        self.child.kill()
        await self.child.wait()


class RayEngine:
    """The process of an engine under an actor; see `member.EngineHandle`."""

    def __init__(self, name: str, url: str, driver: Driver) -> None:
        self.name = name
        self.url = url
        self._driver = driver
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._watch = asyncio.create_task(self._until_ended(), name=f"ray-{name}")
        self._killing: asyncio.Task[None] | None = None

    async def wait(self) -> int:
        """Wait until it has ended; returns its exit status, that of a SIGKILL where its node is lost."""
        return await asyncio.shield(self._status)

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM to its process group, and SIGKILL after `timeout_s` seconds; returns when it has ended."""
        if self._status.done():
            return
        try:
            await self._driver.ask("stop", deadline_s=timeout_s + MARGIN_S, engine=self.name, timeout_s=timeout_s)
        except EngineError as error:  # its node or the driver is lost
            logger.warning("engine %s did not end in good order: %s", self.name, error)
        self._ended(-signal.SIGKILL)

    def kill(self) -> None:
        if self._killing is None:
            self._killing = asyncio.create_task(self.stop(0.0), name=f"ray-kill-{self.name}")

    async def _until_ended(self) -> None:
        try:
            status = await self._driver.ask("wait", deadline_s=FOREVER_S, engine=self.name)
        except EngineError:  # the driver has ended, and with it all that it owned
            status = -signal.SIGKILL
        self._ended(status)

    def _ended(self, status: int) -> None:
        if not self._status.done():
            self._status.set_result(status)


class RayLauncher(EngineFactory):
    """Places engines by Ray. The cluster is joined by the first `launch`.

    Args:
        fleet: `ray_address`, `ray_cpus`, `ray_gpus`, `ray_placement_group`, and how many engines there will be.
        api_key: what engines ask for; None, where vllm-router has none, keeps them on this node.
        log_dir: of engines, on whatever node they are, and of Ray's driver.
    """

    def __init__(self, fleet: FleetConfig, *, api_key: str | None, log_dir: Path) -> None:
        super().__init__(api_key, log_dir)
        self._fleet = fleet
        self._joining = asyncio.Lock()
        self._driver: Driver | None = None
        self._ip = ""
        self._has_gpus = False
        self._placed: set[str] = set()
        """Engines that have bundles."""

    @staticmethod
    def check_installed() -> None:
        """Raise ConfigError, with the command that installs it, where Ray is missing."""
        if find_spec("ray") is None:
            raise ConfigError("fleet.launcher is ray, which is not installed; pip install 'penstock[ray]'")

    async def launch(self, config: EngineConfig, name: str, gpus: Sequence[str]) -> RayEngine:
        """Start an engine on a node that has room, and return when it is ready. Ray chooses its GPUs, not `gpus`.

        Raises:
            ConfigError: no cluster, no node that could ever hold it, or what its node said of its configuration.
            EngineStartError: there was no room, or it did not start.
        """
        del gpus
        driver = await self._joined(config)
        config = self._resolved(config)
        plan = ActorPlan(
            name=name,
            engine=config,
            log_dir=self.log_dir,
            keep_log=self._fleet.log_dir is not None,
            launcher_ip=self._ip,
            gpus=config.profile == "gpu",
        )
        self._placed.add(name)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.release, name)
            url = await driver.ask(
                "start",
                deadline_s=2 * config.start_timeout_s + MARGIN_S,
                engine=name,
                bundles=bundles_of(config, self._fleet),
                plan=plan.model_dump(mode="json"),
                api_key=self.api_key,
                timeout_s=config.start_timeout_s,
            )
            undo.pop_all()
        return RayEngine(name, url, driver)

    async def place(self, config: EngineConfig, taken: Sequence[Sequence[str]]) -> tuple[str, ...]:
        """Ask Ray for room for one engine more besides `taken`. Raises ConfigError where there is none now."""
        driver = await self._joined(config)
        bundles = bundles_of(self._resolved(config), self._fleet)
        missing = max(1, len(taken) + 1 - len(self._placed))
        if not await driver.ask("room", deadline_s=ROOM_S + MARGIN_S, bundles=bundles, count=missing, timeout_s=ROOM_S):
            raise ConfigError(
                f"the Ray cluster has no room for one engine more, which needs {bundles} on one node: remove or "
                "replace an engine, add a node, or ask for less (fleet.ray_cpus)"
            )
        return ()

    async def release(self, name: str) -> None:
        self._placed.discard(name)
        if self._driver is not None:
            with suppress(EngineDeadError):  # then Ray has removed them
                await self._driver.ask("release", deadline_s=MARGIN_S, engine=name)

    async def close(self) -> None:
        """Leave the cluster, which frees whatever is left; one of our own ends."""
        if self._driver is not None:
            await self._driver.end()
            self._driver = None
        self._placed.clear()

    def _resolved(self, config: EngineConfig) -> EngineConfig:
        """The profile `auto` is what the cluster has, not what this machine has."""
        profile = "gpu" if self._has_gpus else "cpu"
        return config.model_copy(update={"profile": profile}) if config.profile == "auto" else config

    async def _joined(self, config: EngineConfig) -> Driver:
        """The driver, which is started first, and again where it has ended."""
        async with self._joining:
            if self._driver is not None and self._driver.child.returncode is None:
                return self._driver
            wanted = self._fleet.engines if self._driver is None else 1
            await self.close()
            async with AsyncExitStack() as undo:
                undo.push_async_callback(self.close)
                driver = await self._join(config, wanted)
                undo.pop_all()
            return driver

    async def _join(self, config: EngineConfig, wanted: int) -> Driver:
        ray: Any = sys.modules.get("ray")  # a process that has not imported it has joined no cluster
        here = ray.get_runtime_context().gcs_address if ray is not None and ray.is_initialized() else None
        address = self._fleet.ray_address or os.environ.get("RAY_ADDRESS") or here or "local"
        await _reach(address)
        env = {"RAY_USAGE_STATS_ENABLED": "0"}
        if address == "local":
            env |= LOOPBACK | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        with ExitStack() as undo:
            folder = Path(tempfile.mkdtemp(prefix="ray-"))
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            driver = self._driver = await Driver.start(self.log_dir / "ray.log", env, folder)
            undo.pop_all()
        there = {"address": address, "folder": str(folder), "group": self._fleet.ray_placement_group}
        cpus = self._fleet.engines * sum(bundle["CPU"] for bundle in bundles_of(config, self._fleet))
        try:
            found = await driver.ask("open", deadline_s=OPEN_S, cpus=cpus, **there)
        except DeadlineError as error:
            driver.child.kill()
            raise _unreachable(address, f"no answer within {OPEN_S:g} s") from error
        self._ip = found["ip"]
        nodes: list[dict[str, float]] = found["nodes"]
        self._has_gpus = any(node.get("GPU") for node in nodes)
        if self._fleet.ray_placement_group is None:
            _check_room(bundles_of(self._resolved(config), self._fleet), nodes, wanted)
        return driver


def bundles_of(config: EngineConfig, fleet: FleetConfig) -> list[dict[str, float]]:
    """What an engine asks for, on one node: a bundle for each GPU it runs on, or one bundle of CPUs."""
    ranks = config.tensor_parallel_size * config.pipeline_parallel_size * config.data_parallel_size
    cpus = float(ranks if fleet.ray_cpus is None else fleet.ray_cpus)
    if config.profile != "gpu":
        return [{"CPU": cpus}]
    return [{"GPU": fleet.ray_gpus or 1.0, "CPU": cpus / ranks} for _ in range(ranks)]


def capacity(bundles: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, float]]) -> int:
    """How many such engines fit on empty nodes, each on one."""
    needs = {name: sum(bundle[name] for bundle in bundles) for name in bundles[0]}
    return sum(
        min((int(node.get(name, 0.0) / amount) for name, amount in needs.items() if amount), default=sys.maxsize)
        for node in nodes
    )


def _check_room(bundles: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, float]], engines: int) -> None:
    if not any(bundles[0].values()):
        raise ConfigError(
            "fleet.ray_cpus is 0, and Ray has no place for what asks for nothing; engines without GPUs need some"
        )
    if capacity(bundles, nodes) < engines:
        shown = "; ".join(", ".join(f"{name}: {node.get(name, 0.0):g}" for name in ("CPU", "GPU")) for node in nodes)
        raise ConfigError(
            f"{engines} engines of {list(bundles)} do not fit the Ray cluster, whose nodes have {shown}: ask for fewer "
            "engines or less for each (fleet.ray_cpus, parallel sizes), or add nodes"
        )


async def _reach(address: str) -> None:
    """Raise ConfigError where no program listens at an address of the form HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        return
    try:
        async with asyncio.timeout(REACH_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, OverflowError, TimeoutError, ValueError) as error:  # of a port or a name that cannot be
        raise _unreachable(address, str(error) or f"no answer within {REACH_S:g} s") from error
    writer.close()


def _unreachable(address: str, why: str) -> ConfigError:
    return ConfigError(
        f"no Ray cluster is at {address} ({why}); start one with `ray start --head`, or leave fleet.ray_address and "
        "RAY_ADDRESS out to have one for this fleet alone"
    )
