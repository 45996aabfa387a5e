"""From engines that answer to a fleet: what `launch` and `connect` have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack

from penstock.aio import cancelled
from penstock.config import FleetConfig
from penstock.engine.capabilities import smallest_vocabulary
from penstock.engine.client import DataClient
from penstock.engine.control import ControlClient
from penstock.errors import DeadlineError, StateError, UserError
from penstock.fleet.elastic import Elastic
from penstock.fleet.fleet import Fleet
from penstock.fleet.member import EngineHandle, Engines, Lifecycle, Member, State, updatable
from penstock.fleet.operations import Operations
from penstock.fleet.roster import Roster
from penstock.fleet.router_process import OpenRouter, settle
from penstock.fleet.service import Endpoint
from penstock.fleet.stores import Stores
from penstock.fleet.supervise import Attached, Supervisor
from penstock.fleet.vllm_router import VllmRouterAdmin

JOIN_S = 15.0
"""Deadline of the first question to an engine: one that hangs is not to be waited for as long as for an update."""


async def join(
    lifecycle: Lifecycle,
    url: str,
    owned: AsyncExitStack,
    *,
    api_key: str | None,
    control_timeout_s: float,
    process: EngineHandle | None = None,
    client: Callable[..., ControlClient] = ControlClient,
) -> Member:
    """Ask an engine what it is; it is SYNCING then. Raises `EngineDeadError` and its kin where it does not answer."""
    control = client(lifecycle.engine, url, api_key=api_key, timeout_s=control_timeout_s)
    try:
        async with asyncio.timeout(JOIN_S):
            info = await control.info()
    except BaseException as error:
        await control.close()  # a fleet that lives long may be given many that do not join
        if not isinstance(error, TimeoutError):
            raise
        raise DeadlineError(
            f"{url} did not say what it is within {JOIN_S:g} s", seconds=JOIN_S, engine=lifecycle.engine
        ) from error
    owned.push_async_callback(control.close)
    lifecycle.to(State.SYNCING, f"answers with weight version {info.weight_version}")
    return Member(
        ranks=info.dp,
        name=lifecycle.engine,
        url=url,
        control=control,
        info=info,
        lifecycle=lifecycle,
        weight_version=info.weight_version,
        api_key=api_key,
        process=process,
    )


async def assemble(
    router: OpenRouter,
    members: Sequence[Member],
    owned: AsyncExitStack,
    *,
    fleet: FleetConfig,
    api_key: str | None,
    control_timeout_s: float,
    request_timeout_s: float,
    epoch: int | None = None,
    engines: Engines | None = None,
    attached: Attached | None = None,
) -> Fleet:
    """Admit the engines, tell the router, watch them.

    Args:
        router: in front of them.
        members: engines that are SYNCING, in the order of their index.
        owned: what ends with the fleet.
        fleet: its settings.
        api_key: what the router asks of clients.
        control_timeout_s: deadline of a control call.
        request_timeout_s: deadline of a generation request.
        epoch: of the set that the router has already; None: nobody has asked.
        engines: starts them anew, and more of them; None: someone else started them.
        attached: joins servers of others, and those again that come back; None: those stay dead.

    Raises:
        StateError: the engines serve different models or weight versions, or some are paused and some not.
        UserError: there is no engine, or fewer than `min_engines`.
    """
    if not members or len(members) < fleet.min_engines:
        raise UserError(f"there are {len(members)} engines, the fleet needs at least {fleet.min_engines}")
    roster = await _announced(router, members, epoch)
    store = Stores(fleet, lambda: updatable(roster.members), control_timeout_s)
    owned.callback(store.close)
    data = _data_client(router, roster, owned, api_key, request_timeout_s, fleet.stream_chunk_tokens)
    if attached is not None:
        attached.serve(data.state, roster)
    operations = Operations(
        roster,
        store,
        min_engines=fleet.min_engines,
        control_timeout_s=control_timeout_s,
        request_timeout_s=request_timeout_s,
        recovery_timeout_s=engines.config.start_timeout_s if engines is not None else 0.0,
        paused=members[0].info.paused,
    )
    supervisor = _supervisor(router, roster, operations, owned, fleet, (engines, attached))
    data.http.suspect = supervisor.look
    elastic = Elastic(
        roster,
        operations,
        supervisor,
        min_engines=fleet.min_engines,
        drain_timeout_s=fleet.drain_timeout_s,
        engines=engines,
        attached=attached,
    )
    owned.push_async_callback(elastic.close)
    return Fleet(
        router.url,
        roster=roster,
        operations=operations,
        elastic=elastic,
        data=data,
        owned=owned.pop_all(),
        endpoint=Endpoint(router.url, roster, operations, elastic, admin_key=router.key),
    )


def _data_client(
    router: OpenRouter,
    roster: Roster,
    owned: AsyncExitStack,
    api_key: str | None,
    request_timeout_s: float,
    chunk_tokens: int,
) -> DataClient:
    """Who sends requests to the router."""
    data = DataClient(
        router.url,
        api_key=api_key,
        request_timeout_s=request_timeout_s,
        vocab_size=smallest_vocabulary(m.info for m in roster.members),
        stream_chunk_tokens=chunk_tokens,
    )
    data.http.back = roster.router_back
    data.kept = lambda: roster.kept
    owned.push_async_callback(data.close)
    return data


def _supervisor(
    router: OpenRouter,
    roster: Roster,
    operations: Operations,
    owned: AsyncExitStack,
    fleet: FleetConfig,
    sources: tuple[Engines | None, Attached | None],
) -> Supervisor:
    """Who watches engines and router from now on."""
    engines, attached = sources
    supervisor = Supervisor(
        roster, admit=operations.admit, mend=operations.mend, fleet=fleet, engines=engines, attached=attached
    )
    owned.push_async_callback(supervisor.stop)
    for member in roster.members:
        supervisor.watch(member)
    if router.guard is not None:
        router.guard.watch(roster, fleet)
    else:
        settling = asyncio.create_task(settle(roster, fleet.health_interval_s), name="settle-router")
        owned.push_async_callback(cancelled, settling)
    return supervisor


async def _announced(router: OpenRouter, members: Sequence[Member], epoch: int | None) -> Roster:
    """The engines as one fleet, in the state that they all are in; the router knows them, and is gated as they are."""
    _agree("weight version", {m.name: m.weight_version for m in members})
    vocabularies = {m.name: m.info.vocab_size for m in members if m.info.vocab_size}
    _agree("the size of their vocabulary", vocabularies, "a fleet serves one model")
    _agree("paused", {m.name: m.info.paused for m in members})
    paused = members[0].info.paused
    roster = Roster(
        router.admin,
        version=members[0].weight_version,
        epoch=-1 if epoch is None else epoch,
        closed=paused,
        by_rank=not isinstance(router.admin, VllmRouterAdmin),  # its workers are URLs
        gated=not isinstance(router.admin, VllmRouterAdmin),
    )
    for member in members:
        if not roster.by_rank:
            member.ranks = 1
        roster.admit(member)
        if paused:
            member.lifecycle.to(State.PAUSED, "was paused when it was found")
    # Also where it has these engines: who held them before may have died with the gate closed.
    await roster.restore()
    return roster


def _agree(what: str, values: Mapping[str, object], advice: str = "bring them to the same state first") -> None:
    if len(set(values.values())) > 1:
        listed = ", ".join(f"{name}: {value}" for name, value in values.items())
        raise StateError(f"the engines do not agree on {what} ({listed}); {advice}")
