"""The life of an engine as the fleet sees it: one transition table, and the one place that changes a state.

Pure: no I/O, the clock is injected, so the whole table is tested without a process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Self

from penstock.errors import StateError

logger = logging.getLogger(__name__)

Clock = Callable[[], float]
"""Monotonic seconds."""


class State(StrEnum):
    """Where an engine stands. Only SERVING, PAUSED and DRAINING engines are known to the router."""

    LAUNCHING = "launching"
    """Its process is starting, or its address has not answered yet."""
    SYNCING = "syncing"
    """It answers, and its weights are being confirmed to be of the fleet's version."""
    SERVING = "serving"
    """It takes requests."""
    PAUSED = "paused"
    """It holds its requests and makes no token."""
    DRAINING = "draining"
    """It gets no new request, ends those it has, and is about to stop. It still takes part in pauses and updates."""
    STOPPED = "stopped"
    """It left on purpose. Final."""
    DEAD = "dead"
    """It failed; it serves again only by way of LAUNCHING and SYNCING, or it is taken out of the fleet."""


TRANSITIONS: Mapping[State, frozenset[State]] = MappingProxyType(
    {
        State.LAUNCHING: frozenset({State.SYNCING, State.DEAD}),
        State.SYNCING: frozenset({State.SERVING, State.DEAD}),
        State.SERVING: frozenset({State.PAUSED, State.DRAINING, State.DEAD}),
        State.PAUSED: frozenset({State.SERVING, State.DRAINING, State.DEAD}),
        State.DRAINING: frozenset({State.STOPPED, State.DEAD}),
        State.STOPPED: frozenset(),
        State.DEAD: frozenset({State.LAUNCHING, State.STOPPED}),
    }
)
"""Every edge there is. Into SERVING lead only SYNCING (weights confirmed) and PAUSED."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change of state; `at` in seconds of the injected clock."""

    at: float
    old: State
    new: State
    reason: str


class Lifecycle:
    """The state of one engine and how it came to it."""

    def __init__(self, engine: str, *, clock: Clock = time.monotonic) -> None:
        self.engine = engine
        self.history: list[Change] = []
        """Every change so far, oldest first."""
        self._state = State.LAUNCHING
        self._reason = ""
        self._clock = clock

    @classmethod
    def told(cls, engine: str, state: State, reason: str) -> Self:
        """That of an engine of which another process says where it stands; it holds the table there."""
        life = cls(engine)
        life._state = state
        life.history.append(Change(life._clock(), state, state, reason))
        life._reason = reason
        return life

    @property
    def state(self) -> State:
        """Where the engine stands now."""
        return self._state

    @property
    def reason(self) -> str:
        """Why it stands there; empty before the first change."""
        return self._reason

    def explain(self, reason: str) -> None:
        """Say why the engine stays where it stands, in the place of why it came there."""
        if reason == self._reason:
            return
        self._reason = reason
        logger.warning("engine %s stays %s: %s", self.engine, self._state, reason)

    def to(self, new: State, reason: str) -> None:
        """Change the state, and log why.

        Raises:
            StateError: the table has no such edge; nothing was changed.
        """
        old = self._state
        if new not in TRANSITIONS[old]:
            allowed = ", ".join(sorted(TRANSITIONS[old])) or "nothing, it is final"
            raise StateError(
                f"engine {self.engine} cannot go from {old} to {new} ({reason}); from {old} leads: {allowed}"
            )
        self._state, self._reason = new, reason
        self.history.append(Change(self._clock(), old, new, reason))
        level = logging.WARNING if new is State.DEAD else logging.INFO
        logger.log(level, "engine %s: %s -> %s: %s", self.engine, old, new, reason)
