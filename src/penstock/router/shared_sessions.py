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

from penstock.router.sessions import SessionRecord
from penstock.router.shared_loads import SharedLoads
from penstock.router.shared_state import BUCKET, KEY, WAYS, SharedState

_EMPTY = bytes(KEY)
_TICKS = 1_000_000
"""Of a second: times are kept as whole microseconds."""
_SCAN = 1 << 14
"""Places that one call of `expire` looks at, in about a millisecond."""


class SharedSessions:
    """The table as one process uses it; a `penstock.router.sessions.SessionTable`.

    Times are `time.monotonic()`, which all processes of a machine share. The tokens of a session that counts no more
    are kept inverted, so that one word says both.

    Args:
        state: the shared memory.
        loads: of this process; counts the sessions of each engine and their tokens.
    """

    def __init__(self, state: SharedState, loads: SharedLoads) -> None:
        layout = state.layout
        self._fd = state.fd
        self._data = state.data
        self._words = state.words
        self._loads = loads
        self._ways = layout.ways
        self._buckets = layout.buckets
        self._keys = layout.keys
        self._homes = layout.homes
        self._tokens = layout.homes + layout.ways
        self._used = layout.homes + 2 * layout.ways
        self._numbers: Mapping[str, int] = {}
        self._names: Mapping[int, str] = {}
        self._asked: tuple[str | None, tuple[bytes, int]] = None, (_EMPTY, 0)
        """The last session id with its key and bucket."""
        self._scan = 0
        """Where the next call of `expire` goes on."""

    def set_engines(self, homes: Mapping[str, int]) -> None:
        """Take over the numbers of the engines, see `EngineSlots`; sessions of an engine that left have no home."""
        self._numbers = homes
        self._names = {number: name for name, number in homes.items()}

    def get(self, session_id: str) -> SessionRecord | None:
        """See `SessionTable`."""
        key, bucket = self._key(session_id)
        place = self._find(key, bucket)
        if place < 0:
            return None
        words = self._words
        home, tokens, used = words[self._homes + place], words[self._tokens + place], words[self._used + place]
        at = self._keys + place * KEY
        if self._data[at : at + KEY] != key:  # another session has got the place in between
            return None
        name = self._names.get(home)
        return SessionRecord(name, 0 if name is None else max(tokens, ~tokens), used / _TICKS)

    def settle(self, session_id: str, engine: str, tokens: int, now: float, *, seen: str | None) -> str:
        """See `SessionTable`."""
        key, bucket = self._key(session_id)
        words = self._words
        if self._stays(key, bucket, engine, tokens, now):
            return engine
        lockf(self._fd, LOCK_EX, 1, bucket)
        try:
            place = self._find(key, bucket)
            if place >= 0:
                home = self._names.get(words[self._homes + place])
                if home is not None and home not in (seen, engine):
                    return home
                self._discount(place)
            else:
                place = self._room(bucket)
            words[self._homes + place] = self._numbers[engine]
            words[self._tokens + place] = tokens
            words[self._used + place] = int(now * _TICKS)
            self._loads.add_session(engine, 1, tokens)
            at = self._keys + place * KEY
            self._data[at : at + KEY] = key  # last: whoever finds it finds the words too
        finally:
            lockf(self._fd, LOCK_UN, 1, bucket)
        return engine

    def _stays(self, key: bytes, bucket: int, engine: str, tokens: int, now: float) -> bool:
        """Whether nothing changes but its last use, which is noted then, and needs no lock."""
        place = self._find(key, bucket)
        words = self._words
        if place < 0 or words[self._homes + place] != self._numbers[engine] or words[self._tokens + place] != tokens:
            return False
        words[self._used + place] = int(now * _TICKS)
        at = self._keys + place * KEY
        return self._data[at : at + KEY] == key  # else another session has got the place in between

    def touch(self, session_id: str, now: float) -> None:
        """See `SessionTable`."""
        place = self._find(*self._key(session_id))
        if place >= 0:
            # Without the lock: should the place have passed to another session, that one lives a little longer.
            self._words[self._used + place] = int(now * _TICKS)

    def drop(self, session_id: str) -> bool:
        """See `SessionTable`."""
        key, bucket = self._key(session_id)
        lockf(self._fd, LOCK_EX, 1, bucket)
        try:
            place = self._find(key, bucket)
            if place >= 0:
                self._clear(place)
        finally:
            lockf(self._fd, LOCK_UN, 1, bucket)
        return place >= 0

    def forget_engine(self, engine: str) -> None:
        """See `SessionTable`: `set_engines` has done it, for all its sessions at once."""

    def expire(self, *, idle_before: float, gone_before: float) -> int:
        """See `SessionTable`. One call looks at a part of the table; the next goes on from there."""
        idle, gone = int(idle_before * _TICKS), int(gone_before * _TICKS)
        start = self._scan
        stop = min(start + _SCAN, self._ways)
        self._scan = stop % self._ways
        ceased = 0
        words = self._words
        for place, used in enumerate(words[self._used + start : self._used + stop].tolist(), start):
            if used and used < idle and (words[self._tokens + place] >= 0 or used < gone):
                ceased += self._expire(place, idle, gone)
        return ceased

    def counts(self, engine: str) -> tuple[int, int]:
        """See `SessionTable`."""
        return self._loads.sessions(engine)

    def seen_tokens(self, engine: str) -> int:
        """See `SessionTable`."""
        return self._loads.seen_session_tokens(engine)

    def __len__(self) -> int:
        """Sessions that have a home."""
        return sum(self._loads.sessions(engine)[0] for engine in self._numbers)

    def _expire(self, place: int, idle: int, gone: int) -> bool:
        lockf(self._fd, LOCK_EX, 1, place // WAYS)
        try:
            used, tokens = self._words[self._used + place], self._words[self._tokens + place]
            if used == 0 or used >= idle:  # it has been used, or has gone, in between
                return False
            if used < gone:
                self._clear(place)
            elif tokens >= 0:
                self._words[self._tokens + place] = ~tokens
                name = self._names.get(self._words[self._homes + place])
                if name is not None:
                    self._loads.add_session(name, 0, -tokens)
        finally:
            lockf(self._fd, LOCK_UN, 1, place // WAYS)
        return tokens >= 0

    def _key(self, session_id: str) -> tuple[bytes, int]:
        """What stands for it, and its bucket."""
        if session_id != self._asked[0]:  # a turn asks for it two times in a row
            key = blake2b(session_id.encode(), digest_size=KEY - 1).digest()
            # The last byte is not zero, so that empty places are found by looking for zeros.
            self._asked = session_id, (key + b"\1", int.from_bytes(key[:8], "little") % self._buckets)
        return self._asked[1]

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

    def _clear(self, place: int) -> None:
        at = self._keys + place * KEY
        self._data[at : at + KEY] = _EMPTY  # first: nobody may find it half gone
        self._discount(place)
        self._words[self._used + place] = 0

    def _discount(self, place: int) -> None:
        name = self._names.get(self._words[self._homes + place])
        if name is not None:
            self._loads.add_session(name, -1, -max(0, self._words[self._tokens + place]))
