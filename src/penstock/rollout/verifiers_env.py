"""`environment.name: verifiers:ID`: a verifiers taskset, its tasks and rewards."""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from penstock.errors import ConfigError, UserError
from penstock.rollout.environment import Dialogue, ListedTasks, Response, Task, Turn

PLAY = "rollout.generator: agent with rollout.agent.callable: penstock.gateway.verifiers:play"


class VerifiersEnvironment(ListedTasks):
    """Scores tasks of one turn with their own rewards. verifiers itself must play all other tasks (`PLAY`).

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
            self._vf: Any = importlib.import_module("verifiers.v1")
            loaders: Any = importlib.import_module("verifiers.v1.utils.loaders")
        except ImportError as error:
            raise ConfigError(f"environment.name verifiers:{name} needs its package: pip install verifiers") from error
        self.config: Any = loaders.resolve_env_config({**(env or {}), "taskset": {"id": name, **(taskset or {})}})
        loaded = loaders.load_taskset(self.config.taskset)
        given = [self._task(name, task) for task in itertools.islice(loaded, most_tasks)]
        is_single = loaders.environment_class(name, self.config.id) is self._vf.SingleAgentEnv
        self._has_tools = not is_single or bool(loaded.toolsets(loaded.config))
        super().__init__(given, seed=seed)

    def reward(self, task: Task, response_text: str) -> float:
        """Return 0.0: an episode's rewards come from its steps."""
        del task, response_text
        return 0.0

    @asynccontextmanager
    async def dialogue(self, task: Task) -> AsyncGenerator[Dialogue]:
        """Open an episode of one turn. UserError: the task needs more than one turn of text."""
        own: Any = task.metadata["task"]
        rewards = [*own.hooks("reward"), *(judge.score for judge in own.plugged_judges())]
        needs_box = own.NEEDS_CONTAINER or any(_needs_runtime(reward) for reward in rewards)
        if self._has_tools or needs_box or own.data.prompt is None or own.toolsets(own.config):
            raise UserError(f"task {task.id} needs tools, a container, a user or an environment of its own; use {PLAY}")
        yield _VerifiersDialogue(self, task, self._vf)

    def _task(self, name: str, own: Any) -> Task:
        data = own.data
        prompt: Any = data.prompt or ()
        given = [self._vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt)
        if data.system_prompt:
            given.insert(0, self._vf.SystemMessage(content=data.system_prompt))
        messages = [message.model_dump(exclude_none=True) for message in given]
        key = f"{name}/{data.idx}"
        return Task(key, data.prompt_text or key, {"environment": self, "task": own}, messages)


class _VerifiersDialogue(Dialogue):
    """One turn, scored by the task's own rewards and judges on a trace of it."""

    def __init__(self, environment: VerifiersEnvironment, task: Task, vf: Any) -> None:
        super().__init__(environment, task)
        self._vf = vf

    async def step(self, responses: Sequence[Response]) -> Turn | None:
        vf, own = self._vf, self.task.metadata["task"]
        answer = vf.AssistantMessage(content=responses[-1].answer)
        nodes = [vf.MessageNode(parent=i - 1 if i else None, message=m) for i, m in enumerate(self.opening)]
        nodes.append(vf.MessageNode(parent=len(nodes) - 1, message=answer, sampled=True))
        trace = vf.Trace(
            task=vf.TraceTask(type=type(own).__name__, data=own.data, key=own.key, hash=own.hash),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
            nodes=nodes,
            is_completed=True,
        )
        await own.score(trace)
        return Turn(reward=trace.reward, done=True)


def _needs_runtime(reward: Any) -> bool:
    parameter = inspect.signature(reward).parameters.get("runtime")
    return parameter is not None and parameter.default is parameter.empty
