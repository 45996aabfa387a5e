"""`Fleet.connect`: a fleet over engines that someone else started, or over one that another process owns."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from penstock.errors import ConfigError, EngineHTTPError, PenstockError, UserError
from penstock.fleet.attach import AttachedServers, specs_of
from penstock.fleet.fleet import Fleet
from penstock.fleet.launch import LogFolder, PendingFleet, Terms, assemble, reachable
from penstock.fleet.member import RANK, Lifecycle, Member
from penstock.fleet.remote import FleetClient, adopt
from penstock.fleet.router_process import OpenRouter, check_router, open_router
from penstock.fleet.service import ASK_THERE, beyond_reach, refuse_second, router_address, socket_of
from penstock.guard import new_key
from penstock.http import UnreachableError
from penstock.router.admin_client import RouterAdmin, RouterState
from penstock.settings import FleetConfig, RouterConfig, ServerSpec, check_key, refuse_unknown, section

UNAUTHORIZED, NOT_FOUND = 401, 404
INSTEAD = f"call Fleet.connect {ASK_THERE}, or use an OpenAI client"
OF_A_CLIENT = frozenset({"stream_chunk_tokens"})
"""Options of `FleetConfig` that each client of a fleet chooses; the others are its owner's."""
OF_STARTS = frozenset({"engines", "attach", "launcher", "stop_timeout_s"}) | {
    name for name in FleetConfig.model_fields if name.startswith("ray_")
}
"""Those that only say how engines are started, or which."""


def connect(
    target: str | Sequence[str | ServerSpec],
    options: Mapping[str, Any],
    *,
    api_key: str | None = None,
    control_timeout_s: float = 60.0,
    request_timeout_s: float = 3600.0,
) -> PendingFleet:
    """Prepare what `Fleet.connect` describes."""
    to_router = isinstance(target, str)
    refuse_unknown(options, FleetConfig, *(() if to_router else (RouterConfig,)))
    check_key(api_key)
    if idle := sorted((OF_STARTS | {"log_dir"} if to_router else OF_STARTS) & options.keys()):
        raise ConfigError(
            f"{', '.join(idle)} would have no effect: connect takes the engines that are there and starts none; leave "
            "it out, or call Fleet.launch, which starts engines and attaches others"
        )
    terms = Terms(section(FleetConfig, None, options), api_key, control_timeout_s, request_timeout_s)
    if isinstance(target, str):
        url = router_address(target)
        return PendingFleet(lambda: _to_router(url, terms, frozenset(options)))
    router = section(RouterConfig, None, options)
    check_router(router, api_key)
    specs = specs_of(target)
    return PendingFleet(lambda: _to_engines(specs, router, terms))


async def _to_router(url: str, terms: Terms, options: frozenset[str]) -> Fleet:
    if (found := await _owned_elsewhere(url, terms, options)) is not None:
        return found
    async with AsyncExitStack() as owned:
        admin = RouterAdmin(url, terms.api_key)
        owned.push_async_callback(admin.close)
        try:
            state = await admin.engines()
        except EngineHTTPError as error:
            if error.status == NOT_FOUND:
                raise UserError(f"{url} is not a Penstock router; give the URLs of engines as a list") from error
            raise
        _refuse_beyond_reach(state, url)
        try:
            return await _joined(OpenRouter(url, admin, key=terms.api_key), _servers(state), owned, terms, state.epoch)
        except EngineHTTPError as error:
            if error.status == UNAUTHORIZED and error.engine is None:  # the router's own, for a change of its set
                raise UserError(f"the fleet behind {url} is held by others ({error}); {INSTEAD}") from error
            raise


async def _owned_elsewhere(url: str, terms: Terms, options: frozenset[str]) -> Fleet | None:
    """A client of the process of this machine that owns the fleet behind a router; None where there is none."""
    path = socket_of(url)
    if path is None or not await asyncio.to_thread(path.exists):
        return None
    try:
        fleet = await adopt(FleetClient(path), url, terms)
    except UnreachableError:  # it died without taking its socket away
        return None
    if others := options - OF_A_CLIENT:
        await fleet.teardown()
        raise ConfigError(
            f"the fleet at {url} is held by another process, which has chosen {', '.join(sorted(others))} already; "
            "leave these out, or give them where the fleet is started"
        )
    return fleet


async def _to_engines(specs: Sequence[ServerSpec], config: RouterConfig, terms: Terms) -> Fleet:
    refuse_second(config.url)
    async with AsyncExitStack() as owned:
        logs = LogFolder(terms.fleet.log_dir, owned)
        router = await open_router(config, log_dir=logs.path, api_key=terms.api_key, owned=owned, admin_key=new_key())
        return await _joined(router, {f"e{i}": spec for i, spec in enumerate(specs)}, owned, terms, -1)


async def _joined(
    router: OpenRouter, engines: Mapping[str, ServerSpec], owned: AsyncExitStack, terms: Terms, epoch: int
) -> Fleet:
    """Make a fleet of the engines that answer. The others are left out, where enough answer."""
    attached = AttachedServers(api_key=terms.api_key, control_timeout_s=terms.control_timeout_s)
    owned.push_async_callback(attached.close)
    joined = await asyncio.gather(
        *(attached.join(Lifecycle(name), spec) for name, spec in engines.items()), return_exceptions=True
    )
    members = [outcome for outcome in joined if isinstance(outcome, Member)]
    failures = [outcome for outcome in joined if isinstance(outcome, BaseException)]
    unexpected = [error for error in failures if not isinstance(error, PenstockError)]
    if unexpected or (failures and len(members) < terms.fleet.min_engines):
        raise (unexpected or failures)[0]
    return await reachable(await assemble(router, members, owned, terms, epoch=epoch, attached=attached))


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
