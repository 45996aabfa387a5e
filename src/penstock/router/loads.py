"""What is in flight on each engine."""

from __future__ import annotations

from typing import NamedTuple


class Load(NamedTuple):
    """What is in flight on one engine."""

    requests: int = 0
    """Sent and not answered in full."""
    tokens: int = 0
    """Prompts of those requests and what they may add."""
    resident: int = 0
    """Of `tokens`, what no session's context has yet: all of a request without a session, else what it may add."""


class LoadTable:
    """The load of each engine, added up as requests come and go."""

    def __init__(self) -> None:
        self._loads: dict[str, tuple[int, int, int]] = {}

    def add(self, engine: str, requests: int, tokens: int, resident: int) -> None:
        """Change the figures of one engine by so much; what was added is taken back in the end."""
        r, t, c = self._loads.get(engine, _NOTHING)
        if r + requests:
            self._loads[engine] = (r + requests, t + tokens, c + resident)
        else:  # nothing in flight: engines that left leave nothing behind
            self._loads.pop(engine, None)

    def of(self, engine: str) -> tuple[int, int, int]:
        """The `Load` of one engine; zeros for one never heard of."""
        return self._loads.get(engine, _NOTHING)


_NOTHING = Load()
