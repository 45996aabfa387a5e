"""What runs on a Ray node: one actor for each engine, thin around the engine server process of every other launcher."""

from __future__ import annotations

import os
import select
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.config import EngineConfig, Section
from penstock.engine.launch import EngineProcess
from penstock.errors import ConfigError, PenstockError, error_to_json
from penstock.fleet.options import visible_gpus


class ActorPlan(Section):
    """What an actor is told of its engine."""

    name: str
    engine: EngineConfig
    log_dir: Path
    keep_log: bool
    """Leave the log behind on another host than the launcher's, which cleans its own."""
    launcher_ip: str
    """Of the node where fleet and router are."""
    gpus: bool
    """It runs on those that Ray has given to the actor."""


class EngineActor:
    """Starts an engine server on its node, and says when it has ended.

    The server holds the read end of a lifeline whose write end is in the actor's process: it ends with the actor, and
    so with the node's Ray and with the fleet, by whatever signal. Answers are plain values, so that no exception has to
    be unpickled elsewhere.

    Args:
        plan: an `ActorPlan` as JSON.
        node_ip: Ray's address of this node.
    """

    def __init__(self, plan: str, node_ip: str) -> None:
        self._plan = ActorPlan.model_validate_json(plan)
        self._node_ip = node_ip
        self._process: EngineProcess | None = None
        threading.Thread(target=_end_with, args=(os.getppid(),), name="penstock-node", daemon=True).start()

    async def start(self, api_key: str | None) -> dict[str, Any]:
        """Start the server: `{"url": ...}` when it is ready, or `{"error": ...}` and it is gone.

        The key that it asks for comes with this call, from the driver to this process alone: what an actor is made of
        and its runtime environment are kept by the cluster and shown by its tools.
        """
        plan = self._plan
        try:
            self._process = await EngineProcess.launch(
                plan.engine,
                name=plan.name,
                log_dir=plan.log_dir,
                api_key=api_key,
                gpus=visible_gpus() if plan.gpus else (),
                host=self._host(with_key=bool(api_key)),
            )
        except PenstockError as error:
            return {"error": error_to_json(error)}
        return {"url": self._process.url}

    async def wait(self) -> int:
        """Exit status of the server, once its whole process group is gone."""
        return await self._started().wait()

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM, and SIGKILL after `timeout_s` seconds; returns when it has ended."""
        process = self._started()
        await process.stop(timeout_s)
        if not self._plan.keep_log and self._elsewhere():
            process.log.unlink(missing_ok=True)
            with suppress(OSError):  # another engine's log is in it
                process.log.parent.rmdir()

    async def kill(self) -> None:
        """SIGKILL to its process group; returns when it has ended."""
        if self._process is not None:
            self._process.kill()
            await self._process.wait()

    def _started(self) -> EngineProcess:
        if self._process is None:
            raise ConfigError(f"engine {self._plan.name} has not been started")
        return self._process

    def _elsewhere(self) -> bool:
        return self._node_ip != self._plan.launcher_ip

    def _host(self, *, with_key: bool) -> str:
        """Where the server listens: loopback where the router is on the same node."""
        if not self._elsewhere():
            return "127.0.0.1"
        if not with_key:
            raise ConfigError(
                f"engine {self._plan.name} was placed on another node, {self._node_ip}, where it would be open to "
                "other machines, and behind vllm-router there is no key but api_key (of penstock serve: "
                "PENSTOCK_API_KEY); set it, or keep router.kind=penstock"
            )
        return self._node_ip


def _end_with(parent: int) -> None:
    """End this process with its node's Ray, whose end alone does not end an actor that waits for its server."""
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(parent)], [], [])
    os.kill(os.getpid(), signal.SIGKILL)
