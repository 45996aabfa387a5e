"""How often a dead engine is started anew, and how long is waited before: a budget in a sliding window.

Pure: the clock is injected, so it is tested in virtual time.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from penstock.fleet.lifecycle import Clock

MAX_BACKOFF_S = 60.0


@dataclass(slots=True)
class RestartBudget:
    """Restarts of one engine: at most `max_restarts` in any `window_s` seconds, each after twice the wait."""

    max_restarts: int
    window_s: float
    backoff_s: float
    """Wait before the first restart of a window."""
    clock: Clock = time.monotonic
    _spent: deque[float] = field(default_factory=deque[float], init=False)

    def left(self) -> bool:
        """Whether there is a restart to take now."""
        while self._spent and self._spent[0] <= self.clock() - self.window_s:
            self._spent.popleft()
        return len(self._spent) < self.max_restarts

    def spend(self) -> float | None:
        """Take one restart; returns the seconds to wait before it, or None where the budget is exhausted."""
        if not self.left():
            return None
        # The exponent is bounded, or a large budget would overflow a float.
        wait_s = min(self.backoff_s * 2.0 ** min(len(self._spent), 60), MAX_BACKOFF_S)
        self._spent.append(self.clock())
        return wait_s
