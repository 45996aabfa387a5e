"""Synchronous, learner and engines apart: generate a batch, train on it, update. Each waits for the other.

Every token is of the trainer's own version, and sampling is seeded, so a run can be repeated.
"""

from __future__ import annotations

from penstock.control_types import UpdateReport
from penstock.train.parts import Learned, Parts


async def step(parts: Parts) -> tuple[Learned, UpdateReport]:
    """Do one step of the run."""
    parts.rollouts.submit()
    batch = await parts.next_batch()
    learned = await parts.learn(batch)
    return learned, await parts.update()
