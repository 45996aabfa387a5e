"""The state of one engine of a fleet: the one table of states, and the one place that changes a state.

It does no I/O, so tests need no process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from penstock.errors import StateError

logger = logging.getLogger(__name__)


class State(StrEnum):
    """The state of an engine. The router sends to SERVING, PAUSED and DRAINING engines alone."""

    LAUNCHING = "launching"
    """Its process is starting, or its address has not answered yet."""
    SYNCING = "syncing"
    """It answers, and the fleet is bringing it to the fleet's weights."""
    SERVING = "serving"
    """It takes requests."""
    PAUSED = "paused"
    """It holds its requests and makes no token."""
    DRAINING = "draining"
    """It is about to stop and finishes its requests. It still takes part in pauses and updates."""
    STOPPED = "stopped"
    """It left on purpose. Final."""
    DEAD = "dead"
    """It failed. It serves again only through LAUNCHING and SYNCING."""


class Substate(StrEnum):
    """Distinctions among engines of one state."""

    AWAITING_WEIGHTS = "awaiting weights"
    """SYNCING: no process has the fleet's weights any more, so it waits for the next update."""
    RESTARTING = "restarting"
    """DEAD: the supervisor starts it again."""
    FINAL = "final"
    """DEAD: it does not come back."""
    SESSIONS = "sessions"
    """DRAINING: it gets later turns of its sessions, and no new session."""
    ALL = "all"
    """DRAINING: it gets no request at all."""


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
"""Every allowed change. Only SYNCING (weights confirmed) and PAUSED lead to SERVING."""

SUBSTATES: Mapping[State, tuple[Substate | None, ...]] = MappingProxyType(
    {
        State.SYNCING: (None, Substate.AWAITING_WEIGHTS),
        State.DRAINING: (Substate.ALL, Substate.SESSIONS),
        State.DEAD: (Substate.RESTARTING, Substate.FINAL),
    }
)
"""Substates of a state, the default first; for DEAD, `Lifecycle.restarts` decides. Other states have none."""

SERVABLE = frozenset({State.SERVING, State.PAUSED, State.DRAINING})
"""States in which the engine has confirmed its weights and the router knows it."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change of state."""

    old: State
    new: State
    reason: str


class Lifecycle:
    """The state of one engine, and the history behind it."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.history: list[Change] = []
        """Every change so far, oldest first."""
        self.may_restart: Callable[[], bool] = lambda: False
        """Asked at each death: whether the supervisor restarts the engine."""
        self.restarts = False
        """Whether a restart is under way, or follows the last death."""
        self.state = State.LAUNCHING
        """The present state. Read only: `to` changes it."""
        self.reason = ""
        """Reason of the last change; empty before the first one. Read only."""
        self._substate: Substate | None = None

    @property
    def deaths(self) -> list[str]:
        """Reasons of its deaths so far."""
        return [change.reason for change in self.history if change.new is State.DEAD]

    @property
    def substate(self) -> Substate | None:
        if self.state is State.DEAD:
            return Substate.RESTARTING if self.restarts else Substate.FINAL
        return self._substate

    def to(self, new: State, reason: str, substate: Substate | None = None) -> None:
        """Change the state, and log why.

        Raises:
            StateError: the table has no such change, or the state no such substate; both stay as they were.
        """
        old = self.state
        if new not in TRANSITIONS[old]:
            allowed = ", ".join(sorted(TRANSITIONS[old])) or "nothing, it is final"
            raise StateError(
                f"engine {self.engine} cannot go from {old} to {new} ({reason}); from {old} leads: {allowed}"
            )
        self._substate = self._checked(new, substate)
        self.state, self.reason = new, reason
        if new is State.DEAD:  # it must count as restarting from the moment of its death, or requests would give up
            self.restarts = self.may_restart()
        self.history.append(Change(old, new, reason))
        level = logging.WARNING if new is State.DEAD else logging.INFO
        logger.log(level, "engine %s: %s -> %s: %s", self.engine, old, new, reason)

    def stay(self, substate: Substate | None, reason: str = "") -> None:
        """Change the substate; a new reason replaces that of the state.

        Raises:
            StateError: the state has no such substate.
        """
        self._substate = self._checked(self.state, substate)
        if reason and reason != self.reason:
            self.reason = reason
            logger.warning("engine %s stays %s: %s", self.engine, self.state, reason)

    def _checked(self, state: State, substate: Substate | None) -> Substate | None:
        known = SUBSTATES.get(state, (None,))
        if substate is not None and substate not in known:
            raise StateError(f"engine {self.engine}: {state} has no substate {substate}; known: {known}")
        return substate or known[0]
