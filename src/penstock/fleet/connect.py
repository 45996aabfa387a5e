"""A fleet over engines that someone else started."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config import FleetConfig, RouterConfig, ServerSpec
from penstock.errors import ConfigError, EngineHTTPError, PenstockError, UserError
from penstock.fleet.adopt import adopt
from penstock.fleet.assemble import assemble
from penstock.fleet.attach import AttachedServers
from penstock.fleet.fleet import Fleet
from penstock.fleet.lifecycle import Lifecycle
from penstock.fleet.link import Link, LinkGoneError
from penstock.fleet.member import RANK, Member
from penstock.fleet.opening import Opening, reachable
from penstock.fleet.routers import OpenRouter, check_router, open_router
from penstock.fleet.settings import check_key, refuse_unknown, section, specs_of
from penstock.fleet.sockets import ASK_THERE, beyond_reach, refuse_second, router_address, socket_of
from penstock.guard import new_key
from penstock.router.admin_client import RouterAdmin, RouterState

UNAUTHORIZED, NOT_FOUND = 401, 404
INSTEAD = f"call Fleet.connect {ASK_THERE}, or use an OpenAI client"
OF_A_CLIENT = frozenset({"stream_chunk_tokens"})
"""Options of `FleetConfig` that whoever adopts a fleet chooses; the others are its holder's."""

OF_STARTS = frozenset({"engines", "attach", "launcher", "ray_address", "ray_cpus", "stop_timeout_s"})
"""Those that only say how engines are started, or which."""


def connect(
    target: str | Sequence[str | ServerSpec],
    options: Mapping[str, Any],
    *,
    api_key: str | None = None,
    control_timeout_s: float = 60.0,
    request_timeout_s: float = 3600.0,
) -> Opening:
    """See `Fleet.connect`."""
    to_router = isinstance(target, str)
    refuse_unknown(options, FleetConfig, *(() if to_router else (RouterConfig,)))
    check_key(api_key)
    if idle := sorted((OF_STARTS | {"log_dir"} if to_router else OF_STARTS) & options.keys()):
        raise ConfigError(
            f"{', '.join(idle)} would have no effect: connect takes the engines that are there and starts none; leave "
            "it out, or call Fleet.launch, which starts engines and attaches others"
        )
    plan = _Plan(
        options=frozenset(options),
        fleet=section(FleetConfig, None, options),
        router=section(RouterConfig, None, options),
        api_key=api_key,
        control_timeout_s=control_timeout_s,
        request_timeout_s=request_timeout_s,
    )
    if not to_router:
        check_router(plan.router, api_key)
    if isinstance(target, str):
        url = router_address(target)
        return Opening(lambda: plan.to_router(url))
    specs = specs_of(target)
    return Opening(lambda: plan.to_engines(specs))


@dataclass(frozen=True, slots=True)
class _Plan:
    options: frozenset[str]
    """Names of those that were given."""
    fleet: FleetConfig
    router: RouterConfig
    api_key: str | None
    control_timeout_s: float
    request_timeout_s: float

    async def to_router(self, url: str) -> Fleet:
        if (found := await self._held(url)) is not None:
            return found
        async with AsyncExitStack() as owned:
            admin = RouterAdmin(url, self.api_key)
            owned.push_async_callback(admin.close)
            state = await _router_state(admin, url)
            _refuse_beyond_reach(state, url)
            router = OpenRouter(url, admin, key=self.api_key)
            try:
                return await self._fleet(router, _servers(state), owned, epoch=state.epoch)
            except EngineHTTPError as error:
                if error.status == UNAUTHORIZED and error.engine is None:  # the router's own, for a change of its set
                    raise UserError(f"the fleet behind {url} is held by others ({error}); {INSTEAD}") from error
                raise

    async def _held(self, url: str) -> Fleet | None:
        """The fleet behind that router where a process of this machine holds it; None where nobody does."""
        path = socket_of(url)
        if path is None or not await asyncio.to_thread(path.exists):
            return None
        try:
            fleet = await adopt(
                Link(path),
                url,
                api_key=self.api_key,
                control_timeout_s=self.control_timeout_s,
                request_timeout_s=self.request_timeout_s,
                stream_chunk_tokens=self.fleet.stream_chunk_tokens,
            )
        except LinkGoneError:  # it died without taking its socket away
            return None
        if others := self.options - OF_A_CLIENT:
            await fleet.teardown()
            raise ConfigError(
                f"the fleet at {url} is held by another process, which has chosen {', '.join(sorted(others))} already; "
                "leave these out, or give them where the fleet is started"
            )
        return fleet

    async def to_engines(self, specs: Sequence[ServerSpec]) -> Fleet:
        refuse_second(self.router.url)
        async with AsyncExitStack() as owned:
            logs = self.fleet.log_dir
            if logs is None:
                logs = Path(tempfile.mkdtemp(prefix="penstock-"))
                owned.callback(shutil.rmtree, logs, ignore_errors=True)
            router = await open_router(
                self.router, log_dir=logs, api_key=self.api_key, owned=owned, admin_key=new_key()
            )
            named = {f"e{i}": spec for i, spec in enumerate(specs)}
            return await self._fleet(router, named, owned, epoch=None)

    async def _fleet(
        self, router: OpenRouter, engines: Mapping[str, ServerSpec], owned: AsyncExitStack, *, epoch: int | None
    ) -> Fleet:
        """Of the engines that answer. One that hangs or is gone is left out, where enough others are there."""
        lives = [Lifecycle(name) for name in engines]
        attached = AttachedServers(api_key=self.api_key, control_timeout_s=self.control_timeout_s)
        owned.push_async_callback(attached.close)
        joined = await asyncio.gather(
            *(attached.join(life, its) for life, its in zip(lives, engines.values(), strict=True)),
            return_exceptions=True,
        )
        members: list[Member] = []
        failures: list[BaseException] = []
        for outcome in joined:
            if isinstance(outcome, Member):
                members.append(outcome)
            else:
                failures.append(outcome)
        unexpected = [error for error in failures if not isinstance(error, PenstockError)]
        if unexpected or (failures and len(members) < self.fleet.min_engines):
            raise (unexpected or failures)[0]
        fleet = await assemble(
            router,
            members,
            owned,
            fleet=self.fleet,
            api_key=self.api_key,
            control_timeout_s=self.control_timeout_s,
            request_timeout_s=self.request_timeout_s,
            epoch=epoch,
            attached=attached,
        )
        return await reachable(fleet)


def _servers(state: RouterState) -> dict[str, ServerSpec]:
    """The servers of a router's engines, by name; those that it addresses by rank are one."""
    ranks: dict[str, dict[str, Any]] = {}
    for engine in state.engines:
        if engine.eligible:
            name = engine.name if engine.dp_rank is None else engine.name.removesuffix(f"{RANK}{engine.dp_rank}")
            its = ranks.setdefault(name, {"url": engine.url, "dp": 0})
            its["dp"] += 1
    return {name: ServerSpec(**its) for name, its in ranks.items()}


def _refuse_beyond_reach(state: RouterState, url: str) -> None:
    """Before any engine is sent a key."""
    for engine in state.engines:
        if beyond_reach(url, engine.url):
            raise UserError(f"engine {engine.name} at {engine.url} listens only on the machine of {url}; {INSTEAD}")
        if engine.other_key:
            raise UserError(f"engine {engine.name} at {engine.url} asks for a key of its fleet alone; {INSTEAD}")


async def _router_state(admin: RouterAdmin, url: str) -> RouterState:
    try:
        return await admin.engines()
    except EngineHTTPError as error:
        if error.status == NOT_FOUND:
            raise UserError(f"{url} is not a Penstock router; give the URLs of engines as a list") from error
        raise
