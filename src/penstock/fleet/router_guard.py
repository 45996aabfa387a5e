"""The router of a fleet kept up: when its process ends or hangs, it is started anew on the same port."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from penstock.config import FleetConfig
from penstock.engine.concurrent import cancelled
from penstock.errors import DeadlineError, PenstockError
from penstock.fleet.roster import Roster
from penstock.fleet.router_process import RouterProcess

logger = logging.getLogger(__name__)

BACKOFF_S = 0.1
"""Before the first restart: nobody is served without a router, and it starts in a fraction of a second."""
MAX_BACKOFF_S = 120.0
"""The wait doubles up to this, without an end: what keeps a router from starting, such as a full disk, may pass."""
STEADY_S = 60.0
"""A router that has served for so long is well: should it end, the wait before its restart is short again."""
HUNG_CHECKS = 3


async def settle(roster: Roster, interval_s: float) -> None:
    """Say again to a router that someone else keeps up what it may not have taken. Runs until it is cancelled."""
    while True:
        await roster.until(lambda: roster.in_doubt)
        sure = False
        while not sure or roster.in_doubt:  # once more after the doubt: what failed may have come into force late
            await asyncio.sleep(interval_s)
            sure = not roster.in_doubt
            try:
                await roster.check_router()
            except PenstockError:  # it is asked again
                sure = False


class RouterGuard:
    """Holds a router's process, and starts the next one when it ends.

    Args:
        router: it runs.
        relaunch: starts another one on the same address, with the policy that the old one said last it had.
    """

    def __init__(
        self, router: RouterProcess, relaunch: Callable[[Mapping[str, Any]], Awaitable[RouterProcess]]
    ) -> None:
        self._router = router
        self._policy: Mapping[str, Any] = {}
        self._relaunch = relaunch
        self._watch: asyncio.Task[None] | None = None
        self._restarts = 0
        """Since a router was steady."""

    def watch(self, roster: Roster, fleet: FleetConfig) -> None:
        """From now on a new router gets the roster's gate and engines before anyone waits for it in vain."""
        roster.router_returns = True
        self._watch = asyncio.create_task(self._guard(roster, fleet), name="guard-router")

    async def stop(self) -> None:
        """End the router. Raises what broke the watch, if something did."""
        try:
            if self._watch is not None:
                await cancelled(self._watch)
        finally:
            await self._router.stop()

    async def _guard(self, roster: Roster, fleet: FleetConfig) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            hung = asyncio.create_task(self._until_hung(roster, fleet), name="health-router")
            try:
                status = await self._router.wait()
            finally:
                await cancelled(hung)
            logger.warning("the router ended with status %d", status)
            if clock() - began >= STEADY_S:
                self._restarts = 0
            await self._start_anew(roster)

    async def _until_hung(self, roster: Roster, fleet: FleetConfig) -> None:
        clock = asyncio.get_running_loop().time
        answered, missed, late = clock(), 0, False
        # By number, since a sleep of ours is no silence of the router's, and by time, since a call has a deadline too.
        while missed < HUNG_CHECKS or clock() - answered < fleet.hang_timeout_s:
            if not late:
                await asyncio.sleep(fleet.health_interval_s)
            late = False
            try:
                self._policy = (await roster.check_router(fleet.hang_timeout_s / HUNG_CHECKS)).policy
                answered, missed = clock(), 0
            except (DeadlineError, TimeoutError):
                missed, late = missed + 1, True
            except PenstockError:
                # Refused or broken: if it is gone, its process says so; it may also be busy with its end.
                answered, missed = clock(), 0
        logger.warning("the router has not answered for %g s: it is ended", fleet.hang_timeout_s)
        self._router.kill()  # a stopped process would take no other signal

    async def _start_anew(self, roster: Roster) -> None:
        while True:
            wait_s = min(BACKOFF_S * 2.0 ** min(self._restarts, 20), MAX_BACKOFF_S)  # bounded, or it overflows a float
            self._restarts += 1
            await asyncio.sleep(wait_s)
            try:
                self._router = await self._relaunch(self._policy)
                break
            except PenstockError as error:
                logger.warning("the router did not start, after a wait of %g s: %s", wait_s, error)
        try:
            await roster.restore()
        except PenstockError as error:
            logger.warning("the new router did not take the fleet's engines: %s", error)
            await self._router.stop()
        else:
            logger.info("the router is back")
