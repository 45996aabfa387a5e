"""Where the samples of each group went."""

from __future__ import annotations

from collections import OrderedDict


class Groups:
    """Group id to engines with the number of its samples; where it is full, the least recently used is forgotten."""

    def __init__(self, capacity: int = 16_384) -> None:
        self._capacity = capacity
        self._placed: OrderedDict[str, dict[str, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._placed)

    def placed(self, group_id: str) -> tuple[tuple[str, int], ...]:
        """Engines and how many of the group's samples each got."""
        return tuple(self._placed.get(group_id, {}).items())

    def note(self, group_id: str, engine: str) -> None:
        """One more of its samples goes to `engine`."""
        engines = self._placed.get(group_id)
        if engines is None:
            if len(self._placed) >= self._capacity:
                self._placed.popitem(last=False)
            engines = self._placed[group_id] = {}
        else:
            self._placed.move_to_end(group_id)
        engines[engine] = engines.get(engine, 0) + 1
