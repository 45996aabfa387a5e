"""Engine processes on this machine, without Ray or anything else in between."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.aio import all_or_first_error
from penstock.config import EngineConfig
from penstock.engine.launch import EngineProcess, resolve_profile
from penstock.errors import EngineStartError, PenstockError, StateError
from penstock.fleet.assemble import join
from penstock.fleet.member import SERVABLE, EngineHandle, Lifecycle, Member, State
from penstock.fleet.options import place, visible_gpus
from penstock.process import shortage


@dataclass(frozen=True, slots=True)
class LocalLauncher:
    """Starts engines as children of this process; see `launched_engines.Launcher`."""

    api_key: str | None
    """What they ask for from now on."""
    log_dir: Path
    """Each appends to a file of its name."""

    async def launch(self, config: EngineConfig, name: str, gpus: Sequence[str]) -> EngineProcess:
        """Start a server that sees `gpus`, and return when it is ready. Raises EngineStartError or ConfigError."""
        return await EngineProcess.launch(config, name=name, log_dir=self.log_dir, api_key=self.api_key, gpus=gpus)

    async def place(self, config: EngineConfig, taken: Sequence[Sequence[str]]) -> tuple[str, ...]:
        """GPUs of this machine for one engine more. Raises ConfigError where there is no room."""
        return place(config, visible_gpus(), taken) if resolve_profile(config) == "gpu" else ()

    async def release(self, name: str) -> None:
        """Nothing to do: who has which GPUs is known from the engines that there are."""

    async def close(self) -> None:
        """Nothing to do: every engine has ended."""


class Launcher(Protocol):
    """Where engine processes run: `local_engines.LocalLauncher`, `ray_engines.RayLauncher`.

    What is set aside for an engine (GPUs, a placement group) is kept from its first start to `release`, through its
    deaths.
    """

    async def launch(self, config: EngineConfig, name: str, gpus: Sequence[str]) -> EngineHandle:
        """Start the server of an engine and return when it is ready.

        Raises:
            PenstockError: it did not start; nothing is left of it.
        """
        ...

    async def place(self, config: EngineConfig, taken: Sequence[Sequence[str]]) -> tuple[str, ...]:
        """GPUs for one engine more, where others have `taken`. Raises ConfigError where there is no room."""
        ...

    async def release(self, name: str) -> None:
        """The engine has ended for good: others may have what was set aside for it."""
        ...

    async def close(self) -> None:
        """Every engine has ended: leave nothing behind."""
        ...


class LaunchedEngines:
    """Starts engines, again where they died, and ends all that it started.

    Args:
        config: of every engine.
        launcher: starts their processes.
        api_key: what they ask for from now on.
        parallel_starts: so many start at the same time.
        stop_timeout_s: seconds between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        config: EngineConfig,
        launcher: Launcher,
        *,
        api_key: str | None,
        parallel_starts: int,
        stop_timeout_s: float,
    ) -> None:
        self.config = config
        self._api_key = api_key
        self._launcher = launcher
        self._limit = asyncio.Semaphore(parallel_starts)
        self._stop_s = stop_timeout_s
        self._processes: dict[Lifecycle, EngineHandle] = {}
        self._lives: set[Lifecycle] = set()
        self._connections = AsyncExitStack()
        self._closed = False

    async def start(self, lifecycle: Lifecycle, gpus: Sequence[str]) -> Member:
        """Start the engine of `lifecycle`, which is LAUNCHING; it is SYNCING then.

        Cancelled, it leaves no process; what is set aside for the engine, `end` gives back.

        Raises:
            PenstockError: it did not start; it is gone, and DEAD.
            StateError: all have been ended.
        """
        process: EngineHandle | None = None
        self._lives.add(lifecycle)
        try:
            async with self._limit:
                self._check_open()
                process = await self._launched(lifecycle.engine, gpus)
                self._check_open()  # who ends all that there are does not know of this one
                self._processes[lifecycle] = process
                member = await join(
                    lifecycle,
                    process.url,
                    self._connections,
                    api_key=self._api_key,
                    control_timeout_s=self.config.control_timeout_s,
                    process=process,
                )
        except BaseException as error:
            try:
                if isinstance(error, PenstockError) and lifecycle.state is not State.DEAD:
                    lifecycle.to(State.DEAD, str(error))
            finally:
                if process is not None:
                    process.kill()
                    await process.wait()
            raise
        member.gpus = tuple(gpus)
        return member

    async def _launched(self, name: str, gpus: Sequence[str]) -> EngineHandle:
        try:
            return await self._launcher.launch(self.config, name, gpus)
        except OSError as error:  # no memory, descriptor or room on a disk is left; that may pass
            raise EngineStartError(f"no process can be started for it: {shortage(error)}", engine=name) from error

    async def place(self, taken: Sequence[Sequence[str]]) -> tuple[str, ...]:
        """GPUs for one engine more, where others have `taken`. Raises ConfigError where there is no room."""
        return await self._launcher.place(self.config, taken)

    async def end(self, lifecycle: Lifecycle) -> None:
        """End an engine, however far it has come. One that served is STOPPED then."""
        if lifecycle.state in SERVABLE - {State.DRAINING}:
            lifecycle.to(State.DRAINING, "the fleet is torn down")
        if (process := self._processes.get(lifecycle)) is not None:
            await process.stop(self._stop_s)
            self._processes.pop(lifecycle, None)  # not before: who ends all has to find what did not end
        await self._launcher.release(lifecycle.engine)
        if lifecycle.state is State.DRAINING:
            lifecycle.to(State.STOPPED, "its process has ended")

    async def end_all(self) -> None:
        """End every engine, and close the connections to them. None can be started any more."""
        self._closed = True
        try:
            await all_or_first_error(self.end(lifecycle) for lifecycle in tuple(self._processes))
        finally:
            try:
                await self._connections.aclose()
            finally:
                await self._launcher.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("this fleet was torn down: no engine of it can start any more")

    def any_died(self) -> bool:
        """Whether an engine ever failed: its log is worth keeping."""
        return any(change.new is State.DEAD for life in self._lives for change in life.history)
