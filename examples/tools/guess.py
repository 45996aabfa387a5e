"""A hidden number, guessed in a few turns by what the answers say: `environment.name: examples.tools.guess:Guess`."""

import random
from collections.abc import Sequence

from penstock.errors import UserError
from penstock.rollout.environment import Environment, Split, Task, Turn, split_of

LEAST, MOST = 0, 99
"""Every number has two digits."""


class Guess(Environment):
    """The prompt `12-26?` hides a number from 12 to 26. The answer to a guess is how far off it is: `+05` or `-05`.

    Ranges are split by their prompts, so those of held-out tasks are new to the policy. Without the answers, 3 guesses
    find 3 of 15 numbers.

    Args:
        seed: of the order of the training tasks.
        width: numbers of a range, at most.
        guesses: of an episode.
        feedback: if it is False, `...` is the answer to every guess, which says nothing.
    """

    def __init__(self, *, seed: int, width: int = 15, guesses: int = 3, feedback: bool = True) -> None:
        self.seed = seed
        self.guesses = guesses
        self.feedback = feedback
        self._ranges: dict[Split, list[tuple[int, int]]] = {"heldout": [], "warm_start": [], "train": []}
        for low in range(LEAST, MOST):
            for high in range(low + width // 2, min(low + width, MOST + 1)):
                self._ranges[split_of(prompt_of(low, high))].append((low, high))

    def train_task(self, index: int) -> Task:
        """Task `index` of the training stream."""
        return self.draw("train", random.Random(f"{self.seed}/{index}"))

    def draw(self, split: Split, rng: random.Random) -> Task:
        """Draw a range of a split, and a number of it."""
        low, high = rng.choice(self._ranges[split])
        return task_of(low, high, rng.randint(low, high))

    def heldout_tasks(self, n: int) -> list[Task]:
        """`n` pairs of a held-out range and a number of it, the same for every seed."""
        tasks = [task_of(low, high, n) for low, high in self._ranges["heldout"] for n in range(low, high + 1)]
        if n > len(tasks):
            raise UserError(f"{len(tasks)} tasks are held out, {n} were asked for; set eval.size")
        return random.Random(0).sample(tasks, n)

    def reward(self, task: Task, response_text: str) -> float:
        """1 for the hidden number as the last guess."""
        return float(response_text == task.metadata["hidden"])

    async def step(self, task: Task, responses: Sequence[str]) -> Turn:
        """Compare the latest guess; the right one ends the episode, and so does the last."""
        guess, hidden = responses[-1], task.metadata["hidden"]
        return Turn(self.answer(guess, hidden), done=guess == hidden or len(responses) == self.guesses)

    def answer(self, guess: str, hidden: str) -> str:
        """What a guess is answered with; one that is no number of two digits has no distance."""
        if not self.feedback or len(guess) != 2 or not guess.isdecimal():
            return "..."
        return f"{int(hidden) - int(guess):+03}"


def prompt_of(low: int, high: int) -> str:
    """Show a range."""
    return f"{low:02}-{high:02}?"


def task_of(low: int, high: int, hidden: int) -> Task:
    """Make the task of a number in a range."""
    return Task(f"{low}-{high}/{hidden}", prompt_of(low, high), {"low": low, "high": high, "hidden": f"{hidden:02}"})
