"""What is in flight on each engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol


class Load(NamedTuple):
    """What is in flight on one engine, from all who share the board."""

    requests: int = 0
    """Sent and not answered in full."""
    tokens: int = 0
    """Prompts of those requests and what they may add."""
    resident: int = 0
    """Of `tokens`, what no session's context has yet: all of a request without a session, else what it may add."""


class LoadBoard(Protocol):
    """Where load is added up, in this process or over several."""

    def add(self, engine: str, requests: int, tokens: int, resident: int) -> None:
        """Change the figures of one engine by so much; what was added is taken back in the end."""
        ...

    def totals(self, engine: str) -> tuple[int, int, int]:
        """The `Load` of one engine; zeros for one never heard of."""
        ...

    def seen(self, engine: str) -> tuple[int, int, int]:
        """The same for a view that is kept: of other processes what `changed` has told, however it is now."""
        ...

    def changed(self) -> Iterable[str]:
        """Engines of which figures or sessions were changed by another process since this was asked last."""
        ...


class LocalLoads:
    """The board of one process."""

    def __init__(self) -> None:
        self._loads: dict[str, tuple[int, int, int]] = {}

    def add(self, engine: str, requests: int, tokens: int, resident: int) -> None:
        """See `LoadBoard`."""
        r, t, c = self._loads.get(engine, _NOTHING)
        if r + requests:
            self._loads[engine] = (r + requests, t + tokens, c + resident)
        else:  # nothing in flight: engines that left leave nothing behind
            self._loads.pop(engine, None)

    def totals(self, engine: str) -> tuple[int, int, int]:
        """See `LoadBoard`."""
        return self._loads.get(engine, _NOTHING)

    def seen(self, engine: str) -> tuple[int, int, int]:
        """See `LoadBoard`: as it is."""
        return self._loads.get(engine, _NOTHING)

    def changed(self) -> Iterable[str]:
        """See `LoadBoard`: there is no other process."""
        return ()


_NOTHING = Load()
