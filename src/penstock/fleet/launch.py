"""Starts engines and a router from options, and assembles a fleet from its parts."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Collection, Coroutine, Generator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from penstock.aio import all_or_first_error
from penstock.engine.client import DataClient
from penstock.engine.command import server_command
from penstock.engine.vanilla import VanillaReplies
from penstock.errors import ConfigError, EngineError, StateError, UserError
from penstock.fleet.attach import AttachedServers, asked, check_beside, specs_of
from penstock.fleet.elastic import Elastic
from penstock.fleet.engines import LaunchedEngines
from penstock.fleet.fleet import Fleet
from penstock.fleet.gpus import assign, place, usable_gpus
from penstock.fleet.lifecycle import Lifecycle, State
from penstock.fleet.member import Member
from penstock.fleet.pausing import AllOperations
from penstock.fleet.roster import Roster
from penstock.fleet.router_process import OpenRouter, check_router, open_router, router_back
from penstock.fleet.service import Endpoint, refuse_second
from penstock.fleet.supervise import Admission, Supervisor, start_serving
from penstock.fleet.transports import stores_of
from penstock.guard import new_key
from penstock.options import check_key, refuse_unknown, section
from penstock.process import RestartBudget
from penstock.rooms import plugged_in
from penstock.router_settings import RouterConfig
from penstock.settings import EngineConfig, FleetConfig

logger = logging.getLogger(__name__)

_HOW = "open it by `async with Fleet.launch(...) as fleet:` or by `fleet = await Fleet.launch(...)`"


class PendingFleet:
    """A fleet to open once: `async with pending as fleet:`, or `fleet = await pending` and `teardown` later."""

    def __init__(self, start: Callable[[], Coroutine[Any, Any, Fleet]]) -> None:
        self._start = start
        self._begun = False
        self._fleet: Fleet | None = None

    def __await__(self) -> Generator[Any, None, Fleet]:
        return self._open().__await__()

    async def __aenter__(self) -> Fleet:
        self._fleet = await self._open()
        return self._fleet

    async def __aexit__(self, *_: object) -> None:
        if self._fleet is not None:
            await self._fleet.teardown()

    def __getattr__(self, name: str) -> NoReturn:
        """Explain to a caller who forgot to open it why it lacks a fleet's methods."""
        raise AttributeError(f"this fleet is not open yet, so it has no {name!r}; {_HOW}")

    async def _open(self) -> Fleet:
        if self._begun:
            raise StateError("this fleet has been opened already; call launch or connect again for another")
        self._begun = True
        return await self._start()


@dataclass(frozen=True, slots=True)
class Terms:
    """Options that `launch` and `connect` share."""

    fleet: FleetConfig
    api_key: str | None
    """The key that the router asks of clients."""
    control_timeout_s: float
    """Deadline of a control call."""
    request_timeout_s: float
    """Deadline of a generation request."""
    start_timeout_s: float = 0.0
    """Deadline of an engine's start; 0: others start them."""


def launch(
    model: object,
    options: Mapping[str, Any],
    *,
    fleet: FleetConfig | None,
    router: RouterConfig | None,
    api_key: str | None,
) -> PendingFleet:
    """Prepare the fleet that `Fleet.launch` describes."""
    refuse_unknown(options, EngineConfig, FleetConfig, RouterConfig)
    check_key(api_key)
    if not isinstance(model, (str, Path, EngineConfig)):
        raise ConfigError(f"model must be a checkpoint folder, a hub name or an EngineConfig, got {model!r}")
    given = model if isinstance(model, EngineConfig) else None
    engine = section(EngineConfig, given, options if given is not None else {**options, "model": str(model)})
    of_fleet = section(FleetConfig, fleet, options)
    if of_fleet.attach:
        specs_of(of_fleet.attach)
    count = of_fleet.engines + len(of_fleet.attach)
    if count == 0:
        raise ConfigError("engines is 0 and there is nothing to attach; launch one, or give the URLs of others")
    if of_fleet.min_engines > count:
        raise ConfigError(f"min_engines is {of_fleet.min_engines}, more than the {count} engines")
    gpus = _gpus(engine, of_fleet)
    of_router = section(RouterConfig, router, options)
    check_router(of_router, api_key)
    if of_router.kind == "vllm-router" and (ranks := [s.url for s in of_fleet.attach if (s.dp or 1) > 1]):
        raise ConfigError(f"vllm-router addresses no data-parallel ranks; leave dp out of {', '.join(ranks)}")
    terms = Terms(of_fleet, api_key, engine.control_timeout_s, engine.request_timeout_s, engine.start_timeout_s)
    return PendingFleet(lambda: _launched(engine, of_router, terms, gpus))


def _gpus(engine: EngineConfig, fleet: FleetConfig) -> Sequence[tuple[str, ...]]:
    """Return each engine's GPUs, () if it finds its own; refuse what cannot start."""
    if fleet.launcher == "ray":
        plugged_in("launcher.ray").check_installed()
    elif fleet.engines:
        server_command(engine, api_key=None)  # a wrong model path is an error now, before a router starts
        return assign(engine, fleet.engines, usable_gpus(engine))
    return [()] * fleet.engines


async def _launched(
    engine: EngineConfig, router_config: RouterConfig, terms: Terms, gpus: Sequence[tuple[str, ...]]
) -> Fleet:
    fleet, api_key = terms.fleet, terms.api_key
    refuse_second(router_config.known_url)
    shared = len({name for names in gpus for name in names}) < sum(len(names) for names in gpus)
    key = new_key()
    engine_key = api_key if router_config.kind == "vllm-router" else key  # it passes its callers' key to engines
    async with AsyncExitStack() as owned:
        logs = LogFolder(fleet.log_dir, owned)
        on_ray = fleet.launcher == "ray"
        launcher = partial(plugged_in("launcher.ray"), engine, fleet) if on_ray else LaunchedEngines
        engines: LaunchedEngines = launcher(
            command=cache(partial(server_command, engine, api_key=engine_key)),  # a restart has that of the first start
            place=partial(place, engine, () if on_ray else usable_gpus(engine)),  # Ray chooses as an engine starts
            api_key=engine_key,
            log_dir=logs.path,
            # vLLM measures its GPU's free memory as it starts, so engines on one GPU start one after another.
            parallel_starts=1 if shared else max(1, fleet.engines),
            control_timeout_s=terms.control_timeout_s,
            stop_timeout_s=fleet.stop_timeout_s,
        )
        logs.lives = engines.lives
        owned.push_async_callback(engines.end_all)
        attached = AttachedServers(api_key=api_key, control_timeout_s=terms.control_timeout_s)
        owned.push_async_callback(attached.close)
        # The router ends before the engines: vLLM answers 500 to requests while it ends.
        router = await open_router(router_config, log_dir=logs.path, api_key=api_key, owned=owned, admin_key=key)
        # Servers of others come first: their errors show at once.
        others = await all_or_first_error(
            attached.join(Lifecycle(f"e{fleet.engines + i}"), spec) for i, spec in enumerate(fleet.attach)
        )
        members = await all_or_first_error(engines.start(Lifecycle(f"e{i}"), its) for i, its in enumerate(gpus))
        return await reachable(
            await assemble(router, [*members, *others], owned, terms, attached=attached, engines=engines)
        )


class LogFolder:
    """The folder of logs, `path`. A temporary one is removed at the end, unless an engine died or did not start."""

    def __init__(self, given: Path | None, owned: AsyncExitStack) -> None:
        self.lives: Collection[Lifecycle] = ()
        self.path = given or Path(tempfile.mkdtemp(prefix="penstock-"))
        if given is None:
            owned.push(self._clean)
            return
        try:
            given.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"fleet.log_dir {given} cannot be made: {error.strerror}; choose another") from error

    def _clean(
        self, _type: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if isinstance(error, EngineError) or any(life.deaths for life in self.lives):
            logger.warning("the logs of engines and router are kept in %s", self.path)
        else:
            shutil.rmtree(self.path, ignore_errors=True)  # a cleaner of /tmp may have removed it


async def assemble(
    router: OpenRouter,
    members: Sequence[Member],
    owned: AsyncExitStack,
    terms: Terms,
    *,
    attached: AttachedServers,
    engines: LaunchedEngines | None = None,
) -> Fleet:
    """Make a fleet of engines that are SYNCING: admit, announce and watch them.

    `members` are in index order. `attached` joins servers of others. Without `engines`, others started all.

    Raises:
        StateError: the engines serve different weight versions, or only some are paused.
        UserError: there are fewer than `min_engines`, an engine occurs twice, or the models differ.
    """
    fleet = terms.fleet
    if not members or len(members) < fleet.min_engines:
        raise UserError(f"there are {len(members)} engines, the fleet needs at least {fleet.min_engines}")
    roster = await _roster(router, members)
    store = stores_of(fleet, roster.updatable, terms.control_timeout_s)
    owned.callback(store.close)
    data = data_client(router.url, terms.api_key, roster, owned, terms)

    def read_others() -> None:
        data.unreported = VanillaReplies(partial(asked, roster))

    attached.joined = read_others
    if any(member.process is None for member in members):
        read_others()
    operations = AllOperations(
        roster,
        store,
        fleet,
        control_timeout_s=terms.control_timeout_s,
        request_timeout_s=terms.request_timeout_s,
        recovery_timeout_s=terms.start_timeout_s,
        paused=roster.members[0].info.paused,
    )
    admission = Admission(operations, roster, store, terms.control_timeout_s)
    supervisor = _supervisor(roster, admission, operations, fleet)
    owned.push_async_callback(supervisor.stop)
    for member in roster.members:
        supervisor.watch(member)
    if router.guard is not None:
        router.guard.watch(roster, fleet)
    data.http.suspect = supervisor.probe_all
    elastic = Elastic(
        roster, operations, supervisor, fleet, engines=engines, start_timeout_s=terms.start_timeout_s, attached=attached
    )
    owned.push_async_callback(elastic.close)
    endpoint = Endpoint(router.url, roster, operations, elastic, admin_key=router.key)
    return Fleet(router.url, roster, operations, elastic, data, owned.pop_all(), endpoint)


def _supervisor(roster: Roster, admission: Admission, operations: AllOperations, fleet: FleetConfig) -> Supervisor:
    return Supervisor(
        roster,
        admit=admission.admit,
        check=operations.check,
        budget=lambda: RestartBudget(fleet.max_restarts, fleet.restart_window_s, fleet.restart_backoff_s),
        interval_s=fleet.health_interval_s,
        hang_s=fleet.hang_timeout_s,
    )


async def reachable(fleet: Fleet) -> Fleet:
    """Open the control socket of a fleet that this process owns; on failure, end it."""
    if fleet.endpoint is not None:
        async with AsyncExitStack() as failed:
            failed.push_async_callback(fleet.teardown)
            await fleet.endpoint.open(fleet.teardown)
            failed.pop_all()
    return fleet


def data_client(url: str, api_key: str | None, roster: Roster, owned: AsyncExitStack, terms: Terms) -> DataClient:
    """Return a client for requests through the router at `url`; it ends with `owned`."""
    data = DataClient(
        url,
        api_key=api_key,
        request_timeout_s=terms.request_timeout_s,
        vocab_size=min((m.info.vocab_size for m in roster.members if m.info.vocab_size), default=None),  # 0: unknown
        stream_chunk_tokens=terms.fleet.stream_chunk_tokens,
    )
    data.http.back = partial(router_back, roster)
    owned.push_async_callback(data.close)
    return data


async def _roster(router: OpenRouter, members: Sequence[Member]) -> Roster:
    """Make a roster of engines in one state; announce them and the gate to the router."""
    _agree("weight version", {m.name: m.weight_version for m in members})
    _agree("paused", {m.name: m.info.paused for m in members})
    paused = members[0].info.paused
    roster = Roster(router.admin, version=members[0].weight_version, closed=paused, by_rank=router.ours)
    for member in members:
        if member.process is None:
            check_beside(member, roster.members)
        roster.add(member)
        start_serving(roster, member)
        if paused:
            member.lifecycle.to(State.PAUSED, "was paused when it was found")
    await roster.restore()
    return roster


def _agree(what: str, values: Mapping[str, object]) -> None:
    if len(set(values.values())) > 1:
        listed = ", ".join(f"{name}: {value}" for name, value in values.items())
        raise StateError(f"the engines do not agree on {what} ({listed}); bring them to the same state first")
