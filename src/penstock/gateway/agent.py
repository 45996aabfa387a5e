"""Episodes of an agent: a callable or a command that calls the gateway. A run has one by `rollout.generator: agent`."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.aio import all_or_first_error
from penstock.config import RunConfig
from penstock.errors import ConfigError, PenstockError
from penstock.gateway.agent_process import GRACE_S
from penstock.gateway.app import serving
from penstock.gateway.dialect import SAMPLING
from penstock.gateway.graph import Limits, Node
from penstock.gateway.service import Gateway, Tenant
from penstock.gateway.turn import GatewayOptions
from penstock.guard import new_key
from penstock.process import ChildProcess, raise_file_limit
from penstock.rollout.chat_template import ChatTemplate
from penstock.rollout.environment import Environment, Task, import_named, user_code
from penstock.rollout.episodes import Places, Sampler, finite_reward
from penstock.rollout.generator import Generator, GeneratorInput, GeneratorOutput, Trajectory
from penstock.rollout.tokenizer import Tokenizer
from penstock.rollout.vllm_parser import output_parser
from penstock.types import SamplingParams

log = logging.getLogger(__name__)
STOP_S = 2.0 * GRACE_S
"""Seconds that an agent has to end. The processes of a command have half of it."""
MOST_SILENT = 64
"""Episodes in a row without a turn after which the run fails. Fewer may be due to a few tasks."""
_TAIL = 2000
_PLACE = re.compile(r"(?<!\$)\{(\w+)\}")
"""A placeholder such as `{prompt}`, but not a shell's `${prompt}`."""
_PLACES = ("prompt", "model", "base_url")
_SECRETS = ("PENSTOCK_API_KEY", "PENSTOCK_GATEWAY_KEY", "VLLM_API_KEY")
"""Variables of our environment that an agent must not see."""
_WHOLE = {name: getattr(SamplingParams(), name) for name in SAMPLING if name not in {"temperature", "stop_token_ids"}}
"""Parameters that replace the harness's own. Logprobs over a part of the vocabulary cannot be trained on, and a seed
would make all episodes of a task equal."""


@dataclass(frozen=True, slots=True)
class Episode:
    """The data that an agent gets for one episode.

    Attributes:
        base_url: URL of the gateway, without `/v1`.
        api_key: key for this episode's session only.
        model: model name to request.
    """

    task: Task
    base_url: str
    api_key: str
    model: str
    session: str

    def environment(self) -> dict[str, str]:
        """Return the variables in which agent harnesses look for the gateway."""
        return {
            "OPENAI_BASE_URL": f"{self.base_url}/v1",
            "OPENAI_API_BASE": f"{self.base_url}/v1",
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url,
            "ANTHROPIC_API_KEY": self.api_key,
            "PENSTOCK_MODEL": self.model,
            "PENSTOCK_PROMPT": self.task.prompt,
            "PENSTOCK_SESSION": self.session,
            "PENSTOCK_TASK": json.dumps({"id": self.task.id}),  # without the metadata, which may hold the answer
        }


Agent = Callable[[Episode], Awaitable[float | None]]
"""Plays an episode and returns its reward. If it returns None, the environment scores the last answer."""


@dataclass(eq=False)
class AgentGenerator(Generator):
    """Runs an agent per episode, in its own session, and returns the turns as rows.

    An agent that fails or exceeds its time gets reward 0, because the policy made its turns too. An episode yields one
    trajectory per leaf; in an evaluation (the batch has `sampling_params`), only the one with the last answer.

    Args:
        gateway: gateway that is served at `base_url`.
        base_url: URL without `/v1`.
        tenant: owner of the sessions.
        environment: scores the last answer if the agent gives no reward.
        agent: a callable on this event loop, or the words of a command. In the words, `{prompt}`, `{model}` and
            `{base_url}` are replaced. All processes that a command started end with the episode.
        timeout_s: seconds that one episode may take.
        log_dir: folder for the commands' output, one file per session, named after it; None: a new one below /tmp.
        most_logs: maximum number of kept output files; the oldest is deleted first.
    """

    gateway: Gateway
    base_url: str
    tenant: Tenant
    environment: Environment
    agent: Agent | Sequence[str]
    _: KW_ONLY
    concurrency: int = 64
    timeout_s: float = 600.0
    log_dir: Path | None = None
    most_logs: int = 1000
    limits: Limits | None = None

    def __post_init__(self) -> None:
        if not callable(self.agent) and (isinstance(self.agent, str) or not self.agent):
            raise ConfigError(f"an agent's command is a list of words, got {self.agent!r}")
        for word in () if callable(self.agent) else self.agent:
            if "{api_key}" in word:
                raise ConfigError("every user can read a command line: take the key from the variable OPENAI_API_KEY")
            if _PLACE.fullmatch(word) and word[1:-1] not in _PLACES:
                raise ConfigError(f"an agent's command has {word!r}; known: {', '.join(f'{{{p}}}' for p in _PLACES)}")
        self._places = Places(self.concurrency)
        self._late = f": it took over {self.timeout_s:g} s"
        self._kept: deque[Path] = deque()
        self._silent = 0
        self._why_silent = ""
        self._has_turns = False

    @cached_property
    def _folder(self) -> Path:
        folder = self.log_dir or Path(tempfile.mkdtemp(prefix="penstock-agents-"))
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def tokenizer(self) -> Tokenizer:
        return self.gateway.template.tokenizer

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Play `num_samples` episodes of every task.

        An episode without a turn gives no row.

        Raises:
            PenstockError: no agent has requested a turn yet, or many in a row have not. The message contains the end of
                the last agent's output.
        """
        episodes = (
            self._episode(input_batch, index, number)
            for index in range(len(input_batch.tasks))
            for number in range(input_batch.num_samples)
        )
        found = await all_or_first_error(episodes)
        if self._silent and (self._silent >= MOST_SILENT or not self._has_turns):
            raise PenstockError(self._why_silent)
        return GeneratorOutput.of([trajectory for trajectories in found for trajectory in trajectories])

    async def _episode(self, batch: GeneratorInput, index: int, number: int) -> list[Trajectory]:
        task = batch.tasks[index]
        given = batch.sampling_params
        sampling: dict[str, Any] = {}
        if given is not None:
            values = {name: getattr(given, name) for name in (*SAMPLING, "max_tokens")}
            sampling = {name: value for name, value in values.items() if value not in (None, ())}
        if batch.seeds is not None:
            sampling["seed"] = batch.seeds[index] + number
        async with self._places.take(1):
            session = self.gateway.open_session(self.tenant, None, self.limits, sampling)
            try:
                episode = Episode(task, self.base_url, session.key, self.gateway.options.model, session.id)
                reward, why = await self._play(episode)
            finally:
                rows = await self.gateway.close_session(self.tenant, session.id)
        if not rows:
            self._silent += 1
            self._why_silent = f"the agent of task {task.id!r} asked for no turn{why or ''}"
            log.warning("%s", self._why_silent)
            return []
        self._silent, self._has_turns = 0, True
        if why is not None:
            log.warning("the agent of task %r failed after %d turns%s", task.id, len(session.nodes), why)
        last = session.last_turn()
        if session.reward is None:
            session.reward = 0.0 if why is not None else self._reward(task, last, reward)
        breaks = {f"agent/breaks/{cause.replace(' ', '_')}": float(n) for cause, n in session.breaks.items()}
        chosen = rows if given is None else [row for row in rows if row.leaf is last]
        made = [row.trajectory(batch.group_of(index)) for row in chosen]
        return [replace(t, metrics={**t.metrics, "agent/failed": float(why is not None), **breaks}) for t in made]

    def _reward(self, task: Task, last: Node, reward: float | None) -> float:
        if reward is not None:
            return reward
        with user_code(f"the environment's reward of task {task.id!r} failed", PenstockError):
            return finite_reward(self.environment.reward(task, last.message.text), task)

    async def _play(self, episode: Episode) -> tuple[float | None, str | None]:
        """Run the agent. Return its reward, and the reason if it failed."""
        try:
            if callable(self.agent):
                return await self._call(episode, self.agent)
            async with asyncio.timeout(self.timeout_s):
                return None, await self._run(episode, self.agent)
        except TimeoutError:
            return None, self._late
        except (OSError, ValueError, PenstockError) as error:  # ValueError: a prompt that no program can receive
            return None, f": {error}"

    async def _call(self, episode: Episode, agent: Agent) -> tuple[float | None, str | None]:
        """Run the callable in its own task. If the task ignores its cancellation, it is abandoned."""

        async def play() -> float | None:
            with user_code("the agent failed", PenstockError):
                try:
                    reward = await agent(episode)
                except SystemExit as error:  # would end this process
                    raise PenstockError(f"the agent exited with {error.code!r}") from error
            return None if reward is None else finite_reward(reward, episode.task, "agent")

        task = asyncio.create_task(play(), name=f"agent-{episode.session}")
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # read, even if abandoned
        try:
            done, _ = await asyncio.wait((task,), timeout=self.timeout_s)
        finally:
            task.cancel()
            await asyncio.wait((task,), timeout=STOP_S)
        if not done:
            return None, self._late
        return (None, ": it was cancelled") if task.cancelled() else (task.result(), None)

    async def _run(self, episode: Episode, command: Sequence[str]) -> str | None:
        """Run the command until its whole process group has ended. Return the reason if it failed."""
        filled = {"prompt": episode.task.prompt, "model": episode.model, "base_url": episode.base_url}
        words = [_PLACE.sub(lambda place: filled.get(place[1], place[0]), word) for word in command]
        child = await ChildProcess.start(
            [sys.executable, "-m", "penstock.gateway.agent_process", *words],
            name=f"agent {episode.session}",
            log=self._folder / f"{episode.session}.log",
            env={**dict.fromkeys(_SECRETS, ""), **episode.environment()},
        )
        try:
            status = await child.wait()
        finally:
            ending = asyncio.create_task(child.stop(STOP_S))
            while not ending.done():  # also if cancelled again: SIGKILL alone leaves what the command detached
                with suppress(asyncio.CancelledError):
                    await asyncio.wait((ending,))
            said = child.said(_TAIL)
            self._keep(child.log)
        return None if status == 0 else f": it ended with status {status}; {child.log}: {said}"

    def _keep(self, log: Path) -> None:
        self._kept.append(log)
        while len(self._kept) > self.most_logs:
            self._kept.popleft().unlink(missing_ok=True)


# --- a run's agent ---------------------------------------------------------------------------------------------------


class AgentRollouts:
    """The agent of a run, checked before engines start.

    Args:
        config: configuration of the run.
        tokenizer: the policy's tokenizer, with a chat template.
        environment: gives the tasks, and scores the last answer if the agent gives no reward.

    Raises:
        ConfigError: no such callable or command, or both or neither given; no `engine.max_model_len`; no chat template;
            or the named parsers of vLLM are not available.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer, environment: Environment) -> None:
        given, context = config.rollout.agent, config.engine.max_model_len
        if given is None or bool(given.command) == bool(given.callable):
            raise ConfigError("rollout.agent: give either command or callable")
        if context is None:
            raise ConfigError("rollout.generator: agent needs engine.max_model_len, which bounds each turn")
        self._given = given
        self._rollout = config.rollout
        self._agent = _callable(given.callable) if given.callable is not None else _command(given.command)
        self._template = ChatTemplate(tokenizer)
        self._parser = output_parser(tokenizer, tool_parser=given.tool_parser, reasoning_parser=given.reasoning_parser)
        self._environment = environment
        self._options = GatewayOptions(
            config.engine.served_model_name or config.engine.model,
            context,
            given.policy,
            sampling={**_WHOLE, "temperature": config.rollout.temperature},
            max_tokens=config.rollout.max_tokens,
            force_calls=False,  # tokens made under a grammar cannot be trained on
        )

    @asynccontextmanager
    async def generator(
        self, client: Sampler, log_dir: Path, *, adapter: str | None = None
    ) -> AsyncGenerator[Generator]:
        """Serve the gateway while the block runs, and yield the generator.

        Args:
            client: source of samples: a fleet or an engine.
            log_dir: folder for the output of commands.
            adapter: name of the LoRA adapter that every turn uses.
        """
        raise_file_limit()
        tenant = Tenant("training", new_key())
        gateway = Gateway(client, self._template, self._options, [tenant], adapter=adapter, parser=self._parser)
        async with serving(gateway) as base_url:
            yield AgentGenerator(
                gateway,
                base_url,
                tenant,
                self._environment,
                self._agent,
                concurrency=self._given.concurrency,
                timeout_s=self._given.timeout_s,
                log_dir=log_dir,
                most_logs=self._given.keep_output,
                limits=Limits(max_turns=self._rollout.max_turns, max_tokens=self._rollout.max_episode_tokens),
            )


def _callable(name: str) -> Agent:
    found = import_named("rollout.agent.callable", name)
    if not inspect.iscoroutinefunction(found):
        raise ConfigError(
            f"rollout.agent.callable {name!r} is no `async def`; a blocking agent runs as rollout.agent.command"
        )
    return found


def _command(words: Sequence[str]) -> Sequence[str]:
    if shutil.which(words[0]) is None:
        raise ConfigError(f"rollout.agent.command: there is no program {words[0]!r} on the PATH; give its path")
    return words
