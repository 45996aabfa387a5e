"""When a group of rollouts may start: how far ahead of the trainer, and at which pace.

The bound on staleness holds by construction and throws nothing away. A batch is `groups_per_batch` groups. Group `i`
is trained on at step `i // groups_per_batch` (steps from 0), in the order of submission, whatever the order of
completion. It may be submitted only when

    i < (version - start_version + max_staleness + 1) * groups_per_batch

where `version` is what the engines have confirmed. This is AReaL's rate rule (arXiv 2505.24298: floor((N - 1) / B) <=
i + eta for N samples submitted, batches of B, policy version i and largest staleness eta), counted in groups.

Why no token is older than `max_staleness`: group `i` is trained on by the trainer of version `start_version + i //
groups_per_batch`. At its submission the rule gives `i // groups_per_batch <= version - start_version + max_staleness`,
that is, trainer version <= `version` + `max_staleness`. The engines serve `version` by then and never go back, so
every token of the group has a version of at least `version`, and an age of at most `max_staleness`.

Why no token is wasted: the bound needs no group to be dropped for its age, every submitted group is trained on, and
submission stops at `total_steps * groups_per_batch`. Training in the order of submission is what makes the rule a bound
on every token and not only on the rate: a long response is not overtaken until it is too old, nor are short ones
favoured. The price is waiting when one group takes longer than `max_staleness` steps. `max_staleness = 0` is the
synchronous schedule.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from penstock.errors import StateError


@dataclass(slots=True)
class StalenessWindow:
    """Which groups may be submitted now. Pure counting: no clock, no I/O.

    Attributes:
        groups_per_batch: groups that one step trains on.
        max_staleness: largest age of a token, in versions, when it is trained on.
        total_steps: steps of the whole run.
        start_version: weight version before the first step.
        version: weight version that the engines serve now.
        next_group: the group that is submitted next.
    """

    groups_per_batch: int
    max_staleness: int
    total_steps: int
    start_version: int = 0
    version: int = 0
    next_group: int = 0

    @classmethod
    def after(cls, step: int, *, groups_per_batch: int, max_staleness: int, total_steps: int, version: int) -> Self:
        """The window after `step` finished steps, when `version` is served: later groups are submitted again."""
        return cls(
            groups_per_batch=groups_per_batch,
            max_staleness=max_staleness,
            total_steps=total_steps,
            start_version=version - step,
            version=version,
            next_group=step * groups_per_batch,
        )

    @property
    def limit(self) -> int:
        """Groups from this index on must wait."""
        steps_ahead = self.version - self.start_version + self.max_staleness + 1
        return min(steps_ahead, self.total_steps) * self.groups_per_batch

    def take(self) -> range:
        """The groups that may be submitted now, each given out once."""
        granted = range(self.next_group, max(self.limit, self.next_group))
        self.next_group = granted.stop
        return granted

    def batch(self, step: int) -> range:
        """The groups that step `step` (from 0) trains on."""
        return range(step * self.groups_per_batch, (step + 1) * self.groups_per_batch)

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
