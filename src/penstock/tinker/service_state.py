"""What the handlers of one API process work on, and what it does in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.aio import cancelled
from penstock.errors import StateError
from penstock.tinker.checkpoints import Checkpoints
from penstock.tinker.database import Database
from penstock.tinker.futures import HOLD_S, Futures, Operation, Outcome, settled
from penstock.tinker.learner_client import LearnerClient
from penstock.tinker.sampling import FleetLink, Sampling
from penstock.tinker.sessions import Sessions
from penstock.tinker.tenants import Tenants
from penstock.tinker.training import Training

SWEEP_S = 60.0
"""How often expired checkpoints, old results and silent sessions are dropped."""
MAIN = "main"
"""Name of the process that reaches the learner; operations on models are its."""
ABOUT, FLEET = "about", "fleet"
"""Names of the facts that the main process tells the others."""

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
    """Of one API process.

    Attributes:
        data: the data folder; its processes are of one user.
        database: SQLAlchemy's URL.
        tenants: who may call.
        name: of the process; `MAIN` reaches the learner.
        learner: socket of the learner; main process only.
        fleet: URL of the fleet's router; main process only.
        about: main process only.
        hold_s: how long a poll is held.
    """

    data: Path
    database: str
    tenants: Tenants
    name: str = MAIN
    learner: Path | None = None
    fleet: str | None = None
    about: About | None = None
    hold_s: float = HOLD_S


class ServiceState:
    """One API process; made by `opened`."""

    def __init__(self, options: Options, database: Database) -> None:
        self.tenants = options.tenants
        self.sessions = Sessions(database)
        self.checkpoints = Checkpoints(database, options.data)
        self.link = FleetLink(lambda: self.sessions.fact(FLEET))
        self.training = Training(database, LearnerClient(options.learner), self.checkpoints)
        self.futures = Futures(database, options.name, self._start, hold_s=options.hold_s)
        self.training.futures = self.futures
        self._sampling = Sampling(self.link)
        self._samples: set[asyncio.Task[None]] = set()
        self._about = options.about

    async def about(self) -> About:
        """Return what the base model is. StateError: the main process has not said it yet."""
        if self._about is None:
            told = await self.sessions.fact(ABOUT)
            if told is None:
                raise StateError("the main process of this service has not started yet")
            self._about = About(**told)
        return self._about

    def executor_of(self, kind: str) -> str:
        """Return the name of the process that runs operations of a kind."""
        return self.futures.executor if kind == "sample" else MAIN

    async def drop_models(self, models: Iterable[tuple[str, str]]) -> None:
        """Take models of ended sessions, `(tenant, model)`, from the learner, behind what is queued for them."""
        for tenant, model in models:
            await self.futures.accept(Operation(f"{model}:drop", tenant, "drop_model", model, b"{}"), MAIN)

    def _start(self, operation: Operation) -> None:
        if operation.kind != "sample":
            self.training.start(operation)
            return
        task = asyncio.create_task(self._sample(operation), name=f"tinker-{operation.id}")
        self._samples.add(task)
        task.add_done_callback(self._samples.discard)
        self.futures.on_cancel(operation.id, task.cancel)

    async def _sample(self, operation: Operation) -> None:
        async def work() -> Outcome:
            source = await self.sessions.source(operation.tenant, operation.scope)
            return await self._sampling.run(operation, source)

        await self.futures.finish(operation, await settled(work()))

    async def sweep(self) -> None:
        """Drop what has outlived its time, for ever."""
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self.futures.prune()
                await self.checkpoints.expire()
                await self.drop_models(await self.sessions.silent())
            except StateError as error:  # the database may be back the next time
                logger.warning("%s", error)

    async def close(self) -> None:
        """End polls and samples under way; the database keeps them for the next start."""
        for task in list(self._samples):
            await cancelled(task)
        await self.futures.close()


@asynccontextmanager
async def opened(options: Options) -> AsyncGenerator[ServiceState]:
    """Open the state of an API process while the block runs.

    Raises:
        ConfigError: the database cannot be used.
    """
    async with AsyncExitStack() as stack:
        database = await asyncio.to_thread(Database, options.database)
        stack.push_async_callback(database.close)
        state = ServiceState(options, database)
        stack.push_async_callback(state.link.close)
        if options.about is not None:
            await state.sessions.tell(ABOUT, asdict(options.about))
        if options.fleet is not None:
            await state.sessions.tell(FLEET, options.fleet)
        if options.name == MAIN:
            state.training.open()
            stack.push_async_callback(state.training.close)
        await state.futures.open()
        stack.push_async_callback(state.close)
        sweeper = asyncio.create_task(state.sweep(), name="tinker-sweep")
        stack.push_async_callback(cancelled, sweeper)
        yield state
