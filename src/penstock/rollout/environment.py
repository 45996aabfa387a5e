"""Tasks that train a policy, their split, and the reward of a response."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import inspect
import random
import sysconfig
import traceback
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, cast

from penstock.checks import did_you_mean, parse_json
from penstock.config import EnvironmentConfig
from penstock.errors import ConfigError, PenstockError, UserError

Split = Literal["heldout", "warm_start", "train"]
_PACKAGES = {
    "skyrl-gym": "penstock.rollout.skyrl_gym_env:SkyRLEnvironment",
    "verifiers": "penstock.rollout.verifiers_env:VerifiersEnvironment",
}
"""Prefixes of `environment.name`. The rest of the name is an environment of that package."""
MOST_DRAWS = 100_000
"""Draws that `DrawnTasks` tries per call. One prompt in ten is held out."""


@dataclass(frozen=True, slots=True)
class Task:
    """One problem.

    `metadata` is what the environment needs to score a response. `messages` opens an episode of several turns, in
    OpenAI's form; empty: `prompt` as the user's message.
    """

    id: str
    prompt: str
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    messages: Sequence[Mapping[str, Any]] = ()


class Response(str):  # noqa: SLOT000 - a str has no slots of its own beside its text
    """Text of a response, with the markers of tool calls.

    Attributes:
        answer: the text without reasoning and calls.
        calls: name and arguments of each tool call; the arguments are JSON text.
    """

    answer: str
    calls: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, text: str, answer: str, calls: tuple[tuple[str, str], ...]) -> Self:
        """Build a response; `str` takes no further arguments."""
        response = cls(text)
        response.answer, response.calls = answer, calls
        return response


@dataclass(frozen=True, slots=True)
class Turn:
    """The environment's answer to a response, in an episode of several turns.

    Attributes:
        observation: the next message as text, or several messages in OpenAI's form.
        reward: reward of the answered response. An episode's reward is their sum plus `Environment.reward`.
        done: True ends the episode; the policy does not see the observation.
    """

    observation: str | Sequence[Mapping[str, Any]] = ""
    reward: float = 0.0
    done: bool = False
    role: Literal["user", "tool"] = "user"

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        if isinstance(self.observation, str):
            return [{"role": self.role, "content": self.observation}]
        return list(self.observation)


class Dialogue:
    """The environment's side of one episode. A subclass may keep the state that the episode changes.

    Attributes:
        opening: first messages of the episode, in OpenAI's form.
    """

    def __init__(self, environment: Environment, task: Task) -> None:
        self.environment = environment
        self.task = task
        self.opening: Sequence[Mapping[str, Any]] = task.messages or [{"role": "user", "content": task.prompt}]

    async def step(self, responses: Sequence[Response]) -> Turn | None:
        return await self.environment.step(self.task, responses)


class Environment(ABC):
    """A stream of tasks and a reward. It is deterministic: the same seed and index give the same task.

    To write an environment, subclass this class. It takes `seed` and its options as keyword arguments. The config names
    it as `module:Class`.
    """

    @abstractmethod
    def train_task(self, index: int) -> Task:
        """Return task `index` (from 0, unbounded) of the training stream. It depends on seed and `index` alone."""

    @abstractmethod
    def heldout_tasks(self, n: int) -> list[Task]:
        """Return `n` distinct tasks. `train_task` never returns them, for any seed and index (see `split_of`)."""

    @abstractmethod
    def reward(self, task: Task, response_text: str) -> float:
        """Return the reward of the decoded text, without special tokens. Never raise for a text a policy can write."""

    tools: Sequence[Mapping[str, Any]] = ()
    """Functions in OpenAI's form. The chat template shows them in episodes of several turns."""

    async def step(self, task: Task, responses: Sequence[Response]) -> Turn | None:
        """Answer the latest of the policy's `responses`, `[turns so far]`; None ends the episode.

        An environment that overrides `step` has episodes of several turns (`MultiTurnGenerator`).
        """
        del task, responses
        return None

    @asynccontextmanager
    async def dialogue(self, task: Task) -> AsyncGenerator[Dialogue]:
        """Open an episode and close it when the block ends. Override this if `step` needs a state."""
        yield Dialogue(self, task)

    @classmethod
    def has_turns(cls) -> bool:
        return cls.step is not Environment.step or cls.dialogue is not Environment.dialogue


class ListedTasks(Environment):
    """An environment with a list of tasks. Each pass over the training tasks has its own order.

    Args:
        tasks: training tasks. If `heldout` is None: all tasks; `split_of` decides by the prompt which are held out.
        seed: seed of the order.
        heldout: held-out tasks.

    Raises:
        ConfigError: there is no task to train on.
    """

    def __init__(self, tasks: Sequence[Task], *, seed: int, heldout: Sequence[Task] | None = None) -> None:
        self.seed = seed
        self._train = list(tasks)
        self._heldout = list(heldout or ())
        if heldout is None:
            self._heldout = [task for task in tasks if split_of(task.prompt) == "heldout"]
            self._train = [task for task in tasks if split_of(task.prompt) != "heldout"]
        if not self._train:
            raise ConfigError(f"{type(self).__name__} has no task to train on")
        self._pass, self._order = -1, [0]

    def train_task(self, index: int) -> Task:
        number, place = divmod(index, len(self._train))
        if number != self._pass:
            everything = range(len(self._train))
            self._pass, self._order = number, random.Random(f"{self.seed}/{number}").sample(everything, len(everything))
        return self._train[self._order[place]]

    def heldout_tasks(self, n: int) -> list[Task]:
        """Return the first `n` held-out tasks. UserError: there are fewer."""
        if n > len(self._heldout):
            raise UserError(f"{len(self._heldout)} tasks are held out, {n} were asked for; set eval.size")
        return self._heldout[:n]


class DrawnTasks(Environment):
    """An environment that draws tasks at random. A subclass defines `draw` and `reward`."""

    def __init__(self, *, seed: int) -> None:
        self.seed = seed

    @abstractmethod
    def draw(self, rng: random.Random) -> Task:
        """Draw a task. Its prompt decides its split."""

    def train_task(self, index: int) -> Task:
        return next(self._tasks(f"{self.seed}/{index}", "train"))

    def heldout_tasks(self, n: int) -> list[Task]:
        """Return `n` tasks with distinct prompts. Training never sees them; they are the same for every seed."""
        found: dict[str, Task] = {}
        for task in self._tasks("heldout", "heldout"):
            found[task.prompt] = task
            if len(found) == n:
                break
        return list(found.values())

    def _tasks(self, seed: str, split: Split) -> Iterator[Task]:
        rng = random.Random(seed)
        for _ in range(MOST_DRAWS):
            task = self.draw(rng)
            if split_of(task.prompt) == split:
                yield task
        raise UserError(f"{type(self).__name__}.draw gave too few {split} prompts in {MOST_DRAWS} tries")


def json_lines(file: Path) -> list[Any]:
    """Return the rows of a data set in JSON lines. ConfigError: a line is no JSON."""
    # JSON may hold other ends of lines, at which `splitlines` would split it.
    lines = enumerate(file.read_text("utf-8-sig").split("\n"), start=1)
    return [parse_json(line, f"{file}, line {number}", ConfigError) for number, line in lines if line.strip()]


def split_of(prompt: str) -> Split:
    """Return a prompt's split by a hash: 10% held out, 30% warm start, 60% training.

    The split depends on the text alone, so no seed or index moves a prompt into another split.
    """
    bucket = int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest()) % 10
    if bucket == 0:
        return "heldout"
    return "warm_start" if bucket <= 3 else "train"  # noqa: PLR2004 - three of ten buckets


def load_environment(config: EnvironmentConfig, seed: int) -> Environment:
    """Build the environment that `config` names, with its options and `seed`.

    Raises:
        ConfigError: unknown environment, not an `Environment`, unknown options, or an error of the user's code.
    """
    cls = _environment_class(config.name)
    taken = inspect.signature(cls).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    for option in () if takes_any else config.options:
        if option not in taken:
            hint = did_you_mean(option, sorted(taken.keys() - {"seed"}))
            raise ConfigError(f"environment.options: {config.name!r} has no option {option!r}; {hint}")
    required = {name for name, one in taken.items() if one.default is one.empty and one.kind is one.KEYWORD_ONLY}
    if missing := sorted(required - config.options.keys() - {"seed"}):
        raise ConfigError(f"environment.options lacks {', '.join(missing)}, which {config.name!r} requires")
    with user_code(
        f"environment {config.name!r} cannot be built with environment.options {dict(config.options)!r}", ConfigError
    ):
        return cls(seed=seed, **config.options)


@contextmanager
def user_code(what_failed: str, error_type: type[PenstockError]) -> Generator[None]:
    """Turn any error of a user's code into `error_type`. The message names the line that raised it."""
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:  # a user's code may raise anything, and the command line shows no traceback
        raise error_type(f"{what_failed}: {describe_error(error)}") from error


def describe_error(error: Exception) -> str:
    """Return type and message of an error, with the last line outside of libraries."""
    if isinstance(error, SyntaxError) and error.filename:  # the module did not run, so no frame shows it
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
    last = next((frame for frame in reversed(frames) if not frame.filename.startswith(libraries)), frames[-1])
    return f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"


def check_tasks(tasks: object, wanted: int, of: str) -> None:
    """Raise UserError if `tasks` is no list of `wanted` tasks. The message names `of`, the call that gave them."""
    if not isinstance(tasks, Sequence):
        raise UserError(f"{of} must give a list of tasks, got {tasks!r}")
    given = cast("Sequence[object]", tasks)
    if len(given) != wanted:
        raise UserError(f"{of} must give {wanted} tasks, got {len(given)}")
    for task in given:
        if not isinstance(task, Task):
            raise UserError(f"{of} must give penstock.rollout.environment.Task, got {task!r}")
        if not isinstance(task.prompt, str) or not task.prompt:  # pyright: ignore[reportUnnecessaryIsInstance] - untyped code gives it
            raise UserError(
                f"{of} gave task {task.id!r}, whose prompt is {task.prompt!r}; it must be a text, not empty"
            )


def import_named(key: str, name: str) -> object:
    """Import the `module:name` that config key `key` holds.

    Raises:
        ConfigError: wrong form, unknown module or name (the message lists near ones), or an error of the module.
    """
    module_name, _, own_name = name.partition(":")
    if not (module_name and own_name):
        raise ConfigError(f"{key} must be of the form 'module:name', got {name!r}")
    failed = f"{key} {name!r} cannot be imported"
    with user_code(failed, ConfigError):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # the module exists, but it imports a missing module
            here = sorted(file.stem for file in Path.cwd().glob("*.py"))
            hint = did_you_mean(module_name, here, f"the modules of {Path.cwd()}")
            raise ConfigError(f"{failed}: there is no module {error.name!r}; {hint}") from error
    if not hasattr(module, own_name):
        own = [found for found, value in vars(module).items() if getattr(value, "__module__", None) == module_name]
        raise ConfigError(f"{failed}: there is no {own_name!r} in it; {did_you_mean(own_name, own, 'it has')}")
    return getattr(module, own_name)


def _environment_class(name: str) -> Callable[..., Environment]:
    kind, _, own_name = name.partition(":")
    if kind in _PACKAGES and own_name:
        return partial(cast("Any", import_named("environment.name", _PACKAGES[kind])), own_name)
    if name == "reasoning_gym":
        name = "penstock.rollout.reasoning_gym_env:ReasoningGymEnvironment"
    if ":" not in name:
        near = "; did you mean 'reasoning_gym'?" if difflib.get_close_matches(name, ["reasoning_gym"]) else ""
        known = "'reasoning_gym' or 'module:Class', 'verifiers:ID' or 'skyrl-gym:ID'"
        raise ConfigError(f"environment.name must be {known}, got {name!r}{near}")
    cls = import_named("environment.name", name)
    if not (isinstance(cls, type) and issubclass(cls, Environment)):
        raise ConfigError(f"environment.name {name!r} is not a subclass of penstock.rollout.environment.Environment")
    return cls
