"""Engine processes of one configuration on this machine: started, placed on GPUs, ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from penstock.config import EngineConfig
from penstock.engine.command import resolve_profile
from penstock.engine.concurrent import all_or_first_error
from penstock.engine.process import EngineProcess
from penstock.errors import PenstockError
from penstock.fleet.assemble import join
from penstock.fleet.gpus import place, visible_gpus
from penstock.fleet.lifecycle import Lifecycle, State
from penstock.fleet.member import SERVABLE, Member


class LocalEngines:
    """Starts engines, again where they died, and ends all that it started.

    Args:
        config: of every engine.
        api_key: what they ask for from now on.
        log_dir: each appends to a file of its name.
        parallel_starts: so many start at the same time.
        stop_timeout_s: seconds between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        api_key: str | None,
        log_dir: Path,
        parallel_starts: int,
        stop_timeout_s: float,
    ) -> None:
        self.config = config
        self._api_key = api_key
        self._log_dir = log_dir
        self._limit = asyncio.Semaphore(parallel_starts)
        self._stop_s = stop_timeout_s
        self._processes: dict[Lifecycle, EngineProcess] = {}
        self._lives: set[Lifecycle] = set()
        self._connections = AsyncExitStack()

    async def start(self, lifecycle: Lifecycle, gpus: Sequence[str]) -> Member:
        """Start the engine of `lifecycle`, which is LAUNCHING; it is SYNCING then.

        Raises:
            PenstockError: it did not start; it is gone, and DEAD.
        """
        process: EngineProcess | None = None
        self._lives.add(lifecycle)
        try:
            async with self._limit:
                process = await EngineProcess.launch(
                    self.config, name=lifecycle.engine, log_dir=self._log_dir, api_key=self._api_key, gpus=gpus
                )
                self._processes[lifecycle] = process
                member = await join(
                    lifecycle,
                    process.url,
                    self._connections,
                    api_key=self._api_key,
                    control_timeout_s=self.config.control_timeout_s,
                    process=process,
                )
        except PenstockError as error:
            lifecycle.to(State.DEAD, str(error))
            if process is not None:
                process.kill()
                await process.wait()
            raise
        member.gpus = tuple(gpus)
        return member

    def place(self, taken: Sequence[Sequence[str]]) -> tuple[str, ...]:
        """GPUs for one engine more, where others have `taken`. Raises ConfigError where there is no room."""
        return place(self.config, visible_gpus(), taken) if resolve_profile(self.config) == "gpu" else ()

    async def end(self, lifecycle: Lifecycle) -> None:
        """End an engine, however far it has come. One that served is STOPPED then."""
        if lifecycle.state in SERVABLE - {State.DRAINING}:
            lifecycle.to(State.DRAINING, "the fleet is torn down")
        if (process := self._processes.pop(lifecycle, None)) is not None:
            await process.stop(self._stop_s)
        if lifecycle.state is State.DRAINING:
            lifecycle.to(State.STOPPED, "its process has ended")

    async def end_all(self) -> None:
        """End every engine, and close the connections to them."""
        try:
            await all_or_first_error(self.end(lifecycle) for lifecycle in tuple(self._processes))
        finally:
            await self._connections.aclose()

    def any_died(self) -> bool:
        """Whether an engine ever failed: its log is worth keeping."""
        return any(change.new is State.DEAD for life in self._lives for change in life.history)
