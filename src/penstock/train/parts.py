"""The parts that a schedule puts in order: rollouts, the learner's step, the update of the engines."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.fleet.fleet import Fleet
from penstock.observe.trace import Tracer
from penstock.rollout.generator import Trajectory
from penstock.train.grpo import Trainee
from penstock.train.rollouts import Rollouts
from penstock.train.step_metrics import Stopwatch, check_ages, token_ages
from penstock.types import UpdateReport

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Learned:
    """One step of the learner.

    Attributes:
        batch: what it trained on.
        ages: policy tokens of the batch by age in versions.
        figures: what the learner returned.
    """

    batch: Sequence[Trajectory]
    ages: Counter[int]
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Parts:
    """What a schedule arranges.

    Attributes:
        rollouts: groups in flight and done.
        trainee: the weights being trained.
        client: the engines.
        watch: measures each part.
        tracer: notes what each engine did in an update.
        staleness: largest age of a token, in versions.
    """

    rollouts: Rollouts
    trainee: Trainee
    client: Fleet
    watch: Stopwatch
    tracer: Tracer
    staleness: int

    async def next_batch(self) -> list[Trajectory]:
        """See `Rollouts.next_batch`."""
        with self.watch.measure("waiting"):
            return await self.rollouts.next_batch()

    async def settled(self) -> None:
        """See `Rollouts.settled`."""
        with self.watch.measure("waiting"):
            await self.rollouts.settled()

    async def learn(self, batch: Sequence[Trajectory]) -> Learned:
        """Train on a batch in a thread; the learner's version goes up by one.

        Raises:
            StateError: a token is older than the schedule allows, or the loss is not finite.
        """
        ages = token_ages(batch, self.trainee.version)
        check_ages(ages, self.staleness)
        with self.watch.measure("training"):
            return Learned(batch, ages, await to_the_end(asyncio.to_thread(self.trainee.step, batch)))

    async def update(self) -> UpdateReport:
        """Put the learner's weights in force on the engines; `rollouts.submit` may then start further groups."""
        began = self.watch.now()
        with self.watch.measure("update"):
            report = await to_the_end(self.trainee.put_in_force(self.client))
        self.tracer.of_update(report, began)
        self.rollouts.window.commit(self.trainee.version)
        return report


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Await what must not be left half done: cancelling waits for its end first (it has deadlines of its own)."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # looked at, so that asyncio does not complain: the cancellation is what the caller gets
        raise
