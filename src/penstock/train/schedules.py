"""The schedules of a run (`train.schedule`): what one step does, and in which order.

A schedule arranges the parts of a `Run`: rollouts, learning, and engine updates.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from penstock.config import RunConfig
from penstock.control_types import UpdateReport
from penstock.errors import ConfigError
from penstock.rollout.generator import Trajectory

if TYPE_CHECKING:
    from penstock.train.trainer import Run

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Learned:
    """One step of the learner: its batch, policy tokens by age in versions, and metrics."""

    batch: Sequence[Trajectory]
    ages: Counter[int]
    figures: Mapping[str, float]


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Await work that must not stop half way. A cancellation waits for its end (the work has its own deadlines)."""
    task = asyncio.ensure_future(work)
    # Read to avoid asyncio's complaint: the caller gets the cancellation, and a second one ends the wait below.
    task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def synchronous(run: Run) -> tuple[Learned, UpdateReport]:
    """Generate a batch, train on it, update. Learner and engines wait for each other.

    Every token is of the trainer's own version, and sampling is seeded, so a run can be repeated.
    """
    run.rollouts.submit()
    batch = await run.next_batch()
    learned = await run.learn(batch)
    return learned, await run.update()


async def one_step_off(run: Run) -> tuple[Learned, UpdateReport]:
    """Have the engines generate batch N + 1 while the learner trains on N.

    The update comes when both are done, so no token spans two versions. Every batch but the first is one version old.
    """
    run.rollouts.submit(ahead=0)  # for the first step of the run, or after a resume
    batch = await run.next_batch()
    run.rollouts.submit(ahead=0)
    learned = await run.learn(batch)
    await run.settled()
    return learned, await run.update()


async def fully_async(run: Run) -> tuple[Learned, UpdateReport]:
    """Never stop rollouts: weights change while tokens are made.

    Groups start as far ahead as `train.max_staleness` allows (`StalenessWindow`), at the learner's pace.
    Finished groups wait in a buffer. A step takes the oldest finished groups, and a slow group goes into a later batch.
    """
    run.rollouts.submit()
    batch = await run.next_batch()
    began = time.monotonic()
    learned = await run.learn(batch)
    report = await run.update()
    if run.config.train.staleness:  # at staleness 0, the learner is idle while rollouts run
        run.rollouts.pacer.busy_s = time.monotonic() - began
    run.rollouts.submit()
    return learned, report


async def colocated(run: Run) -> tuple[Learned, UpdateReport]:
    """Take turns on the same GPUs. Engines sleep while the learner trains.

    The engines wake in two steps. First they take the memory of their weights and receive the new version, on one host
    by CUDA IPC. Then they take the memory of their KV cache.
    """
    run.rollouts.submit()
    batch = await run.next_batch()
    return await to_the_end(_train_asleep(run, batch))


async def _train_asleep(run: Run, batch: Sequence[Trajectory]) -> tuple[Learned, UpdateReport]:
    # Level 2 drops the weights, which the update replaces. An adapter's update does not bring its base, and attached
    # servers outlive a failed run.
    attached = bool(run.config.fleet.attach)
    level = 2 if run.trainee.served_adapter is None and not attached else 1
    async with AsyncExitStack() as failed:
        if attached:
            failed.push_async_callback(_wake, run)
        with run.watch.measure("sleep"):
            await run.client.sleep(level)
        learned = await run.learn(batch)
        with run.watch.measure("sleep"):
            run.trainee.release_memory()
            await run.client.wake_up(["weights"])
        report = await run.update()
        with run.watch.measure("sleep"):
            await run.client.wake_up(["kv_cache"])
        failed.pop_all()
    return learned, report


async def _wake(run: Run) -> None:
    run.trainee.release_memory()
    await run.client.wake_up()


Schedule = Callable[["Run"], Awaitable[tuple[Learned, UpdateReport]]]
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
