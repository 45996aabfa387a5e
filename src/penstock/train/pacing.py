"""Groups start at the pace at which the learner takes them, not all at once when an update commits.

Where training is the slower side, the staleness window is what holds rollouts back, and it opens for a whole batch in
the moment an update commits. Started at once, those groups would be done early and then grow stale, and the engines
would stand idle when the next update comes. Spread over the time that the learner is busy, the same work begins later,
under newer weights, and updates find the engines generating. The pace is the learner's busy time, never its waiting
time, so where rollouts are the slower side they start ahead of need, up to the window, and nobody is slowed down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

STARTS_PER_BATCH = 8
"""Groups start in so many portions: an engine makes tokens far more cheaply for several groups at once."""


class Pacer:
    """Gives each group its turn. `busy_s`: seconds that the learner was busy with the last batch; 0: no pacing."""

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
