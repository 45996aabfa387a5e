"""The schedules of a run (`train.schedule`): what one step does, and in which order.

A schedule arranges `Parts`: rollouts, learning, and engine updates.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from penstock.config import RunConfig
from penstock.control_types import UpdateReport
from penstock.errors import ConfigError
from penstock.fleet.fleet import Fleet
from penstock.observe.trace import Tracer
from penstock.rollout.generator import Trajectory
from penstock.train.grpo import Trainee
from penstock.train.rollouts import Rollouts
from penstock.train.step_metrics import Stopwatch, check_ages, token_ages

log = logging.getLogger(__name__)
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


async def synchronous(parts: Parts) -> tuple[Learned, UpdateReport]:
    """Generate a batch, train on it, update. Learner and engines wait for each other.

    Every token is of the trainer's own version, and sampling is seeded, so a run can be repeated.
    """
    parts.rollouts.submit()
    batch = await parts.next_batch()
    learned = await parts.learn(batch)
    return learned, await parts.update()


async def one_step_off(parts: Parts) -> tuple[Learned, UpdateReport]:
    """Have the engines generate batch N + 1 while the learner trains on N.

    The update comes when both are done, so no token spans two versions. Every batch but the first is one version old.
    """
    parts.rollouts.submit(ahead=0)  # for the first step of the run, or after a resume
    batch = await parts.next_batch()
    parts.rollouts.submit(ahead=0)
    learned = await parts.learn(batch)
    await parts.settled()
    return learned, await parts.update()


async def fully_async(parts: Parts) -> tuple[Learned, UpdateReport]:
    """Never stop rollouts: weights change while tokens are made.

    Groups start as far ahead as `train.max_staleness` allows (`penstock.train.staleness`), at the learner's pace.
    Finished groups wait in a buffer. A step takes the oldest finished groups, and a slow group goes into a later batch.
    """
    parts.rollouts.submit()
    batch = await parts.next_batch()
    began = time.monotonic()
    learned = await parts.learn(batch)
    report = await parts.update()
    if parts.staleness:  # at staleness 0, the learner is idle while rollouts run
        parts.rollouts.pacer.busy_s = time.monotonic() - began
    parts.rollouts.submit()
    return learned, report


async def colocated(parts: Parts) -> tuple[Learned, UpdateReport]:
    """Take turns on the same GPUs. Engines sleep while the learner trains.

    The engines wake in two steps. First they take the memory of their weights and receive the new version, on one host
    by CUDA IPC. Then they take the memory of their KV cache.
    """
    parts.rollouts.submit()
    batch = await parts.next_batch()
    return await to_the_end(_train_asleep(parts, batch))


async def _train_asleep(parts: Parts, batch: Sequence[Trajectory]) -> tuple[Learned, UpdateReport]:
    # Level 2 drops the weights, which the update replaces. An adapter's update does not bring its base, and attached
    # servers outlive a failed run.
    attached = bool(parts.rollouts.config.fleet.attach)
    level = 2 if parts.trainee.served_adapter is None and not attached else 1
    async with AsyncExitStack() as failed:
        if attached:
            failed.push_async_callback(_wake, parts)
        with parts.watch.measure("sleep"):
            await parts.client.sleep(level)
        learned = await parts.learn(batch)
        with parts.watch.measure("sleep"):
            parts.trainee.release_memory()
            await parts.client.wake_up(["weights"])
        report = await parts.update()
        with parts.watch.measure("sleep"):
            await parts.client.wake_up(["kv_cache"])
        failed.pop_all()
    return learned, report


async def _wake(parts: Parts) -> None:
    parts.trainee.release_memory()
    await parts.client.wake_up()


Schedule = Callable[[Parts], Awaitable[tuple[Learned, UpdateReport]]]
"""One step of a run: rollouts, learning and an update, in the schedule's order."""

SCHEDULES: Mapping[str, Schedule] = {
    "async": fully_async,
    "one_step_off": one_step_off,
    "sync": synchronous,
    "colocated": colocated,
}


def check_schedule(config: RunConfig) -> None:
    """Refuse a schedule that other keys or the layout rule out, before any start.

    Raises:
        ConfigError: engines that cannot sleep, next to a colocated learner; `max_staleness` 0 with `one_step_off`; or
            engines on the GPUs of a learner that needs its own.
    """
    engine, fleet, schedule = config.engine, config.fleet, config.train.schedule
    if schedule == "one_step_off" and config.train.max_staleness == 0:
        raise ConfigError(
            "train.schedule: one_step_off trains on tokens of the version before and max_staleness is 0; choose 1 or "
            "more, or sync"
        )
    if schedule == "colocated" and fleet.engines and not engine.enable_sleep_mode:
        raise ConfigError(
            "train.schedule: colocated has the engines sleep while the learner trains; set "
            "engine.enable_sleep_mode: true, or choose another schedule"
        )
    # The layout of other launchers and of the simulated engine is unknown here.
    if not fleet.attach and fleet.launcher == "local" and engine.profile != "sim":
        _check_gpus(config)


def _check_gpus(config: RunConfig) -> None:
    engine, fleet, schedule = config.engine, config.fleet, config.train.schedule
    gpus = torch.cuda.device_count() if engine.profile != "cpu" and torch.cuda.is_available() else 0
    if schedule == "colocated":
        if not gpus:
            raise ConfigError(
                "train.schedule: colocated needs engines that sleep, which vLLM can on GPUs only, and these run on "
                "CPUs; choose sync, one_step_off or async"
            )
        return
    ranks = engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size
    wanted, learner = fleet.engines * ranks, config.train.ranks
    if not gpus or wanted + learner <= gpus:
        return
    problem = (
        f"train.schedule: {schedule} trains while engines hold their GPUs, and {wanted} GPUs of engines and {learner} "
        f"of the learner are more than the {gpus} there are"
    )
    advice = "ask for fewer engines, or choose colocated with engine.enable_sleep_mode: true"
    if schedule != "async":
        raise ConfigError(f"{problem}; {advice}")
    log.warning("%s: they share, and slow each other down; %s", problem, advice)
