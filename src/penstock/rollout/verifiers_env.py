"""`environment.name: verifiers:ID`: the tasks of a verifiers taskset, which verifiers itself plays."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from penstock.errors import ConfigError, UserError
from penstock.rollout.environment import Dialogue, ListedTasks, Task


class VerifiersEnvironment(ListedTasks):
    """Gives the tasks of a taskset to `penstock.gateway.verifiers:play`, the agent that has verifiers play them.

    Args:
        name: name of the taskset, as verifiers loads it.
        seed: seed of the order of training tasks.
        taskset: options of the taskset.
        env: further options of verifiers' environment: its `id`, its agents, its limits.
        most_tasks: maximum number of tasks to load; some tasksets are endless.

    Raises:
        ConfigError: no such package or taskset, or unknown options.

    Attributes:
        config: configuration of verifiers' environment.
    """

    def __init__(
        self,
        name: str,
        *,
        seed: int,
        taskset: Mapping[str, Any] | None = None,
        env: Mapping[str, Any] | None = None,
        most_tasks: int = 10_000,
    ) -> None:
        try:
            loaders: Any = importlib.import_module("verifiers.v1.utils.loaders")
        except ImportError as error:
            raise ConfigError(f"environment.name verifiers:{name} needs its package: pip install verifiers") from error
        self.config: Any = loaders.resolve_env_config({**(env or {}), "taskset": {"id": name, **(taskset or {})}})
        tasks: list[Task] = []
        for own in itertools.islice(loaders.load_taskset(self.config.taskset), most_tasks):
            key = f"{name}/{own.data.idx}"
            tasks.append(Task(key, own.data.prompt_text or key, {"environment": self, "task": own}))
        super().__init__(tasks, seed=seed)

    def reward(self, task: Task, response_text: str) -> float:
        """Return 0.0: verifiers gives an episode's reward."""
        del task, response_text
        return 0.0

    @asynccontextmanager
    async def dialogue(self, task: Task) -> AsyncGenerator[Dialogue]:
        """Raise UserError: verifiers plays its own tasks."""
        raise UserError(
            f"verifiers itself plays task {task.id}: set rollout.generator: agent with rollout.agent.callable: "
            "penstock.gateway.verifiers:play"
        )
        yield
