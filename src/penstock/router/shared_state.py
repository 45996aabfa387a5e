"""The memory that the processes of one router share: where what lies in it.

An anonymous file (memfd) that the hub creates and every worker inherits. It has no name, so nothing is left behind
however they end. All of it is 64-bit words: a word is written and read whole, without a lock.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Self

WORD = 8
WAYS = 16
"""Sessions in one bucket of the table."""
KEY = 16
"""Bytes of a session's key."""
BUCKET = WAYS * KEY
FIELDS = 5
"""Figures of an engine in the row of one process, see `shared_loads`."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes, and from them the places. Offsets of words count words, those of keys count bytes.

    Args:
        workers: processes that serve; the hub has the row after theirs.
        engines: most engines at one time.
        sessions: least number of sessions that have a place.
    """

    workers: int
    engines: int = 1024
    sessions: int = 262_144

    @property
    def rows(self) -> int:
        """Processes with a row on the board: the workers and the hub."""
        return self.workers + 1

    @property
    def buckets(self) -> int:
        """Buckets of the session table."""
        return -(-self.sessions // WAYS)

    @property
    def row_words(self) -> int:
        """Words of one process's row on the board."""
        return self.engines * FIELDS

    @property
    def board(self) -> int:
        """First word of the board; the doorbells' flags lie before it."""
        return self.rows

    @property
    def homes(self) -> int:
        """First word of the sessions' homes; then come their tokens, then when they were last used."""
        return self.board + self.rows * self.row_words

    @property
    def ways(self) -> int:
        """Places for sessions."""
        return self.buckets * WAYS

    @property
    def keys(self) -> int:
        """First byte of the sessions' keys."""
        return (self.homes + 3 * self.ways) * WORD

    @property
    def size(self) -> int:
        """Bytes of the whole. Pages nobody wrote to take no memory."""
        return self.keys + self.buckets * BUCKET


class SharedState:
    """The memory, mapped. `words` and `data` are two views of the same bytes."""

    def __init__(self, fd: int, layout: Layout) -> None:
        self.fd = fd
        self.layout = layout
        self.data = mmap.mmap(fd, layout.size)
        self.words = memoryview(self.data).cast("q")

    @classmethod
    def create(cls, layout: Layout) -> Self:
        """New memory, all zeros."""
        fd = os.memfd_create("penstock-router")
        os.ftruncate(fd, layout.size)
        return cls(fd, layout)

    def close(self) -> None:
        """Give it back; the others keep theirs."""
        self.words.release()
        self.data.close()
        os.close(self.fd)
