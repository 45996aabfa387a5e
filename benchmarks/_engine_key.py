"""The key of the engines that a benchmark's fleet has launched, for its own clients and its child processes."""

from __future__ import annotations

import os
from typing import Protocol

_ENV = "PENSTOCK_BENCHMARK_KEY"


class Keyed(Protocol):
    """A fleet."""

    def key_of(self, engine: str) -> str | None: ...


def share(fleet: Keyed) -> None:
    """Let this process, and those that it starts from now on, speak to the engines of this fleet."""
    os.environ[_ENV] = fleet.key_of("e0") or ""


def key() -> str | None:
    """Of the fleet that was shared; None: of none, or its engines ask for nothing."""
    return os.environ.get(_ENV) or None


def bearer() -> dict[str, str]:
    """The same as header fields."""
    return {"Authorization": f"Bearer {key()}"} if key() else {}
