"""Where each session lives, as all processes of one router see it: a set-associative table in shared memory.

A session's key is the blake2b hash of its id; it names the one bucket of `WAYS` places that the session may be in. A
look-up takes no lock: it reads one place's words and then sees that the key is still there. A place is given and
taken under a record lock on its bucket (`fcntl`), which the kernel releases if the process dies. So of two
processes that get the first turns of one session at the same time, the second finds what the first decided. Where a
bucket is full, its least recently used session is forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping
from fcntl import LOCK_EX, LOCK_UN, lockf
from hashlib import blake2b

from penstock.router.load_board import LoadBoard
from penstock.router.shared_state import BUCKET, KEY, WAYS, SharedState

_EMPTY = bytes(KEY)
_TICKS = 1_000_000
"""Of a second: times are kept as whole microseconds."""
_SCAN = 4096
"""Places looked at together when sessions expire."""


class SharedSessions:
    """The table as one process uses it. Times are `time.monotonic()`, which all processes of a machine share.

    Args:
        state: the shared memory.
        board: of this process; counts the sessions of each engine and their tokens.
        ttl_s: seconds after which an unused session is forgotten.
    """

    def __init__(self, state: SharedState, board: LoadBoard, *, ttl_s: float) -> None:
        layout = state.layout
        self._fd = state.fd
        self._data = state.data
        self._words = state.words
        self._board = board
        self._ttl = int(ttl_s * _TICKS)
        self._buckets = layout.buckets
        self._keys = layout.keys
        self._homes = layout.homes
        self._tokens = layout.homes + layout.ways
        self._used = layout.homes + 2 * layout.ways
        self._names: Mapping[int, str] = {}

    def set_engines(self, homes: Mapping[str, int]) -> None:
        """Take over the full set; sessions of an engine that left have no home from now on.

        Args:
            homes: see `EngineHomes`.
        """
        self._names = {home: name for name, home in homes.items()}

    def get(self, session_id: str, now: float) -> tuple[str, int] | None:
        """Name of the engine where it lives and its tokens there, or None."""
        key, bucket = self._key(session_id)
        place = self._find(key, bucket)
        if place < 0:
            return None
        words = self._words
        home, tokens, used = words[self._homes + place], words[self._tokens + place], words[self._used + place]
        at = self._keys + place * KEY
        if self._data[at : at + KEY] != key or used + self._ttl < now * _TICKS:
            return None
        name = self._names.get(home)
        return None if name is None else (name, tokens)

    def settle(self, session_id: str, engine: str, tokens: int, now: float, *, seen: str | None) -> str:
        """Note where it lives and how many of its tokens are there, unless another process was faster.

        Args:
            session_id: whose home it is.
            engine: where it shall live.
            tokens: of its context.
            now: the present.
            seen: where it lived when that was decided; None: nowhere.

        Returns:
            Where it lives: `engine`, or what another process decided since.
        """
        key, bucket = self._key(session_id)
        lockf(self._fd, LOCK_EX, 1, bucket)
        try:
            place = self._find(key, bucket)
            if place >= 0:
                home = self._home(place, now)
                if home is not None and home not in (seen, engine):
                    return home
                self._count(place, -1)
            else:
                place = self._room(bucket)
            words = self._words
            words[self._homes + place] = self._board.homes[engine]
            words[self._tokens + place] = tokens
            words[self._used + place] = int(now * _TICKS)
            self._count(place, 1)
            at = self._keys + place * KEY
            self._data[at : at + KEY] = key  # last: whoever finds it finds the words too
        finally:
            lockf(self._fd, LOCK_UN, 1, bucket)
        return engine

    def touch(self, session_id: str, now: float) -> None:
        """It is in use: its time begins anew."""
        place = self._find(*self._key(session_id))
        if place >= 0 and self._home(place, now) is not None:
            # Without the lock: should the place have passed to another session, that one lives a little longer.
            self._words[self._used + place] = int(now * _TICKS)

    def drop(self, session_id: str, now: float) -> bool:
        """Forget it; False where it has no home."""
        key, bucket = self._key(session_id)
        lockf(self._fd, LOCK_EX, 1, bucket)
        try:
            place = self._find(key, bucket)
            known = place >= 0 and self._home(place, now) is not None
            if place >= 0:
                self._clear(place)
        finally:
            lockf(self._fd, LOCK_UN, 1, bucket)
        return known

    def expire(self, now: float) -> int:
        """Forget all whose time is over or whose engine has left; returns how many. Takes milliseconds."""
        forgotten = 0
        for start in range(0, self._buckets * WAYS, _SCAN):
            stop = min(start + _SCAN, self._buckets * WAYS)
            for place, used in enumerate(self._words[self._used + start : self._used + stop].tolist(), start):
                if used and self._home(place, now) is None:
                    forgotten += self._expire(place, now)
        return forgotten

    def _expire(self, place: int, now: float) -> bool:
        lockf(self._fd, LOCK_EX, 1, place // WAYS)
        try:
            # Again: it may have been used, or have gone, in between.
            late = bool(self._words[self._used + place]) and self._home(place, now) is None
            if late:
                self._clear(place)
        finally:
            lockf(self._fd, LOCK_UN, 1, place // WAYS)
        return late

    def _key(self, session_id: str) -> tuple[bytes, int]:
        """What stands for it, and its bucket."""
        key = blake2b(session_id.encode(), digest_size=KEY - 1).digest()
        # The last byte is not zero, so that empty places are found by looking for zeros.
        return key + b"\1", int.from_bytes(key[:8], "little") % self._buckets

    def _find(self, key: bytes, bucket: int) -> int:
        """The place in its bucket that has this key, or a negative number."""
        start = self._keys + bucket * BUCKET
        at = self._data.find(key, start, start + BUCKET)
        return at if at < 0 else (at - self._keys) // KEY

    def _room(self, bucket: int) -> int:
        """A place for a new session: a free one, or that of the session that was not used for longest."""
        free = self._find(_EMPTY, bucket)
        if free >= 0:
            return free
        first = self._used + bucket * WAYS
        used = self._words[first : first + WAYS].tolist()
        place = bucket * WAYS + used.index(min(used))
        self._clear(place)
        return place

    def _home(self, place: int, now: float) -> str | None:
        if self._words[self._used + place] + self._ttl < now * _TICKS:
            return None
        return self._names.get(self._words[self._homes + place])

    def _clear(self, place: int) -> None:
        at = self._keys + place * KEY
        self._data[at : at + KEY] = _EMPTY  # first: nobody may find it half gone
        self._count(place, -1)
        self._words[self._used + place] = 0

    def _count(self, place: int, sign: int) -> None:
        name = self._names.get(self._words[self._homes + place])
        if name is not None:
            self._board.add_session(name, sign, sign * self._words[self._tokens + place])
