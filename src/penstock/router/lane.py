"""What a request may wait for."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What a request waits for."""

    TURN = "turn"
    """The gate for all, and after it has opened those that came before."""
    ADAPTER = "adapter"
    """The gate of its adapter."""
    ENGINE = "engine"
    """The gate of the engine where its session lives; with an empty key, of every engine that could serve it."""
    ROOM = "room"
    """Load must fall: the policy admits no new session now."""
    NOWHERE = "nowhere"
    """No engine is up that may serve it."""


class Lane(NamedTuple):
    """Requests that the same event lets go, in order of arrival."""

    kind: Kind
    key: str | tuple[int, str | None] = ""
    """Name of the adapter or engine; for ROOM the weight version and the adapter that are asked for."""


TURN = Lane(Kind.TURN)
NOWHERE = Lane(Kind.NOWHERE)
ANY_ENGINE = Lane(Kind.ENGINE)
"""Every engine that could serve the request has its gate closed."""
GATES = frozenset({Kind.TURN, Kind.ADAPTER, Kind.ENGINE})
"""Kinds of which no request gives up: a gate may stay closed as long as it likes."""
