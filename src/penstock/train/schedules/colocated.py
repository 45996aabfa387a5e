"""Synchronous, learner and engines on the same GPUs. Engines sleep while the learner trains.

The engines wake in two steps. First they take the memory of their weights and receive the new version, on one host by
CUDA IPC. Then they take the memory of their KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

from penstock.control_types import UpdateReport
from penstock.rollout.generator import Trajectory
from penstock.train.parts import Learned, Parts, to_the_end


async def step(parts: Parts) -> tuple[Learned, UpdateReport]:
    """Do one step of the run."""
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
