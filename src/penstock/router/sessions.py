"""Where each session lives: a bounded table, the least recently used entry leaves first."""

from __future__ import annotations

from collections import OrderedDict


class Sessions:
    """Session id to engine name.

    Args:
        capacity: most sessions remembered; one that is forgotten is placed anew at its next turn.
    """

    def __init__(self, capacity: int = 262_144) -> None:
        self._capacity = capacity
        self._homes: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def home(self, session_id: str) -> str | None:
        """The engine that served it last."""
        return self._homes.get(session_id)

    def settle(self, session_id: str, engine: str) -> None:
        """Note that `engine` serves it now."""
        self._homes[session_id] = engine
        self._homes.move_to_end(session_id)
        if len(self._homes) > self._capacity:
            self._homes.popitem(last=False)
