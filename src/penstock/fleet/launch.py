"""A fleet about to be: await it, or enter it and have it torn down on the way out."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from penstock.aio import all_or_first_error
from penstock.config import EngineConfig, FleetConfig, RouterConfig, ServerSpec
from penstock.engine.launch import resolve_profile, server_command
from penstock.errors import ConfigError, EngineError, EngineHTTPError, PenstockError, StateError, UserError
from penstock.fleet.assemble import assemble
from penstock.fleet.attach import AttachedServers
from penstock.fleet.detach import start_detached
from penstock.fleet.engines import LaunchedEngines, LocalLauncher
from penstock.fleet.fleet import Fleet
from penstock.fleet.member import RANK, Lifecycle, Member
from penstock.fleet.options import assign, check_key, made, refuse_unknown, section, specs_of, visible_gpus
from penstock.fleet.ray_engines import RayLauncher, check_ray
from penstock.fleet.remote import FleetClient, adopt
from penstock.fleet.router_process import OpenRouter, check_router, open_router
from penstock.fleet.service import ASK_THERE, beyond_reach, refuse_second, router_address, socket_of
from penstock.guard import new_key
from penstock.http import UnreachableError
from penstock.router.admin_client import RouterAdmin, RouterState


async def reachable(fleet: Fleet) -> Fleet:
    """Open the control socket of a fleet that this process holds; where that fails, the fleet ends."""
    if fleet.endpoint is not None:
        try:
            await fleet.endpoint.open(fleet.teardown)
        except BaseException:
            await fleet.teardown()
            raise
    return fleet


_HOW = "open it by `async with Fleet.launch(...) as fleet:` or by `fleet = await Fleet.launch(...)`"


class Opening:
    """`async with opening as fleet:`, or `fleet = await opening` with a `teardown` of your own. Once only."""

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
        """Who forgot to open it asks it for a fleet's methods."""
        raise AttributeError(f"this fleet is not open yet, so it has no {name!r}; {_HOW}")

    def __enter__(self) -> NoReturn:
        raise StateError(f"a fleet is opened by a coroutine; {_HOW}")

    def __exit__(self, *_: object) -> None:
        """There as Python looks for it before it enters."""

    async def _open(self) -> Fleet:
        if self._begun:
            raise StateError("this fleet has been opened already; call launch or connect again for another")
        self._begun = True
        return await self._start()


logger = logging.getLogger(__name__)


def launch(
    model: object,
    options: Mapping[str, Any],
    *,
    fleet: FleetConfig | None = None,
    router: RouterConfig | None = None,
    api_key: str | None = None,
    parallel_starts: int | None = None,
    detach: bool = False,
) -> Opening:
    """See `Fleet.launch`."""
    refuse_unknown(options, EngineConfig, FleetConfig, RouterConfig)
    check_key(api_key)
    if parallel_starts is not None and (type(parallel_starts) is not int or parallel_starts < 1):
        raise ConfigError(f"parallel_starts must be at least 1, got {parallel_starts!r}")
    if not isinstance(model, (str, Path, EngineConfig)):
        raise ConfigError(f"model must be a checkpoint folder, a hub name or an EngineConfig, got {model!r}")
    given = model if isinstance(model, EngineConfig) else None
    named = options if given is not None else {**options, "model": str(model)}
    engine, of_fleet = section(EngineConfig, given, named), section(FleetConfig, fleet, options)
    specs_of(of_fleet.attach)
    count = of_fleet.engines + len(of_fleet.attach)
    if count == 0:
        raise ConfigError("engines is 0 and there is nothing to attach; launch one, or give the URLs of others")
    if of_fleet.min_engines > count:
        raise ConfigError(f"min_engines is {of_fleet.min_engines}, more than the {count} engines")
    gpus: Sequence[tuple[str, ...]] = [()] * of_fleet.engines
    if of_fleet.launcher == "ray":
        check_ray()
    elif of_fleet.engines:
        server_command(engine, port=0, api_key=None)  # a wrong model path is said now, not after a router started
        gpus = assign(engine, of_fleet.engines, visible_gpus() if resolve_profile(engine) == "gpu" else ())
    if len({name for names in gpus for name in names}) < sum(len(names) for names in gpus):
        # vLLM measures what its GPU has free while it starts, so those that share one start one after another.
        parallel_starts = 1
    of_router = section(RouterConfig, router, options)
    check_router(of_router, api_key)
    if of_router.kind == "vllm-router" and (ranks := [s.url for s in of_fleet.attach if (s.dp or 1) > 1]):
        raise ConfigError(f"vllm-router addresses no data-parallel ranks; leave dp out of {', '.join(ranks)}")
    if detach:
        return Opening(lambda: _detached(engine, of_fleet, of_router, api_key, parallel_starts))
    plan = _Plan(
        engine=engine,
        fleet=of_fleet,
        router=of_router,
        api_key=api_key,
        parallel_starts=parallel_starts,
        gpus=gpus,
    )
    return Opening(plan.start)


async def _detached(
    engine: EngineConfig, fleet: FleetConfig, router: RouterConfig, api_key: str | None, parallel_starts: int | None
) -> Fleet:
    url = await start_detached(engine, fleet, router, api_key=api_key, parallel_starts=parallel_starts)
    client = FleetClient.to(url)
    try:
        return await adopt(
            client,
            url,
            api_key=api_key,
            control_timeout_s=engine.control_timeout_s,
            request_timeout_s=engine.request_timeout_s,
            stream_chunk_tokens=fleet.stream_chunk_tokens,
        )
    except BaseException:  # whoever launched it has nothing to end it by
        async with client:
            with suppress(PenstockError):  # it is gone, or ends
                await client.stop()
        raise


@dataclass(frozen=True, slots=True)
class _Plan:
    engine: EngineConfig
    fleet: FleetConfig
    router: RouterConfig
    api_key: str | None
    parallel_starts: int | None
    gpus: Sequence[tuple[str, ...]]
    """Of each engine; none: it takes what it finds."""

    async def start(self) -> Fleet:
        refuse_second(self.router.url)
        key = new_key()
        # What vllm-router sends to engines is its callers' key.
        engine_key = self.api_key if self.router.kind == "vllm-router" else key
        async with AsyncExitStack() as owned:
            logs = _LogFolder(self.fleet.log_dir, owned)
            router = await open_router(self.router, log_dir=logs.path, api_key=self.api_key, owned=owned, admin_key=key)
            engines = logs.engines = LaunchedEngines(
                self.engine,
                RayLauncher(self.fleet, api_key=engine_key, log_dir=logs.path)
                if self.fleet.launcher == "ray"
                else LocalLauncher(engine_key, logs.path),
                api_key=engine_key,
                parallel_starts=self.parallel_starts or max(1, self.fleet.engines),
                stop_timeout_s=self.fleet.stop_timeout_s,
            )
            owned.push_async_callback(engines.end_all)
            attached = AttachedServers(
                api_key=self.api_key,
                control_timeout_s=self.engine.control_timeout_s,
                served_as=self.engine.served_model_name or self.engine.model,
            )
            owned.push_async_callback(attached.close)
            specs, first = self.fleet.attach, self.fleet.engines
            # Those of others first: what is wrong with them is known in no time.
            others = await attached.join_all([Lifecycle(f"e{first + i}") for i in range(len(specs))], specs)
            members = await all_or_first_error(
                engines.start(Lifecycle(f"e{i}"), gpus) for i, gpus in enumerate(self.gpus)
            )
            fleet = await assemble(
                router,
                [*members, *others],
                owned,
                fleet=self.fleet,
                api_key=self.api_key,
                control_timeout_s=self.engine.control_timeout_s,
                request_timeout_s=self.engine.request_timeout_s,
                engines=engines,
                attached=attached,
            )
            return await reachable(fleet)


class _LogFolder:
    """Where logs go. A folder of our own is removed at the end, unless an engine died or did not start."""

    def __init__(self, given: Path | None, owned: AsyncExitStack) -> None:
        self.engines: LaunchedEngines | None = None
        if given is not None:
            self.path = made(given)
        else:
            self.path = Path(tempfile.mkdtemp(prefix="penstock-"))
            owned.push(self._clean)

    def _clean(
        self, _type: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if isinstance(error, EngineError) or (self.engines is not None and self.engines.any_died()):
            logger.warning("the logs of engines and router are kept in %s", self.path)
        else:
            shutil.rmtree(self.path, ignore_errors=True)  # who cleans /tmp may have done so


UNAUTHORIZED, NOT_FOUND = 401, 404
INSTEAD = f"call Fleet.connect {ASK_THERE}, or use an OpenAI client"
OF_A_CLIENT = frozenset({"stream_chunk_tokens"})
"""Options of `FleetConfig` that whoever adopts a fleet chooses; the others are its holder's."""

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
    plan = _ConnectPlan(
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
class _ConnectPlan:
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
                FleetClient(path),
                url,
                api_key=self.api_key,
                control_timeout_s=self.control_timeout_s,
                request_timeout_s=self.request_timeout_s,
                stream_chunk_tokens=self.fleet.stream_chunk_tokens,
            )
        except UnreachableError:  # it died without taking its socket away
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
