"""How often a dead process is started anew, and how long is waited before.

Pure: the clock is injected, so it is tested in virtual time.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field

from penstock.fleet.lifecycle import Clock

MAX_BACKOFF_S = 120.0


@dataclass(slots=True)
class RestartBudget:
    """Restarts of one process: each after twice the wait, and without end unless `max_restarts` is set."""

    max_restarts: int | None
    """So many in any `window_s` seconds."""
    window_s: float
    """After so many seconds without a restart the wait begins anew."""
    backoff_s: float
    """Wait before the first restart."""
    clock: Clock = time.monotonic
    _spent: deque[float] = field(default_factory=deque[float], init=False)
    _last: float = field(default=-math.inf, init=False)
    _wait_s: float = field(default=0.0, init=False)

    def left(self) -> bool:
        """Whether there is a restart to take now."""
        if self.max_restarts is None:
            return True
        while self._spent and self._spent[0] <= self.clock() - self.window_s:
            self._spent.popleft()
        return len(self._spent) < self.max_restarts

    def spend(self) -> float | None:
        """Take one restart; returns the seconds to wait before it, or None where the budget is exhausted."""
        if not self.left():
            return None
        now = self.clock()
        fresh = self._last <= now - self.window_s
        self._wait_s = min(self.backoff_s if fresh else 2 * self._wait_s, MAX_BACKOFF_S)
        self._last = now
        if self.max_restarts is not None:
            self._spent.append(now)
        return self._wait_s
