"""What every process of a router has on each engine, in shared memory: written by one, read by all.

Each process has a row, each engine a cell in it. A cell is written by the process of its row alone, so no lock is
needed, and the sum over the rows is what all of them together have there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from penstock.router.shared_state import ENGINE_FIELDS, FIELDS, WORD, SharedState

_REQUESTS, _TOKENS, _RESIDENT, _SESSIONS, _SESSION_TOKENS = range(FIELDS)
_SLOT_BITS = 16
_SLOT = (1 << _SLOT_BITS) - 1
_MICRO = 1_000_000


class Load(NamedTuple):
    """What all processes together have on one engine."""

    requests: int = 0
    """Sent and not answered in full."""
    tokens: int = 0
    """Of those requests, prompts and what they may add."""
    resident: int = 0
    """Tokens of those of them that have no session."""
    sessions: int = 0
    """Sessions that live there."""
    session_tokens: int = 0
    """Tokens of those sessions."""


class EngineHomes:
    """Gives each engine of a set what stands for it in shared memory; the hub's.

    That is a number that no other engine ever has, with the engine's slot on the board in its lower bits: so a
    session that lived on an engine which has left does not pass to whoever gets its slot.
    """

    def __init__(self, engines: int) -> None:
        self.homes: dict[str, int] = {}
        self._free = list(range(engines))
        self._given = 0

    def assign(self, names: Iterable[str]) -> dict[str, int]:
        """The homes of a full set: of engines that stay, the same as before. `forget` comes after it.

        Raises:
            IndexError: more engines than slots, those that leave included.
        """
        homes: dict[str, int] = {}
        for name in names:
            home = self.homes.get(name)
            if home is None:
                self._given += 1
                home = self._given << _SLOT_BITS | self._free.pop(0)
            homes[name] = home
        self.homes, before = homes, self.homes
        return {name: home for name, home in before.items() if name not in homes}

    def free(self, left: Mapping[str, int]) -> None:
        """Nobody writes to the cells of engines that have left any more."""
        self._free.extend(slot(home) for home in left.values())


def slot(home: int) -> int:
    """The place on the board."""
    return home & _SLOT


class LoadBoard:
    """The board as one process uses it.

    Args:
        state: the shared memory.
        process: our row: the index of a worker, or after them all the hub's.
    """

    def __init__(self, state: SharedState, process: int) -> None:
        layout = state.layout
        self._words = state.words
        self._data = state.data
        self._rows = [layout.board + row * layout.row_words for row in range(layout.rows)]
        self._own = self._rows[process]
        self._figures = layout.engine_figures
        self.homes: Mapping[str, int] = {}
        self._cells: dict[str, int] = {}
        """First word of each engine's cell in our row."""
        self._used = 0
        """Words of a row up to the last slot in use."""
        self._seen: dict[int, bytes] = {}
        """The others' rows when we last looked."""

    def set_engines(self, homes: Mapping[str, int]) -> None:
        """Take over the full set; what is added for an engine that left goes nowhere."""
        self.homes = homes
        self._cells = {name: self._own + slot(home) * FIELDS for name, home in homes.items()}
        self._used = (1 + max((slot(home) for home in homes.values()), default=-1)) * FIELDS
        self._seen.clear()

    def add(self, engine: str, requests: int, tokens: int, resident: int) -> None:
        """Ours on `engine` changes by this much."""
        cell = self._cells.get(engine)
        if cell is not None:
            words = self._words
            words[cell] += requests
            words[cell + _TOKENS] += tokens
            words[cell + _RESIDENT] += resident

    def add_session(self, engine: str, sessions: int, tokens: int) -> None:
        """Sessions that live on `engine` change by this much."""
        cell = self._cells.get(engine)
        if cell is not None:
            self._words[cell + _SESSIONS] += sessions
            self._words[cell + _SESSION_TOKENS] += tokens

    def total(self, engine: str) -> Load:
        """What all processes together have on `engine`."""
        home = self.homes.get(engine)
        if home is None:
            return Load()
        at = slot(home) * FIELDS
        words = self._words
        cells = [words[row + at : row + at + FIELDS].tolist() for row in self._rows]
        return Load(*map(sum, zip(*cells, strict=True)))

    def changed(self) -> bool:
        """Whether another process has changed its row since this was last asked."""
        changed = False
        size = self._used * WORD
        for row in self._rows:
            if row != self._own:
                start = row * WORD
                now = self._data[start : start + size]
                if self._seen.get(row) != now:
                    self._seen[row] = now
                    changed = True
        return changed

    def set_figures(self, engine: str, kv_usage: float, kv_capacity: int) -> None:
        """What the engine says of itself, for all: share of its KV cache in use, and the tokens that it holds."""
        home = self.homes.get(engine)
        if home is not None:
            at = self._figures + slot(home) * ENGINE_FIELDS
            self._words[at] = 1 + int(kv_usage * _MICRO)  # 0: nobody has said anything yet
            self._words[at + 1] = kv_capacity

    def figures(self, engine: str) -> tuple[float, int]:
        """Share of the KV cache in use, -1.0 for not known; and the tokens that it holds, 0 for not known."""
        home = self.homes.get(engine)
        at = self._figures + slot(home or 0) * ENGINE_FIELDS
        if home is None or self._words[at] == 0:
            return -1.0, 0
        return (self._words[at] - 1) / _MICRO, self._words[at + 1]

    def bury(self, process: int) -> None:
        """Another process has ended: its requests are gone, the sessions that it counted are ours to count now."""
        row = self._rows[process]
        for cell in self._cells.values():
            at = cell - self._own
            for field in (_SESSIONS, _SESSION_TOKENS):
                self._words[cell + field] += self._words[row + at + field]
        for at in range(len(self._rows) and (self._rows[1] - self._rows[0])):
            self._words[row + at] = 0

    def clear(self, left: Iterable[int]) -> None:
        """Empty the cells of engines that have left, once nobody writes to them any more."""
        for home in left:
            for row in self._rows:
                start = row + slot(home) * FIELDS
                for word in range(start, start + FIELDS):
                    self._words[word] = 0
            start = self._figures + slot(home) * ENGINE_FIELDS
            for word in range(start, start + ENGINE_FIELDS):
                self._words[word] = 0
