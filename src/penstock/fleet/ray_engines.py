"""Engines under Ray actors: on the nodes of a cluster that exists, or on a local one started for them."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from penstock.config import EngineConfig, FleetConfig
from penstock.errors import ConfigError, DeadlineError, EngineDeadError, EngineError
from penstock.fleet.ray_actor import ActorPlan
from penstock.fleet.ray_link import RayLink

logger = logging.getLogger(__name__)

OPEN_S = 90.0
"""Deadline of joining or starting a cluster; Ray itself tries one that is not there for many minutes."""

REACH_S = 5.0
"""Deadline of a first connection to a cluster's address."""

ROOM_S = 5.0
"""So long a cluster may take to say that it has room."""

KILL_S = 30.0
"""So long after it was told to end, an engine counts as ended although nobody confirms it: its node is lost, and Ray
ends the actors of a node that has lost its cluster."""

LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""A Ray that may not be part of a larger cluster, as on systems where it has none, listens on loopback only."""

MARGIN_S = 30.0
"""What a call may take besides the engine's own time."""


def check_ray() -> None:
    """Raise ConfigError, with the command that installs it, where Ray is missing."""
    if find_spec("ray") is None:
        raise ConfigError("fleet.launcher is ray, which is not installed; pip install 'penstock[ray]'")


class RayEngine:
    """The process of an engine under an actor; see `member.EngineHandle`."""

    def __init__(self, name: str, url: str, link: RayLink) -> None:
        self.name = name
        self._url = url
        self._link = link
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._watch = asyncio.create_task(self._until_ended(), name=f"ray-{name}")

    @property
    def url(self) -> str:
        """Where it serves."""
        return self._url

    async def wait(self) -> int:
        """Wait until it has ended; returns its exit status, that of a SIGKILL where its node is lost."""
        return await asyncio.shield(self._status)

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM to its process group, and SIGKILL after `timeout_s` seconds; returns when it has ended."""
        if not self._status.done():
            try:
                await self._link.call("stop", deadline_s=timeout_s + MARGIN_S, engine=self.name, timeout_s=timeout_s)
            except EngineError as error:
                logger.warning("engine %s did not end in good order: %s", self.name, error)
                self.kill()
        await self.wait()

    def kill(self) -> None:
        """SIGKILL to its process group."""
        if not self._status.done():
            self._link.post("kill", engine=self.name)
            asyncio.get_running_loop().call_later(KILL_S, self._ended, -signal.SIGKILL)

    async def _until_ended(self) -> None:
        try:
            status = await self._link.call("wait", deadline_s=None, engine=self.name)
        except EngineError:  # the driver has ended, and with it all that it owned
            status = -signal.SIGKILL
        self._ended(status)

    def _ended(self, status: int) -> None:
        if not self._status.done():
            self._status.set_result(status)


class RayLauncher:
    """Places engines by Ray; see `launched_engines.Launcher`. The cluster is joined by the first `launch`.

    Args:
        fleet: `ray_address`, `ray_cpus`, and how many engines there will be.
        api_key: what engines ask for; None, where vllm-router has none, keeps them on this node.
        log_dir: of engines, on whatever node they are, and of Ray's driver.
    """

    def __init__(self, fleet: FleetConfig, *, api_key: str | None, log_dir: Path) -> None:
        self._fleet = fleet
        self._api_key = api_key
        self._log_dir = log_dir.absolute()
        self._joining = asyncio.Lock()
        self._link: RayLink | None = None
        self._folder: Path | None = None
        """Of a cluster of our own."""
        self._ip = ""
        self._profile: Literal["cpu", "gpu"] = "cpu"
        self._placed: set[str] = set()
        """Engines that have a placement group."""

    async def launch(self, config: EngineConfig, name: str, gpus: Sequence[str]) -> RayEngine:
        """Start an engine on a node that has room, and return when it is ready. Ray chooses its GPUs, not `gpus`.

        Raises:
            ConfigError: no cluster, no node that could ever hold it, or what its node said of its configuration.
            EngineStartError: there was no room, or it did not start.
        """
        del gpus
        link = await self._joined(config)
        config = self._resolved(config)
        bundle = bundle_of(config, self._fleet.ray_cpus)
        plan = ActorPlan(
            name=name,
            engine=config,
            log_dir=self._log_dir,
            keep_log=self._fleet.log_dir is not None,
            launcher_ip=self._ip,
            gpus=bool(bundle.get("GPU")),
        )
        self._placed.add(name)
        try:
            url = await link.call(
                "start",
                deadline_s=2 * config.start_timeout_s + MARGIN_S,
                engine=name,
                bundle=bundle,
                plan=plan.model_dump(mode="json"),
                api_key=self._api_key,
                timeout_s=config.start_timeout_s,
            )
        except BaseException:
            link.post("release", engine=name)
            self._placed.discard(name)
            raise
        return RayEngine(name, url, link)

    async def place(self, config: EngineConfig, taken: Sequence[Sequence[str]]) -> tuple[str, ...]:
        """Ask Ray for room for one engine more besides `taken`. Raises ConfigError where there is none now."""
        link = await self._joined(config)
        bundle = bundle_of(self._resolved(config), self._fleet.ray_cpus)
        missing = max(1, len(taken) + 1 - len(self._placed))
        if not await link.call("room", deadline_s=ROOM_S + MARGIN_S, bundle=bundle, count=missing, timeout_s=ROOM_S):
            raise ConfigError(
                f"the Ray cluster has no room for one engine more, which needs {bundle} on one node: remove or replace "
                "an engine, add a node, or ask for less (fleet.ray_cpus)"
            )
        return ()

    async def release(self, name: str) -> None:
        """Remove the placement group of an engine that has ended."""
        self._placed.discard(name)
        if self._link is not None:
            with suppress(EngineDeadError):  # then Ray has removed it
                await self._link.call("release", deadline_s=MARGIN_S, engine=name)

    async def close(self) -> None:
        """Leave the cluster, which frees whatever is left; one of our own ends."""
        if self._link is not None:
            await self._link.close()
            self._link = None
        self._placed.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)  # a worker of Ray that ends now may write its last line
            self._folder = None

    def _resolved(self, config: EngineConfig) -> EngineConfig:
        """The profile `auto` is what the cluster has, not what this machine has."""
        return config.model_copy(update={"profile": self._profile}) if config.profile == "auto" else config

    async def _joined(self, config: EngineConfig) -> RayLink:
        """The link to the driver, which is started first, and anew where it has ended."""
        async with self._joining:
            if self._link is not None and not self._link.ended:
                return self._link
            wanted = self._fleet.engines if self._link is None else 1
            await self.close()
            try:
                return await self._join(config, wanted)
            except BaseException:
                if self._link is not None:
                    self._link.kill()
                await self.close()
                raise

    async def _join(self, config: EngineConfig, wanted: int) -> RayLink:
        address = self._fleet.ray_address or os.environ.get("RAY_ADDRESS") or _joined_here() or "local"
        await _reach(address)
        env = {"RAY_USAGE_STATS_ENABLED": "0"}
        if address == "local":
            self._folder = Path(tempfile.mkdtemp(prefix="ray-"))
            env |= LOOPBACK | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        link = self._link = await RayLink.start(self._log_dir / "ray.log", env, self._folder)
        cpus = self._fleet.engines * bundle_of(config, self._fleet.ray_cpus)["CPU"]
        folder = str(self._folder) if self._folder is not None else None
        try:
            there = await link.call("open", deadline_s=OPEN_S, address=address, cpus=cpus, folder=folder)
        except DeadlineError as error:
            raise _unreachable(address, f"no answer within {OPEN_S:g} s") from error
        self._ip = there["ip"]
        nodes: list[dict[str, float]] = there["nodes"]
        self._profile = "gpu" if any(node.get("GPU") for node in nodes) else "cpu"
        _check_room(bundle_of(self._resolved(config), self._fleet.ray_cpus), nodes, wanted)
        return link


def bundle_of(config: EngineConfig, cpus: float | None) -> dict[str, float]:
    """What one engine asks of one node: a GPU for each rank where it runs on GPUs, and CPUs (default: one a rank)."""
    ranks = config.tensor_parallel_size * config.pipeline_parallel_size * config.data_parallel_size
    bundle = {"CPU": float(ranks if cpus is None else cpus)}
    return bundle | {"GPU": float(ranks)} if config.profile == "gpu" else bundle


def capacity(bundle: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> int:
    """How many such bundles fit on empty nodes, each on one."""
    return sum(
        min((int(node.get(name, 0.0) / amount) for name, amount in bundle.items() if amount), default=sys.maxsize)
        for node in nodes
    )


def _check_room(bundle: Mapping[str, float], nodes: Sequence[Mapping[str, float]], engines: int) -> None:
    if not any(bundle.values()):
        raise ConfigError(
            "fleet.ray_cpus is 0, and Ray has no place for what asks for nothing; engines without GPUs need some"
        )
    if capacity(bundle, nodes) < engines:
        shown = "; ".join(", ".join(f"{name}: {node.get(name, 0.0):g}" for name in ("CPU", "GPU")) for node in nodes)
        raise ConfigError(
            f"{engines} engines of {dict(bundle)} do not fit the Ray cluster, whose nodes have {shown}: ask for fewer "
            "engines or less for each (fleet.ray_cpus, parallel sizes), or add nodes"
        )


async def _reach(address: str) -> None:
    """Raise ConfigError where nobody listens at an address of the form HOST:PORT."""
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


def _joined_here() -> str | None:
    """The cluster that this process is a driver or worker of."""
    ray: Any = sys.modules.get("ray")  # who has not imported it has joined none
    return ray.get_runtime_context().gcs_address if ray is not None and ray.is_initialized() else None
