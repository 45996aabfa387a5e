from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fleet_fakes import Bench, until

from penstock.errors import DeadlineError
from penstock.fleet.lifecycle import State
from penstock.fleet.supervise import HUNG_CHECKS, Supervisor


@asynccontextmanager
async def watched(bench: Bench, interval_s: float) -> AsyncIterator[None]:
    supervisor = Supervisor(bench.roster, health_interval_s=interval_s)
    for member in bench.roster.members:
        supervisor.watch(member)
    try:
        yield
    finally:
        await supervisor.stop()


async def until_dead(bench: Bench, name: str) -> str:
    await until(lambda: bench.state(name) is State.DEAD and name not in bench.router.serves())
    return next(m.lifecycle.reason for m in bench.roster.members if m.name == name)


async def test_an_exit_is_noticed_by_event_not_by_the_next_health_check() -> None:
    bench = await Bench("ab").started()
    async with watched(bench, 3600.0):
        bench.process["a"].kill()
        assert await until_dead(bench, "a") == "its process exited with status -9"
        assert bench.router.serves() == {"b": 0}


@pytest.mark.parametrize("kind", ["die", "refuse"])
async def test_a_failed_health_check_takes_an_engine_out(kind) -> None:
    bench = await Bench("ab").started()
    async with watched(bench, 0.01):
        bench.engine["b"].faults["health"] = kind
        assert (await until_dead(bench, "b")).startswith("health check failed: engine b: ")
        assert bench.process["b"].killed
        await asyncio.sleep(0.05)
        assert bench.state("a") is State.SERVING


async def test_a_hang_is_many_late_answers_in_a_row() -> None:
    bench = await Bench("ab").started()
    answers = iter([*[False] * (HUNG_CHECKS - 1), True, *[False] * HUNG_CHECKS])
    checks = 0

    async def health() -> None:
        nonlocal checks
        checks += 1
        if not next(answers):
            raise DeadlineError("no answer", seconds=5.0, engine="a")

    bench.engine["a"].health = health
    async with watched(bench, 0.001):
        reason = await until_dead(bench, "a")
    assert checks == 2 * HUNG_CHECKS, "one answer in time begins the count anew"
    assert reason.startswith(f"{HUNG_CHECKS} health checks without an answer")
