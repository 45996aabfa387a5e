"""Rollout work as traces: agents of many turns, groups of single-turn samples, lengths with heavy tails.

A trace is data, made from a seed before anything runs, so that every policy gets the same work.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from fleet_sim.cache import Segment


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a trajectory."""

    new_tokens: int
    """Prompt tokens after everything the conversation had before: the task, or a tool's answer."""
    output_tokens: int
    delay_s: float = 0.0
    """Between the answer before it and this request: the tool's run."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode."""

    id: int
    shared: tuple[Segment, ...]
    """What its prompts begin with and others' do too: system prompt, a group's task."""
    turns: tuple[Turn, ...]
    group: int | None = None
    session: bool = True
    """Whether its requests carry a session id; single-turn samples have none."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lognormal numbers of tokens, cut off at both ends."""

    median: float
    sigma: float
    most: int
    least: int = 1

    def draw(self, source: random.Random) -> int:
        """One of them."""
        return max(self.least, min(self.most, round(self.median * source.lognormvariate(0.0, self.sigma))))


@dataclass(frozen=True, slots=True)
class AgentShape:
    """Multi-turn agents that call tools and whose context grows."""

    system_tokens: int = 2048
    task: Lengths = Lengths(800, 0.5, 4000)
    turns: tuple[int, int] = (6, 14)
    observation: Lengths = Lengths(1200, 0.9, 12_000)
    output: Lengths = Lengths(350, 0.8, 4096)
    tool_s: tuple[float, float] = (3.0, 1.0)
    """Median and sigma of a lognormal."""
    group_size: int = 8


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Single-turn groups: many samples of one prompt."""

    system_tokens: int = 512
    prompt: Lengths = Lengths(700, 0.6, 6000)
    output: Lengths = Lengths(1500, 0.7, 16_384)
    pareto: float | None = None
    """Index of a Pareto tail that takes the lognormal's place; the smaller, the heavier."""
    sizes: Sequence[int] = (8, 16, 32, 64)


def agents(count: int, shape: AgentShape, seed: int) -> list[Trajectory]:
    """`count` agents; the `group_size` samples of one task follow each other, as a rollout worker starts them."""
    source = random.Random(f"agents {seed}")
    made: list[Trajectory] = []
    task = 0
    for i in range(count):
        group = i // shape.group_size
        if i % shape.group_size == 0:
            task = shape.task.draw(source)
        shared: tuple[Segment, ...] = (("system", shape.system_tokens), (f"task {group}", task))
        median, sigma = shape.tool_s
        turns: list[Turn] = []
        for t in range(source.randint(*shape.turns)):
            delay = median * source.lognormvariate(0.0, sigma) if t else 0.0
            turns.append(Turn(shape.observation.draw(source) if t else 0, shape.output.draw(source), delay))
        made.append(Trajectory(i, shared, tuple(turns), group))
    return made


def groups(count: int, shape: GroupShape, seed: int) -> list[Trajectory]:
    """At least `count` samples in whole groups."""
    source = random.Random(f"groups {seed}")
    made: list[Trajectory] = []
    group = 0
    while len(made) < count:
        shared: tuple[Segment, ...] = (("system", shape.system_tokens), (f"task {group}", shape.prompt.draw(source)))
        for _ in range(source.choice(shape.sizes)):
            if shape.pareto is None:
                length = shape.output.draw(source)
            else:
                scale = shape.output.median / 2 ** (1 / shape.pareto)  # the same median
                length = min(shape.output.most, round(scale * source.paretovariate(shape.pareto)))
            made.append(Trajectory(len(made), shared, (Turn(0, max(1, length)),), group, session=False))
        group += 1
    return made
