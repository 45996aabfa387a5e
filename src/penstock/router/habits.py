"""What sessions usually do, learnt from those that came back for another turn."""

from __future__ import annotations

_RECENT = 1024
"""So many turns at least make a mean; those before them count half and less."""
_FIRST_TURNS = 64
"""After so many turns without a second one of any session, sessions are taken to have one turn."""
_IDLE_PAUSES = 3.0
_LEAST_IDLE_S = 3.0


class Habits:
    """How long sessions pause between two turns, and how much of what a turn may add it does add.

    Clients say the most that an answer may add, which is often ten times what it adds; and nobody says when a
    conversation is over. Both are needed to know how much of a KV cache is taken.
    """

    __slots__ = ("_added", "_expected", "_paused_s", "_returns", "ended")

    def __init__(self) -> None:
        self.ended = 0
        """Turns that have ended."""
        self._returns = 0
        self._paused_s = 0.0
        self._added = 0
        self._expected = 0

    def came_back(self, paused_s: float, added: int, expected: int) -> None:
        """A session begins another turn.

        Args:
            paused_s: seconds since its last one.
            added: tokens that its context is longer; tool output counts too, which the next turn brings along.
            expected: most that an answer of it may add.
        """
        self._returns += 1
        self._paused_s += paused_s
        if expected:
            self._expected += expected
            self._added += added if 0 < added < expected else expected if added > 0 else 0
        if self._returns >= 2 * _RECENT:
            self._returns //= 2
            self._paused_s /= 2
            self._expected //= 2
            self._added //= 2

    @property
    def added_share(self) -> float:
        """Part of the expected tokens that a turn adds, 0 to 1.

        All, as long as that is not known. Nothing, where sessions do not come back: none of them then loses by it if
        engines are fuller than they can hold, and each engine's own queue serves.
        """
        if self._expected:
            return self._added / self._expected
        return 1.0 if self._returns or self.ended < _FIRST_TURNS else 0.0

    @property
    def idle_s(self) -> float:
        """A session that has paused for so long will rather not come back."""
        return max(_LEAST_IDLE_S, _IDLE_PAUSES * self._paused_s / self._returns) if self._returns else _LEAST_IDLE_S
