"""`environment.name: skyrl-gym:ID`: a SkyRL gym environment and its data rows."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from penstock.aio import in_thread
from penstock.errors import ConfigError, PenstockError
from penstock.rollout.environment import Dialogue, ListedTasks, Response, Task, Turn, json_lines

AT_ONCE = 32
"""Calls of instances at once, each in its own thread. All threads share one interpreter with the event loop: a thousand
that compute would stop it until the last one has ended."""


class SkyRLEnvironment(ListedTasks):
    """Gives each episode its own instance from `skyrl_gym.make`. The instance's `step` runs in a thread.

    Args:
        name: name under which the environment is registered.
        seed: seed of the order of training tasks.
        data: training rows in SkyRL's form, a file of JSON lines or parquet. `prompt` holds messages; the other columns
            go to the environment as `extras`.
        heldout_data: held-out rows. Default: a tenth of `data`, chosen by a hash of the prompt.
        env_config: configuration of the environment for all rows.
        extras: extra columns for all rows. A row's own columns take precedence.
        imports: module that registers the environment, if it is not one of SkyRL's own.

    Raises:
        ConfigError: no such package, environment or file, or rows of another form.
    """

    def __init__(
        self,
        name: str,
        *,
        seed: int,
        data: str,
        heldout_data: str | None = None,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
        imports: str | None = None,
    ) -> None:
        try:
            self._gym: Any = importlib.import_module("skyrl_gym")
        except ImportError as error:
            raise ConfigError(f"environment.name skyrl-gym:{name} needs its package: pip install skyrl-gym") from error
        if imports is not None:
            importlib.import_module(imports)
        if name not in self._gym.registry:
            raise ConfigError(f"skyrl-gym has no environment {name!r}; known: {', '.join(sorted(self._gym.registry))}")
        self._name = name
        self._config = SimpleNamespace(**(env_config or {}))
        self._extras = dict(extras or {})
        self._threads = asyncio.Semaphore(AT_ONCE)
        train = _tasks(name, Path(data))
        heldout = None if heldout_data is None else _tasks(name, Path(heldout_data))
        super().__init__(train, seed=seed, heldout=heldout)

    def reward(self, task: Task, response_text: str) -> float:
        """Return 0.0: an episode's rewards come from its steps."""
        del task, response_text
        return 0.0

    @asynccontextmanager
    async def dialogue(self, task: Task) -> AsyncGenerator[Dialogue]:
        extras = {**self._extras, **task.metadata}
        game = await self.ask(self._gym.make, self._name, env_config=self._config, extras=extras)
        try:
            opening, _ = await self.ask(game.init, [dict(message) for message in task.messages])
            yield _SkyRLDialogue(self, task, game, opening)
        finally:
            await in_thread(game.close, leave_s=0.0)  # also when all others hang

    async def ask(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call an instance's method in a thread, which is left behind if it does not end."""
        async with self._threads:
            return await in_thread(partial(call, *args, **options), leave_s=0.0)


class _SkyRLDialogue(Dialogue):
    def __init__(self, environment: SkyRLEnvironment, task: Task, game: Any, opening: Sequence[Any]) -> None:
        super().__init__(environment, task)
        self.opening = list(opening)
        self._game, self._ask = game, environment.ask

    async def step(self, responses: Sequence[Response]) -> Turn | None:
        """Give the latest response to the instance. PenstockError: the instance changes the response."""
        said = str(responses[-1])
        out: Mapping[str, Any] = await self._ask(self._game.step, said)
        if out.get("postprocessed_action") not in (None, said):
            raise PenstockError(
                "the environment changes what the policy said (postprocessed_action), so the row would hold tokens "
                "that no engine sampled; end responses with stop tokens instead"
            )
        observations, done = list(out["observations"] or ()), bool(out["done"])
        return Turn(observations, reward=float(out["reward"]), done=done or not observations)


def _tasks(name: str, path: Path) -> list[Task]:
    try:
        return [_task(f"{name}/{path.stem}/{number}", row) for number, row in enumerate(_rows(path))]
    except (OSError, ImportError) as error:
        raise ConfigError(f"the rows of skyrl-gym:{name} cannot be read: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: each row has a `prompt`, a list of messages with role and content") from error


def _rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        table: Any = importlib.import_module("pandas").read_parquet(path)  # skyrl-gym needs pandas itself
        return cast("list[dict[str, Any]]", table.to_dict("records"))
    return json_lines(path)


def _task(task_id: str, row: Mapping[str, Any]) -> Task:
    messages = [{"role": message["role"], "content": message["content"]} for message in row["prompt"]]
    text = "\n".join(str(message["content"]) for message in messages)
    return Task(task_id, text, {name: value for name, value in row.items() if name != "prompt"}, messages)
