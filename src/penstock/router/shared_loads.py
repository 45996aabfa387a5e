"""What all processes of a router have on each engine: a board in shared memory.

Each process has a row on it and each engine a cell in every row. A cell is written by the process of its row alone,
so no lock is needed; the sum over the rows is what all of them together have on that engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from penstock.router.doorbell import Doorbell
from penstock.router.loads import Load
from penstock.router.shared_state import FIELDS, WORD, SharedState

_REQUESTS, _TOKENS, _RESIDENT, _SESSIONS, _SESSION_TOKENS = range(FIELDS)
_CELL = FIELDS * WORD
"""Bytes."""
_BLOCK = 16
"""Cells compared at once."""
_NOTHING = (0, 0, 0)
LOOK_S = 0.001
"""Between two looks at what the others have: at 5,000 requests a second each, a process would else bring its figures up
to date for every one of them. An answer takes far longer to come than to be known of."""


class SharedLoads:
    """The board as one process uses it; a `penstock.router.loads.LoadBoard`.

    Args:
        state: the shared memory.
        process: our row: the index of a worker, or after them all the hub's.
        bell: rung when load falls.
    """

    def __init__(self, state: SharedState, process: int, bell: Doorbell) -> None:
        layout = state.layout
        self._words = state.words
        self._data = state.data
        self._bell = bell
        self._rows = [layout.board + row * layout.row_words for row in range(layout.rows)]
        self._own = self._rows[process]
        self._others = [row for row in self._rows if row != self._own]
        self._cells: dict[str, int] = {}
        """First word of each engine's cell in our row."""
        self._offsets: dict[str, tuple[int, ...]] = {}
        """First words of each engine's cells, of all rows."""
        self._names: list[str | None] = []
        """Of the engine in each slot."""
        self._size = 0
        """Bytes of a row up to the last slot in use."""
        self._seen: dict[int, bytes] = {}
        """The others' rows when they were looked at last."""
        self._seen_words: list[memoryview] = []
        """The same, as words."""
        self._seen_cells: dict[str, tuple[int, int]] = {}
        """First words of each engine's cell in our row, and in any row from its beginning."""
        self._look_at = 0.0
        """When to look at them next."""
        self._touched: set[str] = set()
        """Engines whose sessions we have changed since then."""

    def set_engines(self, slots: Mapping[str, int], lost: Iterable[str]) -> None:
        """Take over which engine has which slot.

        Args:
            slots: of the engines of the set, and of those that left and still have requests.
            lost: engines among them whose sessions have no home any more.
        """
        self._cells = {name: self._own + slot * FIELDS for name, slot in slots.items()}
        self._seen_cells = {name: (self._own + slot * FIELDS, slot * FIELDS) for name, slot in slots.items()}
        self._offsets = {name: tuple(row + slot * FIELDS for row in self._rows) for name, slot in slots.items()}
        self._names = [None] * (max(slots.values(), default=-1) + 1)
        for name, slot in slots.items():
            self._names[slot] = name
        self._size = len(self._names) * _CELL
        self._seen.clear()
        self._seen_words = []
        self._look_at = 0.0
        for name in lost:
            cell = self._cells[name]
            self._words[cell + _SESSIONS] = self._words[cell + _SESSION_TOKENS] = 0

    def add(self, engine: str, requests: int, tokens: int, resident: int) -> None:
        """See `LoadBoard`."""
        cell = self._cells[engine]
        words = self._words
        words[cell] += requests
        words[cell + _TOKENS] += tokens
        words[cell + _RESIDENT] += resident
        if requests < 0:
            self._bell.ring()

    def totals(self, engine: str) -> Load:
        """See `LoadBoard`."""
        words = self._words
        requests = tokens = resident = 0
        for cell in self._offsets.get(engine, ()):
            requests += words[cell]
            tokens += words[cell + _TOKENS]
            resident += words[cell + _RESIDENT]
        return Load(requests, tokens, resident)

    def seen(self, engine: str) -> tuple[int, int, int]:
        """See `LoadBoard`.

        Of the others what `changed` compares with: a figure that rises and falls between two looks is no change to it,
        so whoever had read it live in between would keep it.
        """
        if (cells := self._seen_cells.get(engine)) is None:
            return _NOTHING
        own, first = cells
        words = self._words
        requests, tokens, resident = words[own], words[own + _TOKENS], words[own + _RESIDENT]
        for row in self._seen_words:
            requests += row[first]
            tokens += row[first + _TOKENS]
            resident += row[first + _RESIDENT]
        return requests, tokens, resident

    def seen_session_tokens(self, engine: str) -> int:
        """Tokens of the sessions of an engine that count, as `seen` has its load."""
        if (cells := self._seen_cells.get(engine)) is None:
            return 0
        own, first = cells
        return self._words[own + _SESSION_TOKENS] + sum([row[first + _SESSION_TOKENS] for row in self._seen_words])

    def changed(self) -> Iterable[str]:
        """See `LoadBoard`; what others do is known to us `LOOK_S` later."""
        now_s = time.monotonic()
        if now_s < self._look_at and not self._touched:
            return ()
        changed, self._touched = self._touched, set()
        if now_s < self._look_at:
            return changed
        self._look_at = now_s + LOOK_S
        size, data, seen = self._size, self._data, self._seen
        news = False
        for row in self._others:
            start = row * WORD
            now = data[start : start + size]
            before = seen.get(row)
            if now != before:
                news = True
                seen[row] = now
                self._differing(now, before or b"", changed)
        if news:
            self._seen_words = [memoryview(row).cast("q") for row in seen.values()]
        return changed

    def look(self) -> None:
        """Have the next `changed` look at what the others have, however soon it is."""
        self._look_at = 0.0

    def add_session(self, engine: str, sessions: int, tokens: int) -> None:
        """Sessions that live on an engine, and tokens of those that count, change by so much."""
        cell = self._cells[engine]
        self._words[cell + _SESSIONS] += sessions
        self._words[cell + _SESSION_TOKENS] += tokens
        self._touched.add(engine)
        if tokens < 0:
            self._bell.ring()

    def sessions(self, engine: str) -> tuple[int, int]:
        """Sessions that live on an engine, and tokens of those that count."""
        words = self._words
        sessions = tokens = 0
        for cell in self._offsets.get(engine, ()):
            sessions += words[cell + _SESSIONS]
            tokens += words[cell + _SESSION_TOKENS]
        return sessions, tokens

    def busy(self, slot: int) -> bool:
        """Whether any process has a request on the engine in that slot."""
        return any(self._words[row + slot * FIELDS + _REQUESTS] for row in self._rows)

    def clear(self, slots: Iterable[int]) -> None:
        """Empty the cells of slots in all rows, before anybody writes to them."""
        for row in self._rows:
            for slot in slots:
                for field in range(FIELDS):
                    self._words[row + slot * FIELDS + field] = 0

    def bury(self, process: int) -> None:
        """Another process has ended: its requests are gone; the sessions that it counted are ours to count now."""
        row = self._rows[process]
        words = self._words
        for own in self._cells.values():
            cell = own - self._own + row
            for field in (_SESSIONS, _SESSION_TOKENS):
                words[own + field] += words[cell + field]
            for field in range(FIELDS):
                words[cell + field] = 0
        self._bell.ring()

    def _differing(self, now: bytes, before: bytes, found: set[str]) -> None:
        for block in range(0, len(now), _BLOCK * _CELL):
            if now[block : block + _BLOCK * _CELL] == before[block : block + _BLOCK * _CELL]:
                continue
            for at in range(block, min(block + _BLOCK * _CELL, len(now)), _CELL):
                name = self._names[at // _CELL]
                if name is not None and now[at : at + _CELL] != before[at : at + _CELL]:
                    found.add(name)
