"""A supervisor over fakes: engines to start, and a clock that only its own waits move."""

# ruff: noqa: FBT003 - positional as in the fakes

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from fleet_fakes import Bench, FakeEngine, FakeProcess, until

from penstock.engine.capabilities import EngineInfo
from penstock.errors import EngineStartError
from penstock.fleet.member import Lifecycle, Member, State
from penstock.fleet.supervise import Supervisor
from penstock.process import Clock, RestartBudget, Sleep
from penstock.settings import FleetConfig

NEVER = FleetConfig(health_interval_s=3600.0)


class FakeEngines:
    """Starts fakes in the place of processes."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.failing = 0
        self.starts: list[tuple[str, tuple[str, ...]]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def start(self, lifecycle: Lifecycle, gpus: Sequence[str]) -> Member:
        name = lifecycle.engine
        self.starts.append((name, tuple(gpus)))
        await self.gate.wait()
        if self.failing:
            self.failing -= 1
            lifecycle.to(State.DEAD, "port taken")
            raise EngineStartError("port taken", engine=name)
        lifecycle.to(State.SYNCING, "answers with weight version 0")
        faults, busy = self.bench.engine[name].faults, self.bench.engine[name].busy
        fake = self.bench.engine[name] = FakeEngine(name, self.bench.journal)
        fake.faults = {step: kind for step, kind in faults.items() if step.startswith("again ")}
        fake.busy = busy
        fake.faults |= {step.removeprefix("again "): kind for step, kind in fake.faults.items()}
        process = self.bench.process[name] = FakeProcess()
        info = EngineInfo("fake", "0", 0, False, 1, 1, 1, 32, 64, ("shared_memory",))
        return Member(name, f"http://127.0.0.1:{90 + len(self.starts)}", fake, info, lifecycle, 0, process=process)


def supervisor_of(
    bench: Bench, fleet: FleetConfig, *, clock: Clock = time.monotonic, sleep: Sleep = asyncio.sleep
) -> Supervisor:
    """A supervisor of a bench, as `Fleet.launch` makes it."""
    return Supervisor(
        bench.roster,
        admit=bench.admission.admit,
        check=bench.operations.check,
        budget=lambda: RestartBudget(fleet.max_restarts, fleet.restart_window_s, fleet.restart_backoff_s, clock),
        interval_s=fleet.health_interval_s,
        hang_s=fleet.hang_timeout_s,
        sleep=sleep,
    )


class Restarts:
    """A supervisor with engines to start, over a clock that only its own waits move."""

    def __init__(self, bench: Bench, fleet: FleetConfig = NEVER) -> None:
        self.now = 0.0
        self.waits: list[float] = []
        self.engines = FakeEngines(bench)
        self.supervisor = supervisor_of(bench, fleet, clock=lambda: self.now, sleep=self.sleep)
        for member in bench.roster.members:
            member.again = partial(self.engines.start, member.lifecycle, member.gpus)
            self.supervisor.watch(member)

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds
        await asyncio.sleep(0.001)  # virtual time stands still while something is ready to run


@asynccontextmanager
async def watched(bench: Bench, fleet: FleetConfig) -> AsyncIterator[None]:
    supervisor = supervisor_of(bench, fleet)
    for member in bench.roster.members:
        supervisor.watch(member)
    try:
        yield
    finally:
        await supervisor.stop()


@asynccontextmanager
async def restarting(bench: Bench, fleet: FleetConfig = NEVER) -> AsyncIterator[Restarts]:
    restarts = Restarts(bench, fleet)
    await asyncio.sleep(0)
    try:
        yield restarts
    finally:
        await restarts.supervisor.stop()


async def until_dead(bench: Bench, name: str) -> str:
    await until(lambda: bench.state(name) is State.DEAD and name not in bench.router.serves())
    return next(m.lifecycle.reason for m in bench.roster.members if m.name == name)


async def until_serves(bench: Bench, name: str, version: int) -> None:
    await until(lambda: bench.router.serves().get(name) == version)


async def dies_and_returns(bench: Bench, restarts: Restarts, name: str, version: int) -> None:
    starts = len(restarts.engines.starts)
    bench.process[name].kill()
    await until(lambda: len(restarts.engines.starts) > starts)
    await until_serves(bench, name, version)


async def begins_to_return(bench: Bench, restarts: Restarts, name: str) -> None:
    """It is dead, and its next start waits for `restarts.engines.gate`."""
    restarts.engines.gate.clear()
    bench.process[name].kill()
    await until(lambda: bench.state(name) is State.LAUNCHING and name not in bench.router.serves())
