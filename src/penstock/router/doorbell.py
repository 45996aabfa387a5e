"""Wakes a process of the router that waits for load to fall, when another one has let some go."""

from __future__ import annotations

import os
from collections.abc import Sequence

from penstock.router.shared_state import WORD, SharedState


class Doorbell:
    """One bell for each process, with a flag beside it that says whether anybody would hear it.

    Who waits raises its flag and then looks once more: either it sees the load that has gone, or who let it go sees
    the flag. Whoever rings lowers the flag, so a burst of endings is one wake-up.

    Args:
        state: the shared memory.
        bells: an eventfd of each process.
        process: which of them we are.
    """

    def __init__(self, state: SharedState, bells: Sequence[int], process: int) -> None:
        self._flags = state.words
        self._data = state.data
        self._bells = bells
        self._process = process
        self._end = len(bells) * WORD
        self._nobody = bytes(self._end)

    @property
    def fd(self) -> int:
        """Becomes readable when somebody rings."""
        return self._bells[self._process]

    def listen(self) -> bool:
        """From now on we want to be woken, once; False where we wanted that already."""
        if self._flags[self._process]:
            return False
        self._flags[self._process] = 1
        return True

    def answer(self) -> None:
        """Take note of what was rung."""
        os.eventfd_read(self.fd)

    def ring(self) -> None:
        """Wake the others that want it."""
        if self._data[: self._end] == self._nobody:  # nearly always, and no more than one look
            return
        for process, bell in enumerate(self._bells):
            if process != self._process and self._flags[process]:
                self._flags[process] = 0
                os.eventfd_write(bell, 1)


def make_bells(count: int) -> list[int]:
    """An eventfd for each of `count` processes."""
    return [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(count)]
