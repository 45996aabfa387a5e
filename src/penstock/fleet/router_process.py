"""The router of a fleet as a child process."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from penstock.aio import cancelled, settled
from penstock.errors import DeadlineError, PenstockError
from penstock.fleet.roster import ROUTER_BACK_S, Occupation, Roster
from penstock.process import RestartBudget, keep_running
from penstock.rooms import plugged_in
from penstock.router.state import Admin, RouterAdmin
from penstock.router_settings import ADMIN_KEY_ENV, KEY_ENV, RouterConfig, refuse_open_host
from penstock.settings import FleetConfig
from penstock.start_report import ReportingProcess

logger = logging.getLogger(__name__)

START_S = 30.0
"""Deadline of the router's start, which takes a fraction of a second on an idle machine."""


class RouterProcess(ReportingProcess):
    """A running router."""

    @classmethod
    async def launch(
        cls, config: RouterConfig, *, log_dir: Path, api_key: str | None, admin_key: str | None = None
    ) -> Self:
        """Start a router and return when it listens; ConfigError: wrong options.

        Raises as `serving`. Clients must send `api_key` (None: no key), admin calls `admin_key` (None: `api_key`).
        """
        options = config.model_dump_json(exclude={"kind", "url"})
        return await cls.serving(
            lambda fd: [sys.executable, "-m", "penstock.router", options, "--ready-fd", str(fd)],
            name="router",
            log=log_dir / "router.log",
            env={KEY_ENV: api_key or "", ADMIN_KEY_ENV: admin_key or ""},
            start_s=START_S,
        )


BACKOFF_S = 0.1
"""Seconds before the first restart: short, since no request is served without a router."""
STEADY_S = 60.0
"""Seconds of running after which the wait before a restart is short again."""


class RouterGuard:
    """Holds a router's process, and restarts it when it ends.

    `relaunch` starts another router on the same address.
    """

    def __init__(self, router: RouterProcess, relaunch: Callable[[], Awaitable[RouterProcess]]) -> None:
        self._router = router
        self._relaunch = relaunch
        self._watch: asyncio.Task[None] | None = None

    def watch(self, roster: Roster, fleet: FleetConfig) -> None:
        """Watch the router; a new one gets gate and engines. `max_restarts` has no effect."""
        roster.router_returns = True
        self._watch = asyncio.create_task(self._guard(roster, fleet), name="guard-router")

    async def stop(self) -> None:
        """End the router; raise the error that broke the watch, if one did."""
        try:
            if self._watch is not None:
                await cancelled(self._watch)
        finally:
            await self._router.stop()

    async def _guard(self, roster: Roster, fleet: FleetConfig) -> None:
        async def until_ended() -> None:
            hung = asyncio.create_task(self._until_hung(roster, fleet), name="health-router")
            try:
                status = await self._router.wait()
            finally:
                await cancelled(hung)
            logger.warning("the router ended with status %d", status)

        budget = RestartBudget(None, STEADY_S, BACKOFF_S)
        await keep_running(until_ended, lambda: self._restart(roster), budget, asyncio.sleep)

    async def _until_hung(self, roster: Roster, fleet: FleetConfig) -> None:
        while True:
            await asyncio.sleep(fleet.health_interval_s)
            # Seconds in which this event loop is blocked do not count as the router's silence.
            answer = await settled(_answered(roster), Occupation().without(fleet.hang_timeout_s))
            if answer.cancelled():
                break
            answer.result()
        logger.warning("the router has not answered for %g s: it is ended", fleet.hang_timeout_s)
        self._router.kill()  # a stopped process takes no other signal

    async def _restart(self, roster: Roster) -> bool:
        try:
            self._router = await self._relaunch()
        except PenstockError as error:
            logger.warning("the router did not start: %s", error)
            return False
        try:
            await roster.restore()
        except PenstockError as error:
            logger.warning("the new router did not take the fleet's engines: %s", error)
            await self._router.stop()
            return False
        logger.info("the router is back")
        return True


async def _answered(roster: Roster) -> None:
    """Return when the router answers, also with an error; its process reports its end."""
    while True:
        try:
            await keep_in_step(roster)
        except DeadlineError:  # the call's own deadline, not that of hanging
            continue
        except PenstockError:
            pass
        return


async def keep_in_step(roster: Roster) -> None:
    """Ask the router for its epoch, and restore the fleet's set if it differs.

    Raises as `RouterClient`. If restoring fails, `router_uncertain` stays set.
    """
    quiet, epoch = not roster.calling.locked(), roster.epoch
    as_sent = set(await roster.admin.epochs()) == {epoch}
    if (roster.router_uncertain or not as_sent) and quiet and epoch == roster.epoch:
        try:
            await roster.restore()
        except PenstockError as error:
            logger.debug("the router does not take its gate and engines: %s", error)
        else:
            logger.info("the router was sent its gate and engines again: it had others")


async def router_back(roster: Roster) -> bool:
    """Wait until an unreachable router answers; False: it does not restart in time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(ROUTER_BACK_S):
            while roster.router_returns:
                seen = roster.changes
                with suppress(PenstockError):
                    await roster.admin.epochs()
                    return True
                await roster.until(lambda since=seen: roster.changes != since)
    return False


def check_router(config: RouterConfig, api_key: str | None) -> None:
    """Raise ConfigError for options that are known to be wrong before a start."""
    if config.url is None and config.kind == "penstock":
        refuse_open_host(config.host, api_key)
    else:
        plugged_in("router.running.check")(config)


@dataclass(frozen=True, slots=True)
class OpenRouter:
    """The router of a fleet."""

    url: str
    admin: Admin
    guard: Any = None
    """The watch of its process (`RouterGuard`) or of its membership (`running_router.Guard`)."""
    key: str | None = field(default=None, repr=False)
    """Key of its admin calls; `None` if they need no key."""
    ours: bool = True
    """Whether it is Penstock's; a vllm-router has URLs as workers and no gate."""


async def open_router(
    config: RouterConfig, *, log_dir: Path, api_key: str | None, owned: AsyncExitStack, admin_key: str | None = None
) -> OpenRouter:
    """Start a router that ends with `owned`, or return the one at `config.url`.

    A started router takes `api_key` from clients and `admin_key` from its fleet.

    Raises:
        EngineStartError: it did not start.
        EngineDeadError: no program answers at `config.url`; `UserError` or `EngineHTTPError`: it is another program.
    """
    if config.url is not None:
        return await plugged_in("router.running")(config, api_key, owned)
    key = admin_key or api_key
    start = partial(RouterProcess.launch, log_dir=log_dir, api_key=api_key, admin_key=key)
    router = await start(config)
    admin = RouterAdmin(router.url, key)
    again = config.model_copy(update={"port": urlsplit(router.url).port})

    async def relaunch() -> RouterProcess:
        started = await start(again)
        admin.forget()  # another program may have the old ports by now
        return started

    guard = RouterGuard(router, relaunch)
    owned.push_async_callback(admin.close)
    owned.push_async_callback(guard.stop)  # ends before `admin`, whose connections it would open again
    return OpenRouter(router.url, admin, guard, key)
