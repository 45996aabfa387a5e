"""Notices that an engine is gone: its process ends, it refuses, or it hangs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from penstock.errors import DeadlineError, PenstockError
from penstock.fleet.member import SERVABLE, EngineHandle, Member
from penstock.fleet.roster import Roster

logger = logging.getLogger(__name__)

HUNG_CHECKS = 3
"""So many health checks without an answer in time, one after another, mean that an engine hangs. One is not enough: a
busy single-process engine on CPU answers late now and then."""


class Supervisor:
    """Watches every member that it is given, until `stop`."""

    def __init__(self, roster: Roster, *, health_interval_s: float) -> None:
        self._roster = roster
        self._interval_s = health_interval_s
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, member: Member) -> None:
        """Begin to watch an engine: its process where it is ours, its health in any case."""
        if member.process is not None:
            self._start(self._until_exit(member, member.process), f"exit-{member.name}")
        self._start(self._until_unwell(member), f"health-{member.name}")

    async def stop(self) -> None:
        """Stop watching."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    def _start(self, watcher: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(watcher, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _until_exit(self, member: Member, process: EngineHandle) -> None:
        status = await process.wait()
        await self._died(member, f"its process exited with status {status}")

    async def _until_unwell(self, member: Member) -> None:
        missed = 0
        while member.state in SERVABLE:
            await asyncio.sleep(self._interval_s)
            try:
                await member.control.health()
                missed = 0
            except DeadlineError as error:
                missed += 1
                if missed == HUNG_CHECKS:
                    await self._died(member, f"{missed} health checks without an answer; the last: {error}")
            except PenstockError as error:
                await self._died(member, f"health check failed: {error}")

    async def _died(self, member: Member, reason: str) -> None:
        """The one place where a death is learned from outside a control call; a restart would begin here."""
        await self._roster.bury(member, reason)
