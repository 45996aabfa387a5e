"""Ray driver of a learner's ranks: `python -m penstock.train.ray_ranks OPTIONS`.

It is a separate process, like `fleet/ray_driver.py`. A lifeline ends it with rank 0. Ray then ends the actors and
removes their placement group, and each rank ends with its actor.
"""
# pyright: basic

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, LearnerError, PenstockError
from penstock.fleet.gpus import visible_gpus
from penstock.fleet.ray_driver import actors_in, end_with, join
from penstock.lifeline import watch_lifeline
from penstock.process import ChildProcess
from penstock.router_settings import Section

ROOM_S = 240.0
"""Seconds for the cluster to have room for all ranks."""


class Options(Section):
    """Options of the driver.

    `size` counts rank 0, which is no actor. The ranks meet at `master`. With `gpus`, each rank takes a GPU; rank 0
    takes one of this node. `log_dir`: folder of `rank-N.log`, on each rank's own node.
    """

    address: str
    size: int
    master: tuple[str, int]
    log_dir: Path
    gpus: bool


class RankActor:
    """Holds a rank's bundle on a Ray node, and runs the rank as a child process."""

    def __init__(self) -> None:
        threading.Thread(target=end_with, args=(os.getppid(),), name="penstock-node", daemon=True).start()

    async def gpus(self) -> list[str]:
        return list(visible_gpus())

    async def run(self, rank: int, env: dict[str, str], folder: str, log: str) -> str:
        """Run a rank in the user's folder until it ends. Return the reason, or an empty text for success."""
        with suppress(OSError):  # a user's own loss is imported from this folder
            os.chdir(folder)
        argv = [sys.executable, "-m", "penstock.train.ranks"]
        child = await ChildProcess.start(argv, name=f"rank {rank}", log=Path(log), env=env)
        status = await child.wait()
        lines = child.said().strip().splitlines() or ["nothing"]
        return f"ended with status {status}; it said last: {lines[-1]}" if status else ""


async def drive(options: Options) -> None:
    """Start the ranks once the cluster has room, and return when all have ended.

    Raises:
        PenstockError: no cluster, no room, or a lost rank. The other ranks then end with this process.
    """
    ray, _ = join(options.address)
    need: dict[str, float] = {"GPU": 1.0} if options.gpus else {"CPU": 1.0}
    here = [{**need, f"node:{ray.util.get_node_ip_address()}": 0.001}] if options.gpus else []
    bundles = [*here, *[need] * (options.size - 1)]
    group = ray.util.placement_group(bundles, strategy="PACK", name=f"penstock-ranks-{os.getpid()}")
    if not await asyncio.to_thread(group.wait, ROOM_S):
        raise ConfigError(f"the Ray cluster at {options.address} had no room for {bundles} within {ROOM_S:g} s")
    actors = actors_in(ray, group, 0, bundles, RankActor)
    gpu = (await actors[0].gpus.remote())[0] if here else ""
    from penstock.train.ranks import GPU, store_at  # noqa: PLC0415 - torch takes seconds

    store_at(*options.master).set(GPU, gpu)
    await asyncio.gather(*(_run(ray, actor, rank, options) for rank, actor in enumerate(actors[len(here) :], start=1)))


async def _run(ray: Any, actor: Any, rank: int, options: Options) -> None:
    """Run a rank to its end. LearnerError: it failed or was lost."""
    (host, port), folder = options.master, str(Path.cwd())
    env = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": options.size, "MASTER_ADDR": host, "MASTER_PORT": port}
    env |= {name: os.environ[name] for name in ("GLOO_SOCKET_IFNAME",) if name in os.environ}
    log = options.log_dir / f"rank-{rank}.log"
    try:
        why = await actor.run.remote(rank, {key: str(value) for key, value in env.items()}, folder, str(log))
    except ray.exceptions.RayError as error:
        why = f"was lost with its node or its actor: {' '.join(str(error).split())[:300]}"
    if why:
        raise LearnerError(f"rank {rank} {why}")


def main(argv: list[str]) -> int:
    """Drive the ranks by the only argument (`Options` as JSON); return the exit status."""
    watch_lifeline()
    try:
        asyncio.run(drive(Options.model_validate_json(argv[0])))
    except PenstockError as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        sys.stderr.flush()
        return 1
    return 0


if __name__ == "__main__":  # Ray names the actor's class by its module, which is not __main__ on other nodes
    sys.exit(importlib.import_module("penstock.train.ray_ranks").main(sys.argv[1:]))
