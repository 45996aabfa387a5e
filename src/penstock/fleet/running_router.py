"""Routers that others started: Penstock's own kind, or a vllm-router with the fleet's engines as workers."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, suppress
from typing import Any, Literal
from urllib.parse import urlencode

from penstock.aio import all_or_first_error, cancelled
from penstock.errors import ConfigError, PenstockError, UserError
from penstock.fleet.roster import Roster
from penstock.fleet.router_process import OpenRouter, keep_in_step
from penstock.http import HttpTransport
from penstock.router.membership import NO_MEMBERSHIP, Membership
from penstock.router.state import Admin, EngineLoad, RouterAdmin, RouterState
from penstock.router_settings import RouterConfig
from penstock.settings import FleetConfig

logger = logging.getLogger(__name__)

CALL_S = 15.0
"""Deadline of a worker call; vllm-router answers `/add_worker` after the worker's first good health check."""


class VllmRouterAdmin:
    """Client that announces full sets to a vllm-router as workers; see `router.state.RouterAdmin`.

    vllm-router has no gate, so new requests wait inside paused engines. It has no epochs, weight versions or draining.
    It holds no request, and answers 503 if no engine is up. It passes its callers' key on, so the engines of its fleet
    have that key and none of the fleet's own. It does so only on paths that generate, so engines with a key refuse
    `/tokenize`.

    Every method raises `EngineDeadError` if the router is gone, `DeadlineError` after `CALL_S` seconds, `UserError` if
    another program answers, and `EngineHTTPError` for a worker that the router refuses.
    """

    def __init__(self, url: str) -> None:
        self._http = HttpTransport(url, name=f"vllm-router at {url}")
        self._membership = NO_MEMBERSHIP

    async def announce(self, membership: Membership) -> None:
        """Make the eligible engines its workers, and remove all others.

        A draining engine is removed too, since vllm-router would send it new sessions; its requests in flight go on.
        This method refuses an older epoch (`StateError`), so that the fleet's newest message is in force. Engines that
        may not serve leave before others come. The gate and `cut` have no effect.
        """
        announced = self._membership.replaced_by(membership)
        wanted = {entry.url for entry in announced.engines if entry.eligible and not entry.draining}
        present = set((await self._workers()).keys())
        for url in sorted(present - wanted):
            await self._change("remove", url)
        await all_or_first_error(self._change("add", url) for url in sorted(wanted - present))
        self._membership = announced

    async def epochs(self) -> list[int]:
        await self._workers()
        return [self._membership.epoch]

    async def engines(self) -> RouterState:
        """Return the set in force, with each worker's health and load; other counts are 0."""
        workers = await self._workers()
        loads: list[EngineLoad] = []
        for entry in self._membership.engines:
            worker = workers.get(entry.url, {})
            loads.append(
                EngineLoad(
                    name=entry.name,
                    url=entry.url,
                    weight_version=entry.weight_version,
                    eligible=entry.url in workers,
                    down=not worker.get("is_healthy", False),
                    outstanding=worker.get("load", 0),
                    requests=0,
                )
            )
        epoch = self._membership.epoch
        return RouterState(epoch=epoch, gate_closed=False, held=0, sessions=0, requests=0, engines=tuple(loads))

    async def close(self) -> None:
        await self._http.close()

    async def _workers(self) -> dict[str, dict[str, Any]]:
        """Return its workers by URL."""
        try:
            answer = await self._http.get("/workers", timeout_s=CALL_S)
            return {worker["url"]: worker for worker in answer["workers"]}
        except (KeyError, TypeError) as error:
            raise UserError(f"{self._http.url} answers, but is no vllm-router ({error!r} in GET /workers)") from error

    async def _change(self, what: Literal["add", "remove"], url: str) -> None:
        await self._http.call("POST", f"/{what}_worker?{urlencode({'url': url})}", b"", timeout_s=CALL_S)


# --- Any router that runs -------------------------------------------------------------------------------------------

_ADDRESS = {"kind", "url", "host", "port"}


def check(config: RouterConfig) -> None:
    """Raise ConfigError for options that are known to be wrong before a start."""
    if config.url is None:
        raise ConfigError(
            "router.kind=vllm-router needs router.url: a fleet starts no vllm-router of its own; start one "
            "(`vllm-router --host 127.0.0.1 --port 30000 --policy consistent_hash`) and give its URL"
        )
    for name, default in RouterConfig().model_dump(exclude=_ADDRESS).items():
        value = getattr(config, name)
        if value != default:
            raise ConfigError(
                f"router.{name}={value} would have no effect: the router at {config.url} runs already, with options "
                "of its own; leave it out"
            )


async def open_running(config: RouterConfig, api_key: str | None, owned: AsyncExitStack) -> OpenRouter:
    """Return the router at `config.url`; raises as `open_router`.

    It runs on, and loses its engines at the end of `owned`, since they are then gone or not this fleet's.
    """
    url, ours = str(config.url), config.kind == "penstock"
    admin = RouterAdmin(url, api_key) if ours else VllmRouterAdmin(url)
    owned.push_async_callback(admin.close)
    await admin.engines()
    guard = Guard(admin)
    owned.push_async_callback(guard.stop)
    return OpenRouter(url, admin, guard, api_key, ours=ours)


class Guard:
    """Repeats announcements that a router of others may not have taken."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._settling: asyncio.Task[None] | None = None

    def watch(self, roster: Roster, fleet: FleetConfig) -> None:
        self._settling = asyncio.create_task(self._settle(roster, fleet.health_interval_s), name="settle-router")

    async def stop(self) -> None:
        """Remove the fleet's engines; raise the error that broke the watch, if one did."""
        try:
            if self._settling is not None:
                await cancelled(self._settling)
        finally:
            await self._withdraw()

    async def _settle(self, roster: Roster, interval_s: float) -> None:
        while True:
            await roster.until(lambda: roster.router_uncertain)
            await asyncio.sleep(interval_s)
            with suppress(PenstockError):  # the loop asks again
                await keep_in_step(roster)

    async def _withdraw(self) -> None:
        try:
            await self._admin.announce(Membership(max(await self._admin.epochs()) + 1, ()))
        except PenstockError as error:
            # The fleet ends all the same; this log line is for the router's owner.
            logger.warning("the router does not know yet that this fleet's engines are gone: %s", error)
