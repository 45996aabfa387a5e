"""Episodes of any agent: a callable or a command that calls the gateway, and the rows that its calls left."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.aio import all_or_first_error
from penstock.errors import ConfigError, PenstockError
from penstock.gateway.graph import Limits, Row, Session
from penstock.gateway.service import Gateway, Tenant
from penstock.process import ChildProcess
from penstock.rollout.environment import Environment, Task, user_code
from penstock.rollout.generator import Generator, GeneratorInput, GeneratorOutput
from penstock.rollout.single_turn import Places, finite_reward
from penstock.rollout.tokenizer import Tokenizer
from penstock.types import Trajectory

log = logging.getLogger(__name__)
STOP_S = 5.0
MOST_SILENT = 64
"""Episodes in a row without a turn; more are no accident of some tasks."""
_WRAPPER = (
    "import subprocess, sys; from penstock.process import watch_lifeline; watch_lifeline(); "
    "sys.exit(subprocess.call(sys.argv[1:]))"
)
"""Ends the command with us, however we end."""
_TAIL = 2000
_PLACE = re.compile(r"\{\w+\}")
_PLACES = ("prompt", "model", "base_url", "api_key")
_SECRETS = ("PENSTOCK_API_KEY", "PENSTOCK_GATEWAY_KEY", "VLLM_API_KEY")
"""Of our environment; an agent must not have them."""


@dataclass(frozen=True, slots=True)
class Episode:
    """What an agent gets.

    Attributes:
        task: to do.
        base_url: of the gateway, without `/v1`.
        api_key: of this episode's session alone.
        model: name to ask for.
        session: name of the session.
    """

    task: Task
    base_url: str
    api_key: str
    model: str
    session: str

    def environment(self) -> dict[str, str]:
        """Return the variables by which harnesses find the gateway."""
        return {
            "OPENAI_BASE_URL": f"{self.base_url}/v1",
            "OPENAI_API_BASE": f"{self.base_url}/v1",
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url,
            "ANTHROPIC_API_KEY": self.api_key,
            "PENSTOCK_MODEL": self.model,
            "PENSTOCK_PROMPT": self.task.prompt,
            "PENSTOCK_SESSION": self.session,
            "PENSTOCK_TASK": json.dumps({"id": self.task.id}),  # its metadata may hold the answer
        }


Agent = Callable[[Episode], Awaitable[float | None]]
"""Plays an episode. It returns the reward, or None: the environment scores the last answer."""


class AgentGenerator(Generator):
    """Runs an agent for each episode, in a session of its own, and returns what it sampled as rows.

    An agent that fails or is over its time has the reward 0: its turns were the policy's as well. In an evaluation
    (`sampling_params` of the batch) an episode has one trajectory, its last leaf; else one for each leaf.

    Args:
        gateway: that is being served at `base_url`.
        base_url: without `/v1`.
        tenant: whose sessions these are.
        environment: scores the last answer where the agent gives no reward.
        agent: a callable on this event loop; or the words of a command, in which `{prompt}`, `{model}`, `{base_url}`
            and `{api_key}` are filled in. A command's process group ends with the episode.
        concurrency: most episodes at once.
        timeout_s: of one episode.
        log_dir: each command's output is kept there, in a file named by its session.
        most_logs: of them; the oldest goes for the next.
        limits: budget of an episode.
    """

    def __init__(
        self,
        gateway: Gateway,
        base_url: str,
        tenant: Tenant,
        environment: Environment,
        agent: Agent | Sequence[str],
        *,
        concurrency: int = 64,
        timeout_s: float = 600.0,
        log_dir: Path | None = None,
        most_logs: int = 1000,
        limits: Limits | None = None,
    ) -> None:
        if not callable(agent) and (isinstance(agent, str) or not agent):
            raise ConfigError(f"an agent's command is a list of words, got {agent!r}")
        for word in () if callable(agent) else agent:
            if _PLACE.fullmatch(word) and word[1:-1] not in _PLACES:
                raise ConfigError(f"an agent's command has {word!r}; known: {', '.join(f'{{{p}}}' for p in _PLACES)}")
        self._gateway = gateway
        self._base_url = base_url
        self._tenant = tenant
        self._environment = environment
        self._agent = agent
        self._places = Places(concurrency)
        self._timeout_s = timeout_s
        self._late = f" within {timeout_s:g} s"
        self._log_dir = Path(tempfile.mkdtemp(prefix="penstock-agents-")) if log_dir is None else log_dir
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._limits = limits
        self._most_logs = most_logs
        self._logs: deque[Path] = deque()
        self._silent = 0
        self._why_silent = ""
        self._has_turns = False

    @property
    def tokenizer(self) -> Tokenizer:
        """The policy's tokenizer."""
        return self._gateway.template.tokenizer

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Play `num_samples` episodes of every task.

        An episode without a turn gives no row.

        Raises:
            PenstockError: no agent has asked for a turn yet, or many in a row have not; the end of the last one's
                output is in the message.
        """
        episodes = (
            self._episode(input_batch, index)
            for index in range(len(input_batch.tasks))
            for _ in range(input_batch.num_samples)
        )
        found = await all_or_first_error(episodes)
        if self._silent and (self._silent >= MOST_SILENT or not self._has_turns):
            raise PenstockError(self._why_silent)
        return GeneratorOutput.of([trajectory for trajectories in found for trajectory in trajectories])

    async def _episode(self, batch: GeneratorInput, index: int) -> list[Trajectory]:
        task = batch.tasks[index]
        group = batch.group_ids[index] if batch.group_ids is not None else task.id
        given = batch.sampling_params
        sampling = {} if given is None else {"temperature": given.temperature, "top_p": given.top_p}
        await self._places.take(1)
        name, key = self._gateway.open_session(self._tenant, None, self._limits, sampling)
        try:
            episode = Episode(task, self._base_url, key, self._gateway.options.model, name)
            reward, why = await self._play(episode)
        finally:
            self._places.give_back(1)
            session = self._gateway.find(self._tenant, name)
            rows = await self._gateway.close_session(self._tenant, name)
        if not rows:
            self._silent += 1
            self._why_silent = f"the agent of task {task.id!r} asked for no turn{why or ''}"
            log.warning("%s", self._why_silent)
            return []
        self._silent, self._has_turns = 0, True
        if session.reward is None:
            session.reward = self._reward(task, session, reward, failed=why is not None)
        return [row.trajectory(group) for row in _chosen(rows, last_alone=given is not None)]

    def _reward(self, task: Task, session: Session, reward: float | None, *, failed: bool) -> float:
        if failed:
            return 0.0
        if reward is not None:
            return finite_reward(reward, task)
        last = list(session.nodes.values())[-1]
        with user_code(f"the environment's reward of task {task.id!r} failed", PenstockError):
            return finite_reward(self._environment.reward(task, last.message.text), task)

    async def _play(self, episode: Episode) -> tuple[float | None, str | None]:
        """Run the agent; return its reward, and why it failed, if it did."""
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                if callable(self._agent):
                    with user_code("the agent failed", PenstockError):
                        reward = await self._agent(episode)
                        return (None, self._late) if deadline.expired() else (reward, None)
                return None, await self._run(episode, self._agent)
        except TimeoutError:
            return None, self._late
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return None, ": it was cancelled"
        except OSError as error:
            return None, f": {error}"
        except PenstockError as error:
            return None, f": {error}"

    async def _run(self, episode: Episode, command: Sequence[str]) -> str | None:
        """Run the command to its end, which is also that of its process group; return why it failed."""
        filled = {
            "prompt": episode.task.prompt,
            "model": episode.model,
            "base_url": episode.base_url,
            "api_key": episode.api_key,
        }
        child = await ChildProcess.start(
            [sys.executable, "-c", _WRAPPER, *(_filled(word, filled) for word in command)],
            name=f"agent {episode.session}",
            log=self._log_dir / f"{episode.session}.log",
            env={**dict.fromkeys(_SECRETS, ""), **episode.environment()},
        )
        try:
            status = await child.wait()
        finally:
            await asyncio.shield(child.stop(STOP_S))
            said = child.said()[-_TAIL:]
            self._keep(child.log)
        return None if status == 0 else f": it ended with status {status}; {child.log}: {said}"

    def _keep(self, log: Path) -> None:
        self._logs.append(log)
        while len(self._logs) > self._most_logs:
            self._logs.popleft().unlink(missing_ok=True)


def _filled(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        if word == f"{{{name}}}":  # whole words alone: a prompt may hold anything
            return value
    return word


def _chosen(rows: Sequence[Row], *, last_alone: bool) -> Sequence[Row]:
    """Return the rows to give back: all, or that of the latest turn."""
    if not last_alone:
        return rows
    return [max(rows, key=lambda row: row.leaf.created)]
