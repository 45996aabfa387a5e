"""Where each session lives, and how much of its context is there."""

from __future__ import annotations

from collections import OrderedDict


class SessionRecord:
    """What is known of one session."""

    __slots__ = ("engine", "tokens", "used")

    def __init__(self, engine: str | None, tokens: int, used: float) -> None:
        self.engine = engine
        """Where it lives; None: that engine has left, and its context with it."""
        self.tokens = tokens
        """Of its context, as its last request said."""
        self.used = used
        """When a turn of it last began or ended, in seconds by the caller's clock."""


class SessionTable:
    """Sessions and their homes. Where it is full, the least recently used session is forgotten.

    A session that was not used for a while keeps its home but counts no more: see `expire`.

    Args:
        capacity: most sessions remembered; one that is forgotten is placed anew at its next turn.
    """

    def __init__(self, capacity: int = 262_144) -> None:
        self._capacity = capacity
        self._counted: OrderedDict[str, SessionRecord] = OrderedDict()
        self._idle: OrderedDict[str, SessionRecord] = OrderedDict()
        """Those that count no more. In both the least recently used comes first."""
        self._counts: dict[str, list[int]] = {}
        """Sessions and counted tokens of each engine."""

    def __len__(self) -> int:
        return len(self._counted) + len(self._idle)

    def get(self, session_id: str) -> SessionRecord | None:
        """What is known of it; None: nothing. Not to be changed by the caller."""
        return self._counted.get(session_id) or self._idle.get(session_id)

    def settle(self, session_id: str, engine: str, tokens: int, now: float) -> None:
        """Note that it lives on `engine` with a context of `tokens`; `now` in seconds."""
        record = self._counted.get(session_id)
        if record is not None and record.engine == engine:  # a later turn that stays
            self._counts[engine][1] += tokens - record.tokens
            record.tokens = tokens
            record.used = now
            self._counted.move_to_end(session_id)
            return
        self.drop(session_id)
        if len(self) >= self._capacity:
            self.drop(next(iter(self._idle or self._counted)))
        counts = self._counts.setdefault(engine, [0, 0])
        counts[0] += 1
        counts[1] += tokens
        self._counted[session_id] = SessionRecord(engine, tokens, now)

    def touch(self, session_id: str, now: float) -> None:
        """It is in use."""
        record = self._counted.get(session_id)
        if record is not None:
            record.used = now
            self._counted.move_to_end(session_id)

    def drop(self, session_id: str) -> bool:
        """Forget it; False: it was not known."""
        record = self._counted.pop(session_id, None)
        if record is not None:
            self._discount(record)
        else:
            record = self._idle.pop(session_id, None)
            if record is None:
                return False
        if record.engine is not None:
            self._counts[record.engine][0] -= 1
        return True

    def forget_engine(self, engine: str) -> None:
        """An engine has left: its sessions have no home, but are known. Takes time with the number of all sessions."""
        for sessions in (self._counted, self._idle):
            for record in sessions.values():
                if record.engine == engine:
                    record.engine, record.tokens = None, 0
        self._counts.pop(engine, None)

    def expire(self, *, idle_before: float, gone_before: float) -> int:
        """Time passes.

        Args:
            idle_before: sessions not used since count as resident no longer.
            gone_before: sessions not used since are forgotten.

        Returns:
            How many ceased to count.
        """
        ceased = 0
        while self._counted:
            session_id, record = next(iter(self._counted.items()))
            if record.used >= idle_before:
                break
            del self._counted[session_id]
            self._discount(record)
            self._idle[session_id] = record
            ceased += 1
        while self._idle:
            session_id, record = next(iter(self._idle.items()))
            if record.used >= gone_before:
                break
            self.drop(session_id)
        return ceased

    def counts(self, engine: str) -> tuple[int, int]:
        """Sessions that live there, and tokens of those that count."""
        counts = self._counts.get(engine)
        return (0, 0) if counts is None else (counts[0], counts[1])

    def _discount(self, record: SessionRecord) -> None:
        if record.engine is not None:
            self._counts[record.engine][1] -= record.tokens
