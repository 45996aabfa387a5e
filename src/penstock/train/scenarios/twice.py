"""Sorting in two turns: a second list follows the first answer."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.rollout.environment import Environment, Response, Task, Turn
from penstock.rollout.reasoning_gym_env import ReasoningGymEnvironment
from penstock.train.scenarios.table import BASE


class SortTwice(Environment):
    """An episode sorts two lists in two turns. Each turn is worth half of the reward."""

    def __init__(self, *, seed: int) -> None:
        options = BASE["environment"]["options"]
        self._first = ReasoningGymEnvironment(seed=seed, **options)
        self._second = ReasoningGymEnvironment(seed=seed + 1_000_003, **options)

    def train_task(self, index: int) -> Task:
        """Return a list to sort, with the second one in its metadata."""
        return self._with_second(self._first.train_task(index), self._second.train_task(index))

    def heldout_tasks(self, n: int) -> list[Task]:
        """Return tasks as for training, from held-out lists."""
        pairs = zip(self._first.heldout_tasks(n), self._second.heldout_tasks(n), strict=True)
        return [self._with_second(one, other) for one, other in pairs]

    def reward(self, task: Task, response_text: str) -> float:
        """Return half of the reward, for the second list."""
        return 0.5 * self._second.reward(task.metadata["second"], response_text)

    async def step(self, task: Task, responses: Sequence[Response]) -> Turn | None:
        """Give half of the reward for the first list, and show the second list."""
        if len(responses) > 1:
            return None
        return Turn(task.metadata["second"].prompt, reward=0.5 * self._first.reward(task, responses[0]))

    @staticmethod
    def _with_second(one: Task, other: Task) -> Task:
        return Task(one.id, one.prompt, {**one.metadata, "second": other})
