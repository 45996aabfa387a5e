"""Engines and a router on this machine, started together, ended together."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock.config import EngineConfig, FleetConfig, RouterConfig
from penstock.engine.command import resolve_profile, server_command
from penstock.engine.concurrent import all_or_first_error
from penstock.engine.process import EngineProcess
from penstock.errors import ConfigError, EngineError, PenstockError
from penstock.fleet.assemble import assemble, join
from penstock.fleet.fleet import Fleet
from penstock.fleet.gpus import assign, visible_gpus
from penstock.fleet.lifecycle import Lifecycle, State
from penstock.fleet.member import SERVABLE, Member
from penstock.fleet.opening import Opening
from penstock.fleet.routers import check_router, open_router
from penstock.fleet.settings import refuse_unknown, section

logger = logging.getLogger(__name__)


def launch(
    model: str | Path | EngineConfig,
    options: Mapping[str, Any],
    *,
    fleet: FleetConfig | None = None,
    router: RouterConfig | None = None,
    api_key: str | None = None,
    parallel_starts: int | None = None,
) -> Opening:
    """See `Fleet.launch`."""
    refuse_unknown(options, EngineConfig, FleetConfig, RouterConfig)
    if parallel_starts is not None and parallel_starts < 1:
        raise ConfigError(f"parallel_starts must be at least 1, got {parallel_starts}")
    given = model if isinstance(model, EngineConfig) else None
    named = options if given is not None else {**options, "model": str(model)}
    engine, of_fleet = section(EngineConfig, given, named), section(FleetConfig, fleet, options)
    if of_fleet.min_engines > of_fleet.engines:
        raise ConfigError(f"min_engines is {of_fleet.min_engines}, more than the {of_fleet.engines} engines")
    server_command(engine, port=0, api_key=None)  # a wrong model path is said now, not after a router started
    gpus = assign(engine, of_fleet.engines, visible_gpus() if resolve_profile(engine) == "gpu" else ())
    if len({name for names in gpus for name in names}) < sum(len(names) for names in gpus):
        # vLLM measures what its GPU has free while it starts, so those that share one start one after another.
        parallel_starts = 1
    of_router = section(RouterConfig, router, options)
    check_router(of_router, api_key)
    plan = _Plan(
        engine=engine,
        fleet=of_fleet,
        router=of_router,
        api_key=api_key,
        parallel_starts=parallel_starts,
        gpus=gpus,
    )
    return Opening(plan.start)


@dataclass(frozen=True, slots=True)
class _Launched:
    """An engine process of ours, from its first moment on."""

    lifecycle: Lifecycle
    process: EngineProcess


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
        async with AsyncExitStack() as owned:
            launched: list[_Launched] = []
            logs = _log_folder(self.fleet.log_dir, launched, owned)
            url, admin = await open_router(self.router, log_dir=logs, api_key=self.api_key, owned=owned)
            owned.push_async_callback(_stop_all, launched, self.fleet.stop_timeout_s)
            limit = asyncio.Semaphore(self.parallel_starts or self.fleet.engines)
            members = await all_or_first_error(
                self._engine(f"e{i}", gpus, logs, limit, launched, owned) for i, gpus in enumerate(self.gpus)
            )
            return await assemble(
                url,
                admin,
                members,
                owned,
                fleet=self.fleet,
                api_key=self.api_key,
                control_timeout_s=self.engine.control_timeout_s,
                request_timeout_s=self.engine.request_timeout_s,
            )

    async def _engine(
        self,
        name: str,
        gpus: Sequence[str],
        logs: Path,
        limit: asyncio.Semaphore,
        launched: list[_Launched],
        owned: AsyncExitStack,
    ) -> Member:
        lifecycle = Lifecycle(name)
        try:
            async with limit:
                process = await EngineProcess.launch(
                    self.engine, name=name, log_dir=logs, api_key=self.api_key, gpus=gpus
                )
                launched.append(_Launched(lifecycle, process))
                return await join(
                    lifecycle,
                    process.url,
                    owned,
                    api_key=self.api_key,
                    control_timeout_s=self.engine.control_timeout_s,
                    process=process,
                )
        except PenstockError as error:
            lifecycle.to(State.DEAD, str(error))
            raise


async def _stop_all(launched: list[_Launched], timeout_s: float) -> None:
    await all_or_first_error(_stop(engine.lifecycle, engine.process, timeout_s) for engine in launched)


async def _stop(lifecycle: Lifecycle, process: EngineProcess, timeout_s: float) -> None:
    if lifecycle.state in SERVABLE:
        lifecycle.to(State.DRAINING, "the fleet is torn down")
    await process.stop(timeout_s)
    if lifecycle.state is State.DRAINING:
        lifecycle.to(State.STOPPED, "its process has ended")


def _log_folder(given: Path | None, launched: list[_Launched], owned: AsyncExitStack) -> Path:
    """Where logs go. A folder of our own is removed at the end, unless an engine died or did not start."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        return given
    folder = Path(tempfile.mkdtemp(prefix="penstock-"))

    def clean(_type: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        if isinstance(error, EngineError) or any(engine.lifecycle.state is State.DEAD for engine in launched):
            logger.warning("the logs of engines and router are kept in %s", folder)
        else:
            shutil.rmtree(folder)

    owned.push(clean)
    return folder
