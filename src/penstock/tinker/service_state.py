"""The state that the handlers of an API process share, and its background tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.aio import cancelled
from penstock.errors import ConfigError, PenstockError, StateError
from penstock.fleet.fleet import Fleet
from penstock.tinker.checkpoints import Checkpoints
from penstock.tinker.database import Database
from penstock.tinker.futures import HOLD_S, MAIN, SAMPLE, Futures, Operation, Outcome
from penstock.tinker.sampling import Sampling
from penstock.tinker.sessions import Sessions
from penstock.tinker.tenants import Tenants
from penstock.tinker.training import LearnerClient, Training

SWEEP_S = 60.0
"""Seconds between two sweeps of expired checkpoints, old results and silent sessions."""
DESCRIBE_S = 10.0
ABOUT, FLEET, KEYED = "about", "fleet", "keyed"
"""Names of the facts that the main process publishes to the others."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class About:
    """The base model, as clients see it."""

    base_model: str
    tokenizer: str
    max_context_length: int | None = None
    arch: str | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """Options of one API process.

    Attributes:
        data: the data folder. All its processes run as one user.
        name: name of the process; `MAIN` reaches the learner.
        learner: socket of the learner; main process only.
        fleet: URL of the fleet's router; main process only.
        about: facts on the base model; main process only.
    """

    data: Path
    database: str
    tenants: Tenants
    name: str = MAIN
    learner: Path | None = None
    fleet: str | None = None
    about: About = About("", "")
    hold_s: float = HOLD_S


class ServiceState:
    """State of one API process. Built by `opened`."""

    def __init__(self, options: Options, database: Database) -> None:
        self.tenants = options.tenants
        self.sessions = Sessions(database)
        self.checkpoints = Checkpoints(database, options.data)
        self.sampling = Sampling(self._proxy_url, options.data)
        self.learner = LearnerClient(options.learner)
        self.futures = Futures(database, options.name, self._run, hold_s=options.hold_s)
        self._training = Training(database, self.learner, self.checkpoints)
        self.about = options.about

    async def introduce(self) -> None:
        """Publish this service's facts, or read them in a process other than the main one.

        ConfigError: the database belongs to no service, or the service has keys and this process has none.
        """
        if self.futures.executor == MAIN:
            await self.sessions.publish(KEYED, not self.tenants.open)
            await self.sessions.publish(ABOUT, asdict(self.about))
            return
        about = await self.sessions.fact(ABOUT)
        if about is None:
            raise ConfigError("--database is of no service that has started; give the URL of the service's own")
        if self.tenants.open and await self.sessions.fact(KEYED):
            raise ConfigError("the service has keys, and without them any key would open it; give its --keys FILE")
        self.about = About(**about)

    async def _proxy_url(self) -> str | None:
        fleet = await self.sessions.fact(FLEET)
        return None if fleet is None else str(fleet["proxy_url"])

    async def drop_models(self, models: Iterable[tuple[str, str]]) -> None:
        """Queue the removal of ended sessions' models, `(tenant, model)`. It runs after their other operations."""
        for tenant, model in models:
            await self.futures.accept(Operation(f"{model}:drop", tenant, "drop_model", model, b"{}"))

    async def _run(self, operation: Operation) -> Outcome:
        if operation.kind != SAMPLE:
            return await self._training.run(operation)
        source = await self.sessions.source(operation.tenant, operation.scope)
        return await self.sampling.run(operation, source, self.about.max_context_length)

    async def describe_fleet(self) -> None:
        """Publish the router, engines and adapters to the other processes, for ever."""
        published: Any = None
        fleet: Fleet | None = None
        while True:
            try:
                fleet = await self.sampling.fleet()
                engines = {status.name: status.url for status in await fleet.engines(stats=False)}
                adapters = {name: status.version for name, status in (await fleet.adapters()).items()}
                value = {"proxy_url": fleet.url, "engine_urls": engines, "adapters": adapters}
                if value != published:
                    await self.sessions.publish(FLEET, value)
                    published = value
            except PenstockError as error:  # the engines may be back next time
                logger.warning("the engines cannot be listed: %s", error)
                if fleet is not None:
                    await self.sampling.lost(fleet)
            await asyncio.sleep(DESCRIBE_S)

    async def sweep(self) -> None:
        """Drop expired data, for ever."""
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self.futures.prune()
                await self.checkpoints.expire()
                for folder in await self.sessions.unused_folders():
                    await self.checkpoints.delete(folder)
                await self.drop_models(await self.sessions.silent())
                await self.sessions.forget()
            except StateError as error:  # the database may be back next time
                logger.warning("%s", error)


@asynccontextmanager
async def opened(options: Options) -> AsyncGenerator[ServiceState]:
    """Open the state of an API process while the block runs.

    Raises:
        ConfigError: the database cannot be used, or an additional process does not fit the service.
    """
    async with AsyncExitStack() as stack:
        database = await asyncio.to_thread(Database, options.database, new=options.name == MAIN)
        stack.push_async_callback(database.close)
        state = ServiceState(options, database)
        stack.push_async_callback(state.sampling.close)
        await state.introduce()
        if options.fleet is not None:
            await state.sessions.publish(FLEET, {"proxy_url": options.fleet})
            describing = asyncio.create_task(state.describe_fleet(), name="tinker-describe")
            stack.push_async_callback(cancelled, describing)
        stack.push_async_callback(state.learner.close)
        stack.push_async_callback(state.futures.close)
        await state.futures.open()
        sweeper = asyncio.create_task(state.sweep(), name="tinker-sweep")
        stack.push_async_callback(cancelled, sweeper)
        yield state
