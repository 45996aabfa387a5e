"""`python -m penstock.fleet.ray_driver FD`: the Ray driver of one fleet, told what to do by JSON lines on socket FD.

Every engine has a placement group of one bundle: its server is one process, which needs all its GPUs on one node. The
group is kept while the engine is started anew; where its node is lost, Ray places it on another.
"""
# pyright: basic

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import socket
import sys
import traceback
from dataclasses import dataclass, field
from typing import Any

import orjson

from penstock.errors import ConfigError, EngineError, EngineStartError, PenstockError, error_from_json, error_to_json
from penstock.fleet.ray_actor import EngineActor
from penstock.fleet.ray_link import MAX_LINE
from penstock.process import watch_lifeline

OBJECT_STORE_BYTES = 80 * 2**20
"""About the least that Ray takes. Nothing of ours lies in it."""

ACTOR_ENV = {"RAY_kill_child_processes_on_worker_exit": "0"}
"""Else the worker of an actor that loses its owner kills the server, and nothing more: its cores would outlive it. By
its lifeline it ends with the actor and takes them along."""

ACTOR_S = 5.0
"""Deadline of an actor's last words; one on a lost node has none."""


@dataclass(slots=True)
class _Placed:
    group: Any
    actor: Any = None
    killed: asyncio.Event = field(default_factory=asyncio.Event)


class RayDriver:
    """What a launcher can call. Ray is imported by `open`, so that the environment decides about it before."""

    def __init__(self) -> None:
        self._ray: Any = None
        self._actor_class: Any = None
        self._engines: dict[str, _Placed] = {}

    async def open(self, address: str, cpus: float, folder: str | None) -> dict[str, Any]:
        """Join a cluster, or start one of this machine.

        Args:
            address: as `ray.init` takes it; `local` starts one.
            cpus: that a new one has at least.
            folder: of a new one's files.

        Returns:
            `{"ip", "nodes"}`: Ray's address of this machine, and the resources of each node.

        Raises:
            ConfigError: none is there.
        """
        self._ray = ray = importlib.import_module("ray")
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
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise ConfigError(
                f"cannot join the Ray cluster at {address}: {' '.join(str(error).split())[:500]}; {_token_hint()}start "
                "one with `ray start --head`, or leave fleet.ray_address and RAY_ADDRESS out to have one for this "
                "fleet alone"
            ) from error
        self._actor_class = ray.remote(EngineActor)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return {"ip": ray.util.get_node_ip_address(), "nodes": nodes}

    async def room(self, bundle: dict[str, float], count: int, timeout_s: float) -> bool:
        """Whether Ray has room now for so many placement groups more; tried, not computed."""
        trial = self._ray.util.placement_group([bundle] * count, strategy="PACK")
        try:
            return await asyncio.to_thread(trial.wait, timeout_s)
        finally:
            self._ray.util.remove_placement_group(trial)

    async def start(
        self, engine: str, bundle: dict[str, float], plan: dict[str, Any], api_key: str | None, timeout_s: float
    ) -> str:
        """Start an engine where there is room for its group, which is waited for at most `timeout_s` seconds.

        Returns:
            Its URL when it is ready.

        Raises:
            EngineStartError: there was no room, or it did not start; its group is still there.
            ConfigError: what its node said of its configuration.
        """
        ray = self._ray
        placed = self._engines.get(engine)
        if placed is None:  # not detached: Ray removes it when this process ends
            group = ray.util.placement_group([bundle], strategy="PACK", name=f"penstock-{engine}-{os.getpid()}")
            placed = self._engines[engine] = _Placed(group)
        try:
            async with asyncio.timeout(timeout_s):
                await placed.group.ready()
        except TimeoutError as error:
            raise EngineStartError(
                f"the Ray cluster had no room for {bundle} on one node within {timeout_s:g} s", engine=engine
            ) from error
        except ray.exceptions.RayError as error:
            why = " ".join(str(error).split())[:500]
            raise EngineStartError(f"Ray did not place {bundle} on a node: {why}", engine=engine) from error
        node = ray.util.placement_group_table(placed.group)["bundles_to_node_id"][0]
        node_ip = next((n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == node), "")
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(placed.group, 0)
        placed.killed.clear()
        placed.actor = actor = self._actor_class.options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=strategy,
            runtime_env={"env_vars": ACTOR_ENV},
        ).remote(orjson.dumps(plan).decode(), node_ip)
        try:
            answer = await actor.start.remote(api_key)
        except ray.exceptions.RayError as error:
            self._drop(placed)
            why = " ".join(str(error).split())[:500]
            raise EngineStartError(f"its Ray actor on {node_ip} died while it started: {why}", engine=engine) from error
        if "error" in answer:
            raise error_from_json(answer["error"])
        return str(answer["url"])

    async def wait(self, engine: str) -> int:
        """Exit status of an engine's process; that of a SIGKILL where its actor or node is lost."""
        placed = self._engines.get(engine)
        if placed is None or placed.actor is None:
            return -signal.SIGKILL
        status = asyncio.ensure_future(self._status(placed.actor))
        killed = asyncio.create_task(placed.killed.wait())
        await asyncio.wait((status, killed), return_when=asyncio.FIRST_COMPLETED)
        killed.cancel()
        if not status.done():
            status.cancel()
            return -signal.SIGKILL
        self._drop(placed)
        return status.result()

    async def stop(self, engine: str, timeout_s: float) -> None:
        """End an engine's process: SIGTERM, and SIGKILL after `timeout_s` seconds."""
        placed = self._engines.get(engine)
        if placed is not None and placed.actor is not None:
            await self._last_word(placed.actor.stop.remote(timeout_s), timeout_s + ACTOR_S)
            self._drop(placed)

    async def kill(self, engine: str) -> None:
        """End an engine's process at once, and its actor."""
        placed = self._engines.get(engine)
        if placed is not None and placed.actor is not None:
            await self._last_word(placed.actor.kill.remote(), ACTOR_S)
            self._drop(placed)

    async def release(self, engine: str) -> None:
        """Remove an engine's placement group, and with it whatever still runs there."""
        placed = self._engines.pop(engine, None)
        if placed is not None:
            self._drop(placed)
            self._ray.util.remove_placement_group(placed.group)

    def close(self) -> None:
        """Leave the cluster; one that `open` started ends."""
        if self._ray is not None:
            self._ray.shutdown()

    async def _status(self, actor: Any) -> int:
        try:
            return await actor.wait.remote()
        except self._ray.exceptions.RayError:
            return -signal.SIGKILL

    async def _last_word(self, answer: Any, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await answer
        except (TimeoutError, self._ray.exceptions.RayError):
            pass  # it is killed in any case

    def _drop(self, placed: _Placed) -> None:
        if placed.actor is not None:
            self._ray.kill(placed.actor)
            placed.actor = None
        placed.killed.set()


def _token_hint() -> str:
    """What Ray says of a token that is missing is in its log alone."""
    if os.environ.get("RAY_AUTH_MODE"):
        return ""
    return "where it asks for a token (as one of Ray 2.60's `ray start` does), set RAY_AUTH_MODE=token; or "


async def serve(connection: socket.socket) -> None:
    """Answer calls until the launcher closes its end."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_LINE)
    driver = RayDriver()
    calls: set[asyncio.Task[None]] = set()
    try:
        while line := await reader.readline():
            task = asyncio.create_task(_answer(driver, writer, orjson.loads(line)))
            calls.add(task)
            task.add_done_callback(calls.discard)
    finally:
        for task in calls:
            task.cancel()
        driver.close()


async def _answer(driver: RayDriver, writer: asyncio.StreamWriter, said: dict[str, Any]) -> None:
    try:
        answer = {"result": await getattr(driver, said["call"])(**said["arguments"])}
    except PenstockError as error:
        answer = {"error": error_to_json(error)}
    except Exception as error:  # noqa: BLE001 - whatever it is, without an answer the launcher would wait in vain
        traceback.print_exc()
        answer = {"error": error_to_json(EngineError(f"Ray {said['call']}: {type(error).__name__}: {error}"))}
    writer.write(orjson.dumps({"id": said["id"], **answer}) + b"\n")


def main(argv: list[str]) -> int:
    """Serve the socket whose number is the one argument."""
    watch_lifeline()
    asyncio.run(serve(socket.socket(fileno=int(argv[0]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
