"""`python -m penstock.fleet.ray_driver FD`: the Ray driver of one fleet; it serves calls on the socket FD.

It is a separate process because Ray ends a driver's process with its node, replaces its signal handlers, and knows one
cluster per process. As a child under a lifeline, it ends with the launcher, by any signal. Ray then frees the driver's
actors and placement groups that are not detached.
"""
# pyright: basic

from __future__ import annotations

import asyncio
import importlib
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.engine.command import server_command
from penstock.engine.launch import EngineProcess
from penstock.errors import ConfigError, EngineStartError, PenstockError
from penstock.fleet.calls import CallServer
from penstock.fleet.gpus import visible_gpus
from penstock.lifeline import watch_lifeline
from penstock.settings import EngineConfig, FleetConfig
from penstock.start_report import error_from_json, error_to_json

PREFIX = "/ray"
CALLS = ("open", "start", "wait", "stop", "release")
"""Methods of `RayDriver` that a launcher can call."""

OBJECT_STORE_BYTES = 80 * 2**20
"""About the least that Ray accepts. Penstock stores no objects there."""

ACTOR_ENV = {"RAY_kill_child_processes_on_worker_exit": "0"}
"""Without it, the worker of an actor that loses its owner kills the server alone, and the cores outlive it. The
lifeline ends the server with the actor, and the cores with it."""

PLACE_S = 20.0
"""Seconds that Ray may take to reserve bundles. After that it has no room; a restart is tried again."""

ACTOR_S = 5.0
"""Deadline of an actor's last answer, which an actor on a lost node never gives."""

Bundle = dict[str, float]


class EngineActor:
    """Holds one bundle of an engine on a Ray node. The engine's first actor runs its server and reports its end.

    The server holds the read end of a lifeline whose write end is in the actor's process. So it ends with the actor,
    with the node's Ray, and with the fleet. Answers are plain values, so that no process unpickles an exception.
    `config` is an `EngineConfig` as JSON.
    """

    def __init__(self, name: str, config: str, log_dir: str) -> None:
        self._name = name
        self._config = EngineConfig.model_validate_json(config)
        self._log_dir = Path(log_dir)
        self._process: EngineProcess | None = None
        threading.Thread(target=end_with, args=(os.getppid(),), name="penstock-node", daemon=True).start()

    async def where(self) -> tuple[str, list[str]]:
        """Return Ray's address of this node, and the GPUs of this bundle."""
        ray = importlib.import_module("ray")
        return ray.util.get_node_ip_address(), list(visible_gpus()) if self._config.profile == "gpu" else []

    async def start(self, api_key: str | None, host: str, gpus: list[str]) -> dict[str, Any]:
        """Start the server; return `{"url": ...}`, or `{"error": ...}` and it is gone.

        This call brings the key from the driver to this process alone: the cluster keeps and shows an actor's
        constructor arguments.
        """
        try:
            command = server_command(self._config, api_key=api_key, host=host)
            self._process = await EngineProcess.launch(command, name=self._name, log_dir=self._log_dir, gpus=gpus)
        except PenstockError as error:
            return {"error": error_to_json(error)}
        return {"url": self._process.url}

    async def wait(self) -> int:
        """Return the server's exit status once its process group is gone, or outlives SIGKILL."""
        return -signal.SIGKILL if self._process is None else await self._process.wait()

    async def stop(self, timeout_s: float) -> None:
        """Send SIGTERM, and SIGKILL after `timeout_s` seconds; return when it has ended, or outlives that."""
        if self._process is not None:
            await self._process.stop(timeout_s)


def end_with(parent: int) -> None:
    """End this process with its node's Ray, which leaves waiting actors running."""
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(parent)], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def join(address: str, group: str | None = None, **options: Any) -> tuple[Any, Any]:
    """Join the cluster at `address`; return Ray and the placement group of id `group`.

    `address` is as for `ray.init`. Call it in the main thread: Ray's processes end with the thread that started them.

    Raises:
        ConfigError: there is no cluster.
    """
    ray: Any = importlib.import_module("ray")
    given = None
    try:
        ray.init(address, log_to_driver=False, configure_logging=False, **options)
        if group is not None:
            group_id = importlib.import_module("ray._raylet").PlacementGroupID.from_hex(group)
            given = importlib.import_module("ray.util.placement_group").PlacementGroup(group_id)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        # Ray reports a missing token only in its log.
        hint = "where it asks for a token (as one of Ray 2.60's `ray start` does), set RAY_AUTH_MODE=token; or "
        raise ConfigError(
            f"cannot join the Ray cluster at {address}: {_one_line(error)}; "
            f"{'' if os.environ.get('RAY_AUTH_MODE') else hint}start one with `ray start --head`, or leave "
            "fleet.ray_address and RAY_ADDRESS out to have one for this fleet alone"
        ) from error
    return ray, given


def actors_in(ray: Any, group: Any, first: int, bundles: Sequence[Bundle], actor: type, *arguments: Any) -> list[Any]:
    """Make an actor in each of these bundles of a placement group, from `first` on."""
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    return [
        ray.remote(actor)
        .options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=strategy(group, index),
            runtime_env={"env_vars": ACTOR_ENV},
        )
        .remote(*arguments)
        for index, bundle in enumerate(bundles, first)
    ]


@dataclass(slots=True)
class _Placed:
    """An engine's bundles, kept through restarts; if its node is lost, Ray places them on another."""

    group: Any
    bundles: range
    actors: list[Any] = field(default_factory=list[Any])

    def drop(self, ray: Any) -> None:
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []


class RayDriver:
    """Methods that a launcher can call. `open` imports Ray, so that the environment is read only then.

    `engine` is a name, and `config` an engine's config as JSON.
    """

    def __init__(self) -> None:
        self._ray: Any = None
        self._ip = ""
        self._fleet = FleetConfig()
        self._profile = ""
        """The profile that `auto` means on this cluster, whatever the launcher's machine has."""
        self._given: Any = None
        """The placement group given in the config, or None."""
        self._engines: dict[str, _Placed] = {}

    async def open(self, address: str, folder: str, fleet: dict[str, Any], config: dict[str, Any]) -> None:
        """Join a cluster, or start a `local` one in `folder`, for engines of `config`.

        Raises:
            ConfigError: there is no cluster.
        """
        self._fleet = FleetConfig(**fleet)
        options: dict[str, Any] = {}
        if address == "local":
            cpus = self._fleet.engines * sum(
                bundle["CPU"] for bundle in bundles_of(EngineConfig(**config), self._fleet)
            )
            options = {
                "include_dashboard": False,
                "num_cpus": max(int(cpus), os.cpu_count() or 1),
                "object_store_memory": OBJECT_STORE_BYTES,
                "_node_ip_address": "127.0.0.1",
                "_temp_dir": folder,
            }
        self._ray, self._given = join(address, self._fleet.ray_placement_group, **options)
        self._ip = self._ray.util.get_node_ip_address()
        self._profile = "gpu" if any(node.get("GPU") for node in self._nodes()) else "cpu"

    async def start(self, engine: str, config: dict[str, Any], log_dir: str, api_key: str | None) -> str:
        """Start an engine where Ray has room for its bundles; return its URL once ready.

        Raises:
            EngineStartError: there was no room, or it did not start; its bundles stay reserved.
            ConfigError: its node refuses its configuration.
        """
        resolved, bundles = self._resolved(config)
        placed = self._engines.get(engine) or self._place(engine, bundles)
        shown = "; ".join(f"CPU: {node.get('CPU', 0.0):g}, GPU: {node.get('GPU', 0.0):g}" for node in self._nodes())
        no_room = EngineStartError(
            f"the Ray cluster, whose nodes have {shown}, has no room now for {bundles} on one node: ask for fewer "
            "engines or less for each (fleet.ray_cpus, parallel sizes), or add nodes",
            engine=engine,
        )
        if not await asyncio.to_thread(placed.group.wait, PLACE_S):
            raise no_room
        try:
            given = (engine, resolved.model_dump_json(), log_dir)
            placed.actors = actors_in(self._ray, placed.group, placed.bundles.start, bundles, EngineActor, *given)
            async with asyncio.timeout(resolved.start_timeout_s):  # a given group may be full
                nodes = [await actor.where.remote() for actor in placed.actors]
            if len({ip for ip, _ in nodes}) > 1:
                raise ConfigError(f"bundles of engine {engine} lie on several nodes; give another ray_placement_group")
            host = host_of(engine, nodes[0][0], self._ip, with_key=bool(api_key))
            answer = await placed.actors[0].start.remote(api_key, host, [gpu for _, its in nodes for gpu in its])
        except TimeoutError as error:
            raise no_room from error
        except self._ray.exceptions.RayError as error:
            why = f"Ray did not place {bundles}, or its actor died while it started: {_one_line(error)}"
            raise EngineStartError(why, engine=engine) from error
        if "error" in answer:
            raise error_from_json(answer["error"])
        return str(answer["url"])

    async def wait(self, engine: str) -> int:
        """Return an engine's exit status; that of SIGKILL if its actor or node is lost."""
        status, placed = -signal.SIGKILL, self._engines.get(engine)
        if placed is not None and (actors := placed.actors):
            with suppress(self._ray.exceptions.RayError):
                status = await actors[0].wait.remote()
            if placed.actors is actors:
                placed.drop(self._ray)
        return status

    async def stop(self, engine: str, timeout_s: float) -> None:
        """End an engine's process: SIGTERM, and SIGKILL after `timeout_s` seconds."""
        placed = self._engines.get(engine)
        if placed is not None and placed.actors:
            with suppress(TimeoutError, self._ray.exceptions.RayError):  # `drop` kills it in any case
                async with asyncio.timeout(timeout_s + ACTOR_S):
                    await placed.actors[0].stop.remote(timeout_s)
            placed.drop(self._ray)

    async def release(self, engine: str) -> None:
        """Free an engine's bundles, and end everything that still runs there."""
        placed = self._engines.pop(engine, None)
        if placed is not None:
            placed.drop(self._ray)
            if placed.group is not self._given:
                self._ray.util.remove_placement_group(placed.group)

    def _nodes(self) -> list[dict[str, float]]:
        """Return the resources of each living node, used or not."""
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def _resolved(self, config: dict[str, Any]) -> tuple[EngineConfig, list[Bundle]]:
        """Return an engine's config for this cluster, and the bundles that it needs."""
        auto = config["profile"] == "auto"
        resolved = EngineConfig(**{**config, "profile": self._profile} if auto else config)
        bundles = bundles_of(resolved, self._fleet)
        if not any(bundles[0].values()):
            raise ConfigError(
                "fleet.ray_cpus is 0, and Ray has no place for what asks for nothing; engines without GPUs need some"
            )
        return resolved, bundles

    def _place(self, engine: str, bundles: list[Bundle]) -> _Placed:
        if self._given is None:  # not detached: Ray removes it when this process ends
            name = f"penstock-{engine}-{os.getpid()}"
            group = self._ray.util.placement_group(bundles, strategy="STRICT_PACK", name=name)
            placed = _Placed(group, range(len(bundles)))
        elif (free := self._free_bundles(len(bundles))) is not None:
            placed = _Placed(self._given, free)
        else:
            raise EngineStartError(f"fleet.ray_placement_group has no {len(bundles)} bundles left", engine=engine)
        self._engines[engine] = placed
        return placed

    def _free_bundles(self, count: int) -> range | None:
        """Return `count` adjacent bundles of the given group that no engine has."""
        taken = {index for placed in self._engines.values() for index in placed.bundles}
        runs = (range(i, i + count) for i in range(0, self._given.bundle_count - count + 1, count))
        return next((run for run in runs if not taken & set(run)), None)


def host_of(engine: str, node_ip: str, own_ip: str, *, with_key: bool) -> str:
    """Return the host where a server listens: loopback if the router is on its node."""
    if node_ip == own_ip:
        return "127.0.0.1"
    if not with_key:
        raise ConfigError(
            f"engine {engine} was placed on another node, {node_ip}, where it would be open to other machines, and "
            "behind vllm-router there is no key but api_key (of penstock serve: PENSTOCK_API_KEY); set it, or keep "
            "router.kind=penstock"
        )
    return node_ip


def bundles_of(config: EngineConfig, fleet: FleetConfig) -> list[Bundle]:
    """Return an engine's bundles, on one node: one for each GPU, or one of CPUs."""
    ranks = config.tensor_parallel_size * config.pipeline_parallel_size * config.data_parallel_size
    cpus = float(ranks if fleet.ray_cpus is None else fleet.ray_cpus)
    if config.profile != "gpu":
        return [{"CPU": cpus}]
    return [{"GPU": fleet.ray_gpus or 1.0, "CPU": cpus / ranks} for _ in range(ranks)]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


async def serve(listening: socket.socket) -> None:
    """Answer calls until the launcher ends this process."""
    driver = RayDriver()
    await CallServer(PREFIX, {name: getattr(driver, name) for name in CALLS}).start(listening)
    await asyncio.Event().wait()


def main(argv: list[str]) -> int:
    """Serve the socket whose number is the only argument."""
    watch_lifeline()
    asyncio.run(serve(socket.socket(fileno=int(argv[0]))))
    return 0


if __name__ == "__main__":  # Ray names the actor's class by its module, which is not __main__ on other nodes
    sys.exit(importlib.import_module("penstock.fleet.ray_driver").main(sys.argv[1:]))
