"""`python -m penstock.fleet.ray_driver FD`: the Ray driver of one fleet, which serves calls on the socket FD.

It is a process of its own because Ray ends a driver's process with its node, replaces its signal handlers, and knows
one cluster in a process. As a child under a lifeline it ends with the launcher, by any signal, and Ray frees what it
owned: actors and placement groups that are not detached.
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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from penstock.engine.launch import EngineProcess
from penstock.errors import ConfigError, EngineStartError, PenstockError, error_from_json, error_to_json
from penstock.fleet.calls import CallServer
from penstock.fleet.engines import visible_gpus
from penstock.process import watch_lifeline
from penstock.settings import EngineConfig, Section

PREFIX = "/ray"
OBJECT_STORE_BYTES = 80 * 2**20
"""About the least that Ray takes. Nothing of ours lies in it."""

ACTOR_ENV = {"RAY_kill_child_processes_on_worker_exit": "0"}
"""Else the worker of an actor that loses its owner kills the server alone, and its cores outlive it. By its lifeline
the server ends with the actor and takes them along."""

ACTOR_S = 5.0
"""Deadline of an actor's last answer; an actor on a lost node gives none."""


class ActorPlan(Section):
    """What an actor knows of its engine."""

    name: str
    engine: EngineConfig
    log_dir: Path
    keep_log: bool
    """Leave the log behind on another host than the launcher's, which cleans its own."""
    launcher_ip: str
    """Of the node where fleet and router are."""
    gpus: bool
    """It runs on those that Ray has given to its actors."""


class EngineActor:
    """Holds one bundle of an engine on a Ray node. The engine's first actor runs its server, and says when it ends.

    The server holds the read end of a lifeline whose write end is in the actor's process: it ends with the actor, and
    so with the node's Ray and with the fleet. Answers are plain values: no exception is unpickled elsewhere. `plan` is
    an `ActorPlan` as JSON.
    """

    def __init__(self, plan: str) -> None:
        self._plan = ActorPlan.model_validate_json(plan)
        self._process: EngineProcess | None = None
        threading.Thread(target=end_with, args=(os.getppid(),), name="penstock-node", daemon=True).start()

    async def where(self) -> tuple[str, list[str]]:
        """Return Ray's address of this node, and the GPUs of this bundle."""
        ray = importlib.import_module("ray")
        return ray.util.get_node_ip_address(), list(visible_gpus()) if self._plan.gpus else []

    async def start(self, api_key: str | None, node_ip: str, gpus: list[str]) -> dict[str, Any]:
        """Start the server: `{"url": ...}` when it is ready, or `{"error": ...}` and it is gone.

        The key comes with this call, from the driver to this process alone: the cluster keeps and shows what an actor
        is made of.
        """
        plan = self._plan
        try:
            host = _host(plan, node_ip, with_key=bool(api_key))
            self._process = await EngineProcess.launch(
                plan.engine, name=plan.name, log_dir=plan.log_dir, api_key=api_key, gpus=gpus, host=host
            )
        except PenstockError as error:
            return {"error": error_to_json(error)}
        return {"url": self._process.url}

    async def wait(self) -> int:
        """Exit status of the server, once its whole process group is gone."""
        return -signal.SIGKILL if self._process is None else await self._process.wait()

    async def stop(self, timeout_s: float, *, remove_log: bool) -> None:
        """SIGTERM, and SIGKILL after `timeout_s` seconds; returns when it has ended."""
        if (process := self._process) is None:
            return
        await process.stop(timeout_s)
        if remove_log:
            process.log.unlink(missing_ok=True)
            with suppress(OSError):  # another engine's log is in it
                process.log.parent.rmdir()


def _host(plan: ActorPlan, node_ip: str, *, with_key: bool) -> str:
    """Where the server listens: loopback where the router is on the same node."""
    if node_ip == plan.launcher_ip:
        return "127.0.0.1"
    if not with_key:
        raise ConfigError(
            f"engine {plan.name} was placed on another node, {node_ip}, where it would be open to other machines, and "
            "behind vllm-router there is no key but api_key (of penstock serve: PENSTOCK_API_KEY); set it, or keep "
            "router.kind=penstock"
        )
    return node_ip


def end_with(parent: int) -> None:
    """End this process with its node's Ray, whose end alone does not end an actor that waits for its server."""
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(parent)], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(slots=True)
class _Placed:
    """An engine's bundles, kept while it is restarted; where its node is lost, Ray places them on another."""

    group: Any
    bundles: range
    own: bool
    """The group is this engine's, not one that was given."""
    actors: list[Any] = field(default_factory=list[Any])
    remove_log: bool = False

    def drop(self, ray: Any) -> None:
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []


class RayDriver:
    """What a launcher can call. Ray is imported by `open`, so that the environment decides about it before."""

    def __init__(self) -> None:
        self._ray: Any = None
        self._given: Any = None
        """A placement group that was given."""
        self._engines: dict[str, _Placed] = {}

    async def open(self, address: str, cpus: float, folder: str, group: str | None) -> dict[str, Any]:
        """Join a cluster at `address` (as `ray.init` takes it), or start one of this machine (`local`) in `folder`.

        A new one has at least `cpus`. Engines go to the placement group `group`, an id; None: each gets its own.

        Returns:
            `{"ip", "nodes"}`: Ray's address of this machine, and the resources of each node.

        Raises:
            ConfigError: none is there.
        """
        ray: Any = importlib.import_module("ray")
        self._ray = ray
        options: dict[str, Any] = {"address": address, "log_to_driver": False, "configure_logging": False}
        if address == "local":
            options |= {
                "include_dashboard": False,
                "num_cpus": max(int(cpus), os.cpu_count() or 1),
                "object_store_memory": OBJECT_STORE_BYTES,
                "_node_ip_address": "127.0.0.1",
                "_temp_dir": folder,
            }
        try:
            # In the main thread: the kernel ends what Ray starts together with the thread that started it.
            ray.init(**options)
            if group is not None:
                group_id = importlib.import_module("ray._raylet").PlacementGroupID.from_hex(group)
                self._given = importlib.import_module("ray.util.placement_group").PlacementGroup(group_id)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            # What Ray says of a token that is missing is in its log alone.
            hint = "where it asks for a token (as one of Ray 2.60's `ray start` does), set RAY_AUTH_MODE=token; or "
            raise ConfigError(
                f"cannot join the Ray cluster at {address}: {_one_line(error)}; "
                f"{'' if os.environ.get('RAY_AUTH_MODE') else hint}start one with `ray start --head`, or leave "
                "fleet.ray_address and RAY_ADDRESS out to have one for this fleet alone"
            ) from error
        return {"ip": ray.util.get_node_ip_address(), "nodes": [n["Resources"] for n in ray.nodes() if n["Alive"]]}

    async def room(self, bundles: list[dict[str, float]], count: int, timeout_s: float) -> bool:
        """Return whether there is room now for so many engines more; tried, not computed."""
        if self._given is not None:
            return all(self._free_bundles(len(bundles) * (i + 1)) is not None for i in range(count))
        groups = [self._ray.util.placement_group(bundles, strategy="STRICT_PACK") for _ in range(count)]
        try:
            return all([await asyncio.to_thread(group.wait, timeout_s) for group in groups])
        finally:
            for group in groups:
                self._ray.util.remove_placement_group(group)

    async def start(
        self, engine: str, bundles: list[dict[str, float]], plan: dict[str, Any], api_key: str | None, timeout_s: float
    ) -> str:
        """Start an engine where there is room for its bundles, which is waited for at most `timeout_s` seconds.

        Returns:
            Its URL when it is ready.

        Raises:
            EngineStartError: there was no room, or it did not start; its bundles are still set aside.
            ConfigError: what its node said of its configuration.
        """
        placed = self._engines.get(engine) or self._place(engine, bundles)
        try:
            async with asyncio.timeout(timeout_s):
                await placed.group.ready()
            placed.actors = self._actors(placed, bundles, orjson.dumps(plan).decode())
            async with asyncio.timeout(timeout_s):  # a given group may be full
                nodes = [await actor.where.remote() for actor in placed.actors]
            node_ip = nodes[0][0]
            if len({ip for ip, _ in nodes}) > 1:
                raise ConfigError(f"bundles of engine {engine} lie on several nodes; give another ray_placement_group")
            placed.remove_log = not plan["keep_log"] and node_ip != plan["launcher_ip"]
            answer = await placed.actors[0].start.remote(api_key, node_ip, [gpu for _, its in nodes for gpu in its])
        except TimeoutError as error:
            why = f"the Ray cluster had no room for {bundles} on one node within {timeout_s:g} s"
            raise EngineStartError(why, engine=engine) from error
        except self._ray.exceptions.RayError as error:
            why = f"Ray did not place {bundles}, or its actor died while it started: {_one_line(error)}"
            raise EngineStartError(why, engine=engine) from error
        if "error" in answer:
            raise error_from_json(answer["error"])
        return str(answer["url"])

    async def wait(self, engine: str) -> int:
        """Exit status of an engine's process; that of a SIGKILL where its actor or node is lost."""
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
            with suppress(TimeoutError, self._ray.exceptions.RayError):  # it is killed in any case
                async with asyncio.timeout(timeout_s + ACTOR_S):
                    await placed.actors[0].stop.remote(timeout_s, remove_log=placed.remove_log)
            placed.drop(self._ray)

    async def release(self, engine: str) -> None:
        """Give back an engine's bundles, and end whatever still runs there."""
        placed = self._engines.pop(engine, None)
        if placed is not None:
            placed.drop(self._ray)
            if placed.own:
                self._ray.util.remove_placement_group(placed.group)

    async def close(self) -> None:
        """Leave the cluster; one that `open` started ends."""
        if self._ray is not None:
            self._ray.shutdown()

    def _place(self, engine: str, bundles: list[dict[str, float]]) -> _Placed:
        if self._given is None:  # not detached: Ray removes it when this process ends
            name = f"penstock-{engine}-{os.getpid()}"
            group = self._ray.util.placement_group(bundles, strategy="STRICT_PACK", name=name)
            placed = _Placed(group, range(len(bundles)), own=True)
        elif (free := self._free_bundles(len(bundles))) is not None:
            placed = _Placed(self._given, free, own=False)
        else:
            raise EngineStartError(f"fleet.ray_placement_group has no {len(bundles)} bundles left", engine=engine)
        self._engines[engine] = placed
        return placed

    def _actors(self, placed: _Placed, bundles: list[dict[str, float]], plan: str) -> list[Any]:
        actor_class = self._ray.remote(EngineActor)
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        return [
            actor_class.options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=strategy(placed.group, index),
                runtime_env={"env_vars": ACTOR_ENV},
            ).remote(plan)
            for index, bundle in zip(placed.bundles, bundles, strict=True)
        ]

    def _free_bundles(self, count: int) -> range | None:
        """So many bundles in a row of the given group that no engine has."""
        taken = {index for placed in self._engines.values() for index in placed.bundles}
        runs = (range(i, i + count) for i in range(0, self._given.bundle_count - count + 1, count))
        return next((run for run in runs if not taken & set(run)), None)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


async def serve(listening: socket.socket) -> None:
    """Answer calls until the launcher ends this process."""
    driver = RayDriver()
    names = ("open", "room", "start", "wait", "stop", "release", "close")
    await CallServer(PREFIX, {name: getattr(driver, name) for name in names}).start(listening)
    await asyncio.Event().wait()


def main(argv: list[str]) -> int:
    """Serve the socket whose number is the one argument."""
    watch_lifeline()
    asyncio.run(serve(socket.socket(fileno=int(argv[0]))))
    return 0


if __name__ == "__main__":  # Ray names the actor's class by its module, which is not __main__ on other nodes
    sys.exit(importlib.import_module("penstock.fleet.ray_driver").main(sys.argv[1:]))
