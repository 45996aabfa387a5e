"""`Fleet.connect`: a fleet of servers that someone else started, or one that another process owns."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

from penstock.errors import ConfigError, EngineDeadError, PenstockError
from penstock.fleet.attach import AttachedServers, specs_of
from penstock.fleet.fleet import Fleet
from penstock.fleet.launch import LogFolder, PendingFleet, Terms, assemble, reachable
from penstock.fleet.member import Lifecycle, Member
from penstock.fleet.remote import FleetClient, adopt
from penstock.fleet.router_process import check_router, open_router
from penstock.fleet.service import refuse_second, router_address, socket_of
from penstock.guard import new_key
from penstock.http import UnreachableError
from penstock.settings import FleetConfig, RouterConfig, ServerSpec, check_key, refuse_unknown, section

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
    owned = isinstance(target, str)
    refuse_unknown(options, FleetConfig, *(() if owned else (RouterConfig,)))
    check_key(api_key)
    if others := sorted(options.keys() - OF_A_CLIENT) if owned else []:
        raise ConfigError(
            f"the process that owns the fleet at {target} has chosen {', '.join(others)} already; leave these out, or "
            "give them where the fleet is started"
        )
    if idle := sorted(OF_STARTS & options.keys()):
        raise ConfigError(
            f"{', '.join(idle)} would have no effect: connect takes the engines that are there and starts none; leave "
            "it out, or call Fleet.launch, which starts engines and attaches others"
        )
    terms = Terms(section(FleetConfig, None, options), api_key, control_timeout_s, request_timeout_s)
    if isinstance(target, str):
        url = router_address(target)
        return PendingFleet(lambda: _adopted(url, terms))
    router = section(RouterConfig, None, options)
    check_router(router, api_key)
    specs = specs_of(target)
    return PendingFleet(lambda: _of_servers(specs, router, terms))


async def _adopted(url: str, terms: Terms) -> Fleet:
    path = socket_of(url)
    if path is not None and await asyncio.to_thread(path.exists):
        with suppress(UnreachableError):  # it died without taking its socket away
            return await adopt(FleetClient(path), url, terms)
    raise EngineDeadError(
        f"no process of yours on this machine owns a fleet at {url}. Give the addresses of its engines as a list, with "
        "router.url for that router, to own them; call Fleet.connect as the user who owns the fleet, on the router's "
        "machine; or use an OpenAI client"
    )


async def _of_servers(specs: Sequence[ServerSpec], config: RouterConfig, terms: Terms) -> Fleet:
    """Make a fleet of the servers that answer. The others are left out, where enough answer."""
    refuse_second(config.url)
    async with AsyncExitStack() as owned:
        logs = LogFolder(terms.fleet.log_dir, owned)
        router = await open_router(config, log_dir=logs.path, api_key=terms.api_key, owned=owned, admin_key=new_key())
        attached = AttachedServers(api_key=terms.api_key, control_timeout_s=terms.control_timeout_s)
        owned.push_async_callback(attached.close)
        joined = await asyncio.gather(
            *(attached.join(Lifecycle(f"e{i}"), spec) for i, spec in enumerate(specs)), return_exceptions=True
        )
        members = [outcome for outcome in joined if isinstance(outcome, Member)]
        failures = [outcome for outcome in joined if isinstance(outcome, BaseException)]
        unexpected = [error for error in failures if not isinstance(error, PenstockError)]
        if unexpected or (failures and len(members) < terms.fleet.min_engines):
            raise (unexpected or failures)[0]
        return await reachable(await assemble(router, members, owned, terms, attached=attached))
