"""LoRA adapters of a fleet: what a name stands for, and every engine with the same."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from penstock.engine.control import AdapterTakenError
from penstock.errors import UserError
from penstock.fleet.fan_out import FanOut, fan_out
from penstock.fleet.member import Member
from penstock.fleet.roster import Roster

logger = logging.getLogger(__name__)

MARGIN_S = 2.0
"""Longer than the engine's own deadline, so that its message arrives."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter's files as they were saved at one time."""

    path: str
    stamp: tuple[tuple[str, int, int, int], ...]
    """Name, size, time of change (ns) and inode of each file; empty where they are not to be seen from here."""

    @classmethod
    def at(cls, path: str) -> Self:
        """As it is saved now."""
        found: list[tuple[str, int, int, int]] = []
        with suppress(OSError):  # it is being written, or on another host
            for file in sorted(Path(path).iterdir()):
                known = file.stat()
                found.append((file.name, known.st_size, known.st_mtime_ns, known.st_ino))
        return cls(path, tuple(found))


class FleetAdapters:
    """Adapters that the engines of a roster were given, by name.

    A name stands for the files as they were saved when it was loaded first: engines keep those weights under it, and
    the KV that was computed with them.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._given: dict[str, Adapter] = {}
        self._loading = asyncio.Lock()

    async def load(self, name: str, path: str, timeout_s: float) -> None:
        """Load one on every engine; a core says nothing while it does, and is not dead of it.

        Raises:
            UserError: the name stands for another path, or for other files there; no engine was asked.
            EngineHTTPError: one refused it, or another error of the first that failed; the others have it.
        """
        async with self._loading:
            known, saved = self._given.get(name), Adapter.at(path)
            if known is not None and known != saved:
                was = "as it was before it was saved again" if known.path == path else f"of {known.path}"
                raise UserError(f"the engines have the adapter {name!r} {was}; give {path} another name")
            with self._roster.occupation.going_on():
                outcome = await _load(self._roster.live(), name, path, timeout_s)
            if outcome.results:
                self._given[name] = saved
            for error in outcome.failures.values():
                if known is None or not isinstance(error, AdapterTakenError):
                    raise error

    async def give(self, member: Member, timeout_s: float) -> None:
        """Load all of them on an engine that joins. One that it cannot load, it is without: a warning says so."""
        for name, adapter in self._given.items():
            if Adapter.at(adapter.path) != adapter:
                logger.warning("engine %s joins without adapter %s, which was saved again", member.name, name)
                continue
            for error in (await _load((member,), name, adapter.path, timeout_s)).failures.values():
                if not isinstance(error, AdapterTakenError):
                    logger.warning("engine %s joins without adapter %s: %s", member.name, name, error)


async def _load(members: tuple[Member, ...], name: str, path: str, timeout_s: float) -> FanOut[None]:
    return await fan_out(
        members, lambda engine: engine.load_adapter(name, path, timeout_s=timeout_s), deadline_s=timeout_s + MARGIN_S
    )
