"""When a group of rollouts may start, and which groups a step trains on.

A batch is `groups_per_batch` groups (B), and every group is trained on once. Group number `n` of the run may be
submitted only when

    n < (version - start_version + max_staleness + 1) * B

where `version` is what the engines have confirmed. This is AReaL's rate rule (arXiv 2505.24298), counted in groups.

A step takes the oldest of the groups that are done, so an over-long one is carried over to a later batch. The step
waits if those left over could not all be trained on in time: submitted under version v, a group is in the batch of
trainer version v + max_staleness at the latest. The order of submission keeps every such deadline, by the rule above.

So the bound on staleness holds by construction and throws nothing away. The engines never go back, so no token of a
group is older than the version at its submission. `max_staleness = 0` makes every group due in its own batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from penstock.errors import StateError


@dataclass(slots=True)
class StalenessWindow:
    """Which groups may be submitted now, and which a step trains on. Pure counting: no clock, no I/O.

    Attributes:
        groups_per_batch: groups that one step trains on.
        max_staleness: largest age of a token, in versions, when it is trained on.
        total_steps: steps of the whole run.
        start_version: weight version before the first step.
        version: weight version that the engines serve now.
        next_group: the group that is submitted next.
        carried: groups that were submitted before the run was resumed, and are submitted again.
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
        """Finished steps, counted by the groups trained on."""
        return (self.next_group - len(self.outstanding) - len(self.carried)) // self.groups_per_batch

    def take(self, ahead: int | None = None) -> list[int]:
        """The groups that may be submitted now, each given out once.

        Args:
            ahead: batches after the one that the next step trains on; None: as many as the bound allows.
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
        """The groups that the next step trains on, in order, where `done` are complete; None: it has to wait."""
        chosen = sorted(done, key=lambda group: (self.outstanding[group], group))[: self.groups_per_batch]
        left = sorted(version for group, version in self.outstanding.items() if group not in chosen)
        following = self.start_version + self.step + 1
        for place, version in enumerate(left):
            if following + place // self.groups_per_batch > version + self.max_staleness:
                return None
        return sorted(chosen) if len(chosen) == self.groups_per_batch else None

    def awaited(self) -> list[int]:
        """The groups that would fill the next batch if those carried over from earlier batches came last."""
        carried = sum(group < self.step * self.groups_per_batch for group in self.outstanding)
        return sorted(self.outstanding)[: self.groups_per_batch + carried]

    def trained(self, groups: Iterable[int]) -> None:
        """A step trains on these; they are outstanding no more."""
        for group in groups:
            del self.outstanding[group]

    def commit(self, version: int) -> None:
        """The engines now serve `version`; to be called when they have confirmed it, not when the trainer has made it.

        Raises:
            StateError: not the version after the present one.
        """
        if version != self.version + 1:
            raise StateError(f"weight version {version} was put in force after {self.version}: versions go up by one")
        self.version = version


STARTS_PER_BATCH = 8
"""Groups start in so many portions: an engine makes tokens far more cheaply for several groups at once."""


class Pacer:
    """Starts groups at the pace at which the learner takes them, not all at once when an update commits.

    Where training is the slower side, the staleness window opens for a whole batch in the moment an update commits.
    Started at once, those groups would be done early and grow stale, and the next update would find idle engines.
    Spread over the time that the learner is busy, the same work begins later, under newer weights. The pace is the
    learner's busy time, never its waiting time: where rollouts are the slower side, they start ahead of need.

    `busy_s`: seconds that the learner was busy with the last batch; 0: no pacing.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._turns: dict[int, asyncio.Future[None]] = {}
        self._hurried = -1

    async def turn(self, group: int, place: int, of: int) -> None:
        """Return when group number `place` of the `of` that were admitted together should start.

        That is at once when the learner waits for it (`hurry`), and in the middle of its portion of `busy_s` otherwise.
        """
        portion = place * STARTS_PER_BATCH // of
        delay = self.busy_s * (portion + 0.5) / STARTS_PER_BATCH
        if delay <= 0 or group <= self._hurried:
            return
        loop = asyncio.get_running_loop()
        turn = self._turns[group] = loop.create_future()
        timer = loop.call_later(delay, _release, turn)
        try:
            await turn
        finally:
            timer.cancel()
            del self._turns[group]

    def hurry(self, groups: Iterable[int]) -> None:
        """The learner waits for these groups: they, and all before them, start now."""
        self._hurried = max(self._hurried, *groups)
        for group, turn in self._turns.items():
            if group <= self._hurried:
                _release(turn)


def _release(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
