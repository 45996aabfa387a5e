"""One step off. The engines generate batch N + 1 while the learner trains on N.

The update comes when both are done, so no token spans two versions. Every batch but the first is one version old.
"""

from __future__ import annotations

from penstock.control_types import UpdateReport
from penstock.train.parts import Learned, Parts


async def step(parts: Parts) -> tuple[Learned, UpdateReport]:
    """Do one step of the run."""
    parts.rollouts.submit(ahead=0)  # for the first step of the run, or after a resume
    batch = await parts.next_batch()
    parts.rollouts.submit(ahead=0)
    learned = await parts.learn(batch)
    await parts.settled()
    return learned, await parts.update()
