"""Decides when a group of rollouts may start, and which groups a step trains on.

A batch is `groups_per_batch` groups (B), and every group is trained on once. Group number `n` of the run may be
submitted only if

    n < (version - start_version + max_staleness + 1) * B

where `version` is what the engines have confirmed. This is AReaL's rate rule (arXiv 2505.24298), counted in groups.

A step takes the oldest finished groups, so a slow group goes into a later batch. The step waits if the remaining groups
could not all be trained on in time: a group submitted under version v is in the batch of trainer version
v + max_staleness at the latest. Batches in the order of submission meet every such deadline.

The bound on staleness therefore holds by construction, and no group is discarded. The engines never go back, so a
group's tokens are never older than its submission. With `max_staleness = 0`, every group is due in its own batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field

from penstock.errors import StateError


@dataclass(slots=True)
class StalenessWindow:
    """Decides which groups may be submitted now, and which a step trains on. Pure counting: no clock, no I/O.

    Attributes:
        start_version: weight version before the first step.
        version: weight version that the engines serve now.
        carried: groups that were submitted before a resume and must be submitted again.
        outstanding: groups submitted and not trained on, with the version that was served at their submission.
    """

    groups_per_batch: int
    max_staleness: int
    total_steps: int
    start_version: int = 0
    version: int = 0
    next_group: int = 0
    carried: Sequence[int] = ()
    outstanding: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def step(self) -> int:
        """Number of finished steps, derived from the groups trained on."""
        return (self.next_group - len(self.outstanding) - len(self.carried)) // self.groups_per_batch

    def take(self, ahead: int | None = None) -> list[int]:
        """Return the groups that may be submitted now. Each group is returned once.

        `ahead`: at most so many batches beyond the next step's; None: as many as the bound allows.
        """
        batches = self.version - self.start_version + self.max_staleness + 1
        if ahead is not None:
            batches = min(batches, self.step + 1 + ahead)
        limit = min(batches, self.total_steps) * self.groups_per_batch
        granted = [*self.carried, *range(self.next_group, limit)]
        self.carried = ()
        self.next_group = max(self.next_group, limit)
        self.outstanding.update(dict.fromkeys(granted, self.version))
        return granted

    def batch(self, done: AbstractSet[int]) -> list[int] | None:
        """Return the groups of the next step, in order, given the complete groups `done`; None: wait for more."""
        chosen = sorted(done, key=lambda group: (self.outstanding[group], group))[: self.groups_per_batch]
        left = sorted(version for group, version in self.outstanding.items() if group not in chosen)
        following = self.start_version + self.step + 1
        for place, version in enumerate(left):
            if following + place // self.groups_per_batch > version + self.max_staleness:
                return None
        return sorted(chosen) if len(chosen) == self.groups_per_batch else None

    def awaited(self) -> list[int]:
        """Return the groups that would fill the next batch if late groups came last."""
        carried = sum(group < self.step * self.groups_per_batch for group in self.outstanding)
        return sorted(self.outstanding)[: self.groups_per_batch + carried]

    def trained(self, groups: Iterable[int]) -> None:
        """Record that a step trains on these groups. They are then no longer outstanding."""
        for group in groups:
            del self.outstanding[group]

    def commit(self, version: int) -> None:
        """Record that the engines have confirmed `version`.

        Raises:
            StateError: it is not the version after the present one.
        """
        if version != self.version + 1:
            raise StateError(f"weight version {version} was put in force after {self.version}: versions go up by one")
        self.version = version


STARTS_PER_BATCH = 8
"""Number of portions in which a batch's groups start. An engine makes tokens cheaper for several groups at once."""


class Pacer:
    """Starts groups at the learner's pace, not all at once when an update commits.

    If training is the slower side, the staleness window opens for a whole batch when an update commits. If all its
    groups started at once, they would finish early and grow stale, and the next update would find idle engines. Spread
    over the learner's busy time, the same work starts later, under newer weights. The pace is the learner's busy time,
    never its waiting time. If rollouts are the slower side, groups therefore start ahead of need.

    `busy_s`: seconds that the learner was busy with the last batch; 0: no pacing.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._turns: dict[int, asyncio.Event] = {}
        self._hurried = -1

    async def turn(self, group: int, place: int, of: int) -> None:
        """Return when group `place` of the `of` groups admitted together should start.

        The group starts at once if the learner waits for it (`hurry`), else in the middle of its portion of `busy_s`.
        """
        portion = place * STARTS_PER_BATCH // of
        delay = self.busy_s * (portion + 0.5) / STARTS_PER_BATCH
        if delay <= 0 or group <= self._hurried:
            return
        turn = self._turns[group] = asyncio.Event()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await turn.wait()
        finally:
            del self._turns[group]

    def hurry(self, groups: Iterable[int]) -> None:
        """Start these groups and all before them now, because the learner waits for them."""
        self._hurried = max(self._hurried, *groups)
        for group, turn in self._turns.items():
            if group <= self._hurried:
                turn.set()
