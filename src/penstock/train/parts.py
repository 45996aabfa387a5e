"""The parts that a schedule arranges: rollouts, learning, and engine updates."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.control_types import UpdateReport
from penstock.fleet.fleet import Fleet
from penstock.observe.trace import Tracer
from penstock.rollout.generator import Trajectory
from penstock.train.grpo import Trainee
from penstock.train.rollouts import Rollouts
from penstock.train.step_metrics import Stopwatch, check_ages, token_ages

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Learned:
    """One step of the learner: its batch, policy tokens by age in versions, and metrics."""

    batch: Sequence[Trajectory]
    ages: Counter[int]
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts that a schedule arranges. `staleness`: largest age of a token, in versions."""

    rollouts: Rollouts
    trainee: Trainee
    client: Fleet
    watch: Stopwatch
    tracer: Tracer
    staleness: int

    async def next_batch(self) -> list[Trajectory]:
        """Wait for the next batch; see `Rollouts.next_batch`."""
        with self.watch.measure("waiting"):
            return await self.rollouts.next_batch()

    async def settled(self) -> None:
        """Wait for all submitted groups; see `Rollouts.settled`."""
        with self.watch.measure("waiting"):
            await self.rollouts.settled()

    async def learn(self, batch: Sequence[Trajectory]) -> Learned:
        """Train on a batch in a thread. The learner's version goes up by one.

        Raises:
            StateError: a token is older than the schedule allows, or the loss is not finite.
        """
        ages = token_ages(batch, self.trainee.version)
        check_ages(ages, self.staleness)
        with self.watch.measure("training"):
            return Learned(batch, ages, await to_the_end(asyncio.to_thread(self.trainee.step, batch)))

    async def update(self) -> UpdateReport:
        """Put the learner's weights in force on the engines. `rollouts.submit` may then start more groups."""
        began = self.watch.now()
        with self.watch.measure("update"):
            report = await to_the_end(self.trainee.put_in_force(self.client))
        self.tracer.of_update(report, began)
        self.rollouts.window.commit(self.trainee.version)
        return report


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Await work that must not stop half way. A cancellation waits for its end (the work has its own deadlines)."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # read to avoid asyncio's complaint; the caller gets the cancellation
        raise
