"""A fleet as `Fleet.launch` makes it, its engines and its router in this process, with starts and ends on command."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from patience import WAIT_S
from penstock import Fleet
from penstock.engine.command import server_command
from penstock.errors import ConfigError
from penstock.fleet.attach import AttachedServers
from penstock.fleet.engines import LaunchedEngines
from penstock.fleet.launch import Terms, assemble
from penstock.fleet.member import Lifecycle
from penstock.fleet.router_process import OpenRouter
from penstock.router.state import RouterAdmin
from penstock.settings import EngineConfig, FleetConfig
from penstock.sim.config import SimConfig
from penstock.sim.server import SimServer
from sim_fleets import router_here

CONFIG = EngineConfig(model="sim-model", profile="sim")


class Process:
    """An engine's process; `stop` waits for `may_end`."""

    def __init__(self, server: SimServer, url: str | None = None) -> None:
        self.url = server.url if url is None else url
        self.stopping = asyncio.Event()
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.ended = asyncio.Event()
        self.left: Sequence[int] = ()
        self._server = server
        self._killing: asyncio.Task[None] | None = None

    async def wait(self) -> int:
        await self.ended.wait()
        return -9

    async def stop(self, timeout_s: float) -> Sequence[int]:
        del timeout_s
        self.stopping.set()
        await self.may_end.wait()
        self.kill()
        await self.wait()
        return self.left

    def kill(self) -> None:
        if self._killing is None:
            self._killing = asyncio.create_task(self._end())

    async def _end(self) -> None:
        await self._server.stop()
        self.ended.set()


class Launcher(LaunchedEngines):
    """Engines in this process, on `gpus` GPUs."""

    def __init__(self, gpus: int) -> None:
        super().__init__(
            partial(server_command, CONFIG),
            self._free,
            api_key=None,
            log_dir=Path(),
            parallel_starts=4,
            control_timeout_s=WAIT_S,
            stop_timeout_s=1.0,
        )
        self.processes: list[Process] = []
        self.released: list[str] = []
        self.closed = False
        self.launching = asyncio.Event()
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.heedless = False
        """A launch that was begun ends with a process, cancelled or not."""
        self.url: str | None = None
        """What the next engines say that their address is."""
        self._gpus = gpus

    async def launch(self, name: str, gpus: Sequence[str]) -> Process:
        del name, gpus
        self.launching.set()
        while not self.may_start.is_set():
            try:
                await self.may_start.wait()
            except asyncio.CancelledError:
                if not self.heedless:
                    raise
        server = SimServer(SimConfig(tokens_per_second=500, max_model_len=512))
        await server.start()
        self.processes.append(Process(server, self.url))
        return self.processes[-1]

    def _free(self, taken: Sequence[Sequence[str]]) -> tuple[str, ...]:
        free = {str(gpu) for gpu in range(self._gpus)} - {gpu for gpus in taken for gpu in gpus}
        if not free:
            raise ConfigError("no GPU is free")
        return (min(free),)

    async def release(self, name: str) -> None:
        self.released.append(name)

    async def close(self) -> None:
        self.closed = True


@asynccontextmanager
async def launched(count: int, *, gpus: int = 8, **options: Any) -> AsyncIterator[tuple[Fleet, Launcher]]:
    """`count` engines on a GPU each."""
    launcher = Launcher(gpus)
    async with asyncio.timeout(5 * WAIT_S), router_here() as router:
        async with AsyncExitStack() as owned:
            admin = RouterAdmin(router.url)
            owned.push_async_callback(admin.close)
            owned.push_async_callback(launcher.end_all)
            attached = AttachedServers(api_key=None, control_timeout_s=WAIT_S)
            owned.push_async_callback(attached.close)
            members = [await launcher.start(Lifecycle(f"e{i}"), (str(i),)) for i in range(count)]
            fleet = await assemble(
                OpenRouter(router.url, admin),
                members,
                owned,
                Terms(FleetConfig(engines=count, **options), None, WAIT_S, WAIT_S, start_timeout_s=600.0),
                engines=launcher,
                attached=attached,
            )
        try:
            yield fleet, launcher
        finally:
            for process in launcher.processes:
                process.may_end.set()
            try:
                await asyncio.wait_for(fleet.teardown(), WAIT_S)
                assert launcher.closed
                assert all(process.ended.is_set() for process in launcher.processes), "nothing is left running"
            finally:
                for process in launcher.processes:
                    process.kill()
                    await process.wait()
