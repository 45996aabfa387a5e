"""Fully asynchronous. Rollouts never stop, and weights change while tokens are made.

Groups start as far ahead as `train.max_staleness` allows (`penstock.train.staleness`), at the learner's pace. Finished
groups wait in a buffer. A step takes the oldest finished groups, and a slow group goes into a later batch.
"""

from __future__ import annotations

import time

from penstock.control_types import UpdateReport
from penstock.train.parts import Learned, Parts


async def step(parts: Parts) -> tuple[Learned, UpdateReport]:
    """Do one step of the run."""
    parts.rollouts.submit()
    batch = await parts.next_batch()
    began = time.monotonic()
    learned = await parts.learn(batch)
    report = await parts.update()
    if parts.staleness:  # at staleness 0, the learner is idle while rollouts run
        parts.rollouts.pacer.busy_s = time.monotonic() - began
    parts.rollouts.submit()
    return learned, report
