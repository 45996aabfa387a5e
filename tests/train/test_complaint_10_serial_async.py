"""Complaint 10: a schedule is called asynchronous, and yet the engines wait for the learner: ROLL #394."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from in_process_engine import InProcessEngine, Student
from training_setup import config_of, run_with

from penstock.observe.run_folder import RunFolder
from penstock.rollout.generator import Trajectory

STEPS = 4
LONGEST_S = 60.0
"""For which a training step waits for the next batch; under a serial schedule that never comes."""


class Overlapping(Student):
    """Trains on a batch until the engine has been asked for the next one, where the schedule is to overlap."""

    def __init__(self, requests: Sequence[Any], batch: int, before: int, *, waits: bool) -> None:
        super().__init__()
        self.ahead: list[int] = []
        """At the end of each step: groups that the engine was asked for beyond those trained on."""
        self._requests, self._batch, self._before, self._waits = requests, batch, before, waits
        self._loop = asyncio.get_running_loop()

    def step(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        del trajectories
        self.version += 1
        wanted = self._batch * min(self.version + 1, STEPS)

        async def next_batch_is_asked_for() -> None:
            while self._asked() < wanted:  # noqa: ASYNC110 - the engine here has no event
                await asyncio.sleep(0)

        if self._waits:
            asyncio.run_coroutine_threadsafe(next_batch_is_asked_for(), self._loop).result(timeout=LONGEST_S)
        self.ahead.append(self._asked() - self._batch * self.version)
        return {}

    def _asked(self) -> int:
        return len(self._requests) - self._before


@pytest.mark.parametrize("schedule", ["sync", "one_step_off", "async"])
async def test_the_next_batch_is_made_while_the_learner_trains(schedule: str, tmp_path: Path) -> None:
    config = config_of("none", train={"steps": STEPS, "max_staleness": 2, "schedule": schedule})
    client = InProcessEngine()
    groups = config.rollout.groups_per_batch
    learner = Overlapping(client.requests, groups, config.eval.size, waits=schedule != "sync")
    await run_with(config, client, learner, RunFolder.create(tmp_path, config))
    assert len(learner.ahead) == STEPS
    assert learner.ahead[-1] == 0, "nothing is made that no step trains on"
    if schedule == "sync":
        assert learner.ahead == [0] * STEPS
    else:
        assert all(ahead >= groups for ahead in learner.ahead[:-1]), learner.ahead
