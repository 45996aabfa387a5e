"""Engines and a router on this machine, started together, ended together."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock.config import EngineConfig, FleetConfig, RouterConfig
from penstock.engine.command import resolve_profile, server_command
from penstock.engine.concurrent import all_or_first_error
from penstock.errors import ConfigError, EngineError, PenstockError
from penstock.fleet.adopt import adopt
from penstock.fleet.assemble import assemble
from penstock.fleet.attach import AttachedServers
from penstock.fleet.detach import start_detached
from penstock.fleet.fleet import Fleet
from penstock.fleet.gpus import assign, visible_gpus
from penstock.fleet.launched_engines import LaunchedEngines
from penstock.fleet.lifecycle import Lifecycle
from penstock.fleet.link import Link
from penstock.fleet.local_engines import LocalLauncher
from penstock.fleet.opening import Opening, reachable
from penstock.fleet.ray_engines import RayLauncher, check_ray
from penstock.fleet.routers import check_router, open_router
from penstock.fleet.settings import check_key, made, refuse_unknown, section, specs_of
from penstock.fleet.sockets import refuse_second
from penstock.guard import new_key

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
    link = Link.to(url)
    try:
        return await adopt(
            link,
            url,
            api_key=api_key,
            control_timeout_s=engine.control_timeout_s,
            request_timeout_s=engine.request_timeout_s,
            stream_chunk_tokens=fleet.stream_chunk_tokens,
        )
    except BaseException:  # whoever launched it has nothing to end it by
        async with link:
            with suppress(PenstockError):  # it is gone, or ends
                await link.stop()
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
