"""Any reasoning-gym dataset as an environment."""

# reasoning-gym ships no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast

from penstock.checks import did_you_mean
from penstock.errors import ConfigError, UserError
from penstock.rollout.environment import Environment, Split, Task, split_of

CHUNK = 1024
"""Items drawn from one dataset object. Some datasets read word lists when built, which takes up to 0.4 s."""

TRIES = 64
"""Items tried for one training task. With 60% of prompts in the split, all 64 fail once in 10^25 tasks."""

SORTING = "number_sorting"
_UNREADABLE = (ArithmeticError, AssertionError, AttributeError, LookupError, SyntaxError, TypeError, ValueError)
"""Errors that scorers raise on free text they cannot parse. The answer then counts as wrong."""


class ReasoningGymEnvironment(Environment):
    """Tasks of one reasoning-gym dataset, split by the hash of the prompt.

    Args:
        dataset: the dataset's name, such as `number_sorting`.
        seed: seed of the task streams.
        compact: `number_sorting` only: a prompt of about a dozen characters, such as `<56 25 75=` (ascending) or
            `>56 25 75=`, answered by `25 56 75`, for character-level policies.
        dataset_options: the dataset's own options, such as `min_numbers`.

    Raises:
        ConfigError: unknown dataset or unknown options.
    """

    def __init__(self, *, dataset: str, seed: int, compact: bool = False, **dataset_options: Any) -> None:
        self.dataset = dataset
        self.seed = seed
        self.compact = compact
        self._options = dataset_options
        self._chunk = functools.lru_cache(maxsize=4)(self._build_chunk)
        self._scorer = self._chunk("train", 0)
        if compact and dataset != SORTING:
            raise ConfigError(f"environment option compact is for {SORTING} only, not {dataset!r}")

    def train_task(self, index: int) -> Task:
        return self._task("train", index)

    def warm_start_task(self, index: int) -> Task:
        """Return task `index` of the supervised warm-start stream. Its answer is `metadata["answer"]`."""
        return self._task("warm_start", index)

    def heldout_tasks(self, n: int) -> list[Task]:
        """Return `n` distinct held-out tasks; each seed draws others.

        Raises:
            UserError: the dataset has too few distinct prompts.
        """
        tasks: dict[str, Task] = {}
        for number in range(n * TRIES + CHUNK):
            if len(tasks) == n:
                break
            task = self._draw("heldout", number)
            if split_of(task.prompt) == "heldout":
                tasks.setdefault(task.prompt, task)
        if len(tasks) < n:
            raise UserError(
                f"{self.dataset} with {self._options} has too few distinct prompts: "
                f"{len(tasks)} held out, {n} asked for"
            )
        return list(tasks.values())

    def reward(self, task: Task, response_text: str) -> float:
        """Return the dataset's own score of an answer. Sorting must be exact: its scorer accepts numbers 1.0 off."""
        answer = response_text.strip()
        if self.compact:
            return float(answer == task.metadata["answer"])
        if self.dataset == SORTING:
            return float(_numbers(answer) == _numbers(task.metadata["answer"]))
        try:
            return float(self._scorer.score_answer(answer, task.metadata["entry"]))
        except _UNREADABLE:
            return 0.0

    def _task(self, split: Split, index: int) -> Task:
        if index < 0:
            raise UserError(f"task index must not be negative, got {index}")
        for number in range(index * TRIES, (index + 1) * TRIES):
            task = self._draw(split, number)
            if split_of(task.prompt) == split:
                return task
        raise UserError(f"{self.dataset} with {self._options} has too few distinct prompts to be split by their hash")

    def _draw(self, split: Split, number: int) -> Task:
        chunk, offset = divmod(number, CHUNK)
        entry = cast("dict[str, Any]", self._chunk(split, chunk)[offset])
        prompt, answer = _compact(entry["metadata"]) if self.compact else (entry["question"], entry["answer"])
        return Task(f"{self.dataset}/{split}/{self.seed}/{number}", prompt, {"answer": answer, "entry": entry})

    def _build_chunk(self, split: Split, chunk: int) -> Any:
        try:
            import reasoning_gym  # noqa: PLC0415 - takes 1.5 s and is not a dependency of the core
            from reasoning_gym.factory import DATASETS  # noqa: PLC0415
        except ImportError as error:
            raise ConfigError(
                f"the reasoning_gym environment needs `pip install 'penstock[train]'` ({error})"
            ) from error
        if self.dataset not in DATASETS:
            hint = did_you_mean(self.dataset, sorted(DATASETS))
            raise ConfigError(f"environment.options: reasoning_gym has no dataset {self.dataset!r}; {hint}")
        known = {field.name for field in fields(DATASETS[self.dataset][1])} - {"seed", "size"}
        for name in self._options.keys() - known:
            hint = did_you_mean(name, sorted(known | {"compact"}))
            raise ConfigError(f"environment.options: dataset {self.dataset!r} has no option {name!r}; {hint}")
        # Datasets seed item i with seed + i, so neighbouring seeds would share items. Hashed seeds do not.
        name = f"{self.seed}/{split}/{chunk}".encode()
        seed = int.from_bytes(hashlib.blake2b(name, digest_size=4).digest()) >> 1
        try:
            return reasoning_gym.create_dataset(self.dataset, seed=seed, size=CHUNK, **self._options)
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(f"reasoning_gym dataset {self.dataset!r} with {self._options}: {error}") from error


def _compact(metadata: Mapping[str, Any]) -> tuple[str, str]:
    """Return prompt and answer of a number-sorting item in few characters. Whole numbers lose their `.0`."""
    sign = "<" if metadata["direction"] == "ascending" else ">"
    return f"{sign}{_join(metadata['original_numbers'])}=", _join(metadata["sorted_numbers"])


def _join(numbers: list[str]) -> str:
    return " ".join(number.removesuffix(".0") for number in numbers)


def _numbers(text: str) -> list[float] | None:
    """Return the numbers of a list such as `['1.0', '2.0']`, or None. Quotes are optional."""
    if not (text.startswith("[") and text.endswith("]")):
        return None
    try:
        return [float(part.strip().strip("'\"")) for part in text[1:-1].split(",")]
    except ValueError:
        return None
