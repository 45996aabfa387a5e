"""A Ray cluster of several nodes on this machine, on loopback addresses.

`python ray_nodes.py` is the cluster, told what to do on stdin: a process of its own, since Ray ends what it started
together with the thread that started it, and knows one cluster in a process. `RayNodes` is who tells it.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}
"""Of the cluster and of whoever joins it: Ray takes no other address for 127.0.0.1 then, and writes no token into the
home folder."""

QUICK = {"RAY_health_check_initial_delay_ms": "500", "RAY_health_check_period_ms": "500"}
"""A lost node is noticed in seconds, not in tens of them."""

ANSWER_S = 60.0


class RayNodes:
    """A running cluster, whose head has no CPUs to give."""

    def __init__(self, process: asyncio.subprocess.Process, folder: str) -> None:
        self._process = process
        self._folder = folder
        self.address = ""

    @classmethod
    async def start(cls) -> RayNodes:
        folder = tempfile.mkdtemp(prefix="ray-")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            __file__,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **LOOPBACK, **QUICK, "RAY_TMPDIR": folder},
            start_new_session=True,
        )
        nodes = cls(process, folder)
        nodes.address = await nodes._answer()
        return nodes

    async def add(self, ip: str, cpus: int) -> int:
        """Another node; returns its number, for `lose`."""
        return await self._ask("add", ip, cpus)

    async def lose(self, number: int) -> None:
        """All that runs on a node ends at once, as in a power cut."""
        await self._ask("lose", number)

    async def groups(self) -> list[dict[str, Any]]:
        """Placement groups that exist: `{"state", "strategy", "bundles", "nodes"}`."""
        return await self._ask("groups")

    async def make_group(self, bundles: int) -> str:
        """A placement group of so many bundles of a CPU, as a trainer has one; returns its id."""
        return await self._ask("make_group", bundles)

    async def until(self, reached: Callable[[list[dict[str, Any]]], bool], *, within_s: float) -> None:
        """Return when `reached` of the placement groups."""
        begin = time.monotonic()
        while not reached(groups := await self.groups()):
            assert time.monotonic() - begin < within_s, groups
            await asyncio.sleep(0.1)  # Ray sends no event

    async def stop(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _ask(self, *words: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)).encode() + b"\n")
        return await self._answer()

    async def _answer(self) -> Any:
        assert self._process.stdout is not None
        async with asyncio.timeout(ANSWER_S):
            return json.loads(await self._process.stdout.readline())


others: set[psutil.Process] = set()
"""Those below us that were there before: fixtures of other modules keep engines for the whole run."""


def ignore_present() -> None:
    """Count no process that lives now."""
    others.update(psutil.Process().children(recursive=True))


def processes(kind: str) -> list[psutil.Process]:
    """Living processes that run `python -m penstock.KIND` below us; those of a node end as children of the cluster."""
    found: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it ends meanwhile, or is a zombie
            found += [process] if process not in others and f"penstock.{kind}" in process.cmdline() else []
    return found


def main() -> None:
    import ray
    from ray.cluster_utils import Cluster

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints

    def say(answer: object) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    head = {"node_ip_address": "127.0.0.1", "num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(cluster.address, log_to_driver=False, configure_logging=False)
    nodes = [cluster.head_node]
    say(cluster.address)
    for line in sys.stdin:
        what, *arguments = line.split()
        if what == "add":
            nodes.append(cluster.add_node(node_ip_address=arguments[0], num_cpus=int(arguments[1])))
            say(len(nodes) - 1)
        elif what == "lose":
            lose(nodes[int(arguments[0])])
            say("lost")
        elif what == "make_group":
            made = ray.util.placement_group([{"CPU": 1}] * int(arguments[0]), strategy="PACK")
            say(made.id.hex())
        else:
            ips = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
            say([group(entry, ips) for entry in ray.util.placement_group_table().values()])


def lose(node: Any) -> None:
    for info in [info for infos in node.all_processes.values() for info in infos]:
        raylet = psutil.Process(info.process.pid)
        for process in [raylet, *raylet.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def group(entry: dict[str, Any], ips: dict[str, str]) -> dict[str, Any]:
    nodes = [ips.get(node, "") for node in entry["bundles_to_node_id"].values()]
    return {
        "state": entry["state"],
        "strategy": entry["strategy"],
        "bundles": list(entry["bundles"].values()),
        "nodes": nodes,
    }


if __name__ == "__main__":
    main()
