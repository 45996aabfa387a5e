"""What stands for each engine in the memory that the processes of a router share; given by the hub alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.errors import UserError
from penstock.router.membership import EngineEntry


class EngineSlots:
    """Numbers for the engines of the set in force, the same in all processes.

    Args:
        count: how many slots the board has.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._places: dict[str, tuple[str, int | None]] = {}
        self._last = 0
        self.homes: dict[str, int] = {}
        """Names of the set to the numbers that sessions know them by. A number is given once: sessions of an engine
        that left do not pass to another, not even to its successor under its name."""
        self.slots: dict[str, int] = {}
        """Names to places on the board: of the set, and of engines that left it and have requests in flight still, each
        of which will be taken off the board under that name."""
        self.lost: list[str] = []
        """Names in `slots` whose sessions lost their home with this set."""

    def assign(self, entries: Sequence[EngineEntry], busy: Callable[[int], bool]) -> list[int]:
        """Go over to the next set.

        Args:
            entries: of the set.
            busy: whether any process has a request on the engine in a slot.

        Returns:
            Slots that were given to a new name: whatever is in them is to be cleared.

        Raises:
            UserError: there are not enough slots; nothing has changed.
        """
        places = {entry.name: entry.place for entry in entries}
        # One that leaves just now keeps its slot even where nothing is in flight: a worker may be placing a request.
        slots = {
            name: slot for name, slot in self.slots.items() if name in places or name in self._places or busy(slot)
        }
        new = [name for name in places if name not in slots]
        free = sorted(set(range(self._count)).difference(slots.values()))
        if len(new) > len(free):
            raise UserError(
                f"several router processes share figures of at most {self._count} engines, got {len(places)}"
            )
        slots.update(zip(new, free, strict=False))
        homes: dict[str, int] = {}
        for name, place in places.items():
            if self._places.get(name) == place:
                homes[name] = self.homes[name]
            else:
                self._last += 1
                homes[name] = self._last
        self.lost = [name for name in slots if self.homes.get(name) != homes.get(name)]
        self.homes, self.slots, self._places = homes, slots, places
        return free[: len(new)]
