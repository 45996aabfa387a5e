"""Messages to the router that fail, come into force or not: it ends with the fleet's state, and what was done holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fleet_fakes import Bench, FakeProcess, FakeRouter, until

from patience import WAIT_S
from penstock import Fleet
from penstock.control_types import PauseMode
from penstock.errors import DeadlineError, EngineHTTPError, PenstockError
from penstock.fleet.member import State
from penstock.fleet.router_process import RouterGuard, keep_in_step
from penstock.fleet.running_router import Guard
from penstock.router.membership import EngineEntry, Membership
from penstock.settings import FleetConfig
from penstock.sim.config import SimConfig
from penstock.sim.server import SimServer
from sim_fleets import router_here
from virtual_time import virtual

LATE = DeadlineError("router http://127.0.0.1:1 did not answer within 10 s", seconds=10.0)
BUSY = EngineHTTPError("every process of the router is being started anew", status=503)


class Failing(FakeRouter):
    """A router that fails the next messages by these errors; a late one is in force all the same."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench.journal)
        self.failures: list[PenstockError | None] = []
        bench.router = bench.roster.admin = self

    async def announce(self, membership: Membership) -> None:
        error = self.failures.pop(0) if self.failures else None
        if error is not BUSY:
            await super().announce(membership)
        if error is not None:
            raise error


async def failing(names: str = "ab") -> tuple[Bench, Failing]:
    bench = Bench(names)
    router = Failing(bench)
    return await bench.started(), router


@asynccontextmanager
async def watched(bench: Bench) -> AsyncIterator[None]:
    """A router that the fleet started."""

    async def relaunch() -> Any:
        raise AssertionError("nothing has ended")

    guard = RouterGuard(FakeProcess(), relaunch)
    guard.watch(bench.roster, FleetConfig(health_interval_s=0.01))
    try:
        yield
    finally:
        await guard.stop()


@asynccontextmanager
async def settled(bench: Bench) -> AsyncIterator[None]:
    """A router that someone else started."""
    guard = Guard(bench.router)
    guard.watch(bench.roster, FleetConfig(health_interval_s=0.01))
    try:
        yield
    finally:
        await guard.stop()


OPERATIONS: dict[str, Callable[[Bench], Coroutine[Any, Any, Any]]] = {
    "pause": lambda bench: bench.operations.pause(PauseMode.KEEP, clear_cache=True),
    "update": lambda bench: bench.operations.update([], None),
    "sleep": lambda bench: bench.operations.sleep(1),
}


@pytest.mark.parametrize("error", [LATE, BUSY], ids=["late", "busy"])
@pytest.mark.parametrize("operation", OPERATIONS)
@virtual
async def test_a_gate_that_does_not_close_in_time_is_open_afterwards(operation: str, error: PenstockError) -> None:
    bench, router = await failing()
    router.failures = [error]
    with pytest.raises(type(error)):
        await OPERATIONS[operation](bench)
    assert not router.closed
    bench.check_belief()
    await OPERATIONS[operation](bench)


@pytest.mark.parametrize("keeper", [watched, settled])
@virtual
async def test_an_update_that_the_router_does_not_hear_of_is_committed_all_the_same(
    keeper: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bench, router = await failing()
    router.failures = [None, BUSY, BUSY]
    report = await bench.operations.update([], None)
    assert (report.version, [e.engine for e in report.engines]) == (1, ["a", "b"])
    assert bench.store.current is not None
    assert bench.store.current.version == bench.roster.version == 1
    assert (router.closed, router.serves()) == (True, {"a": 0, "b": 0})
    assert "does not know yet that its gate is open and its engines serve weight version 1: every proc" in caplog.text
    async with keeper(bench):
        await until(lambda: not router.closed)
        assert router.serves() == {"a": 1, "b": 1}
        bench.check_belief()


@virtual
async def test_an_engine_that_the_router_does_not_hear_of_has_joined_all_the_same() -> None:
    """It is well, and serves the fleet's weights: to start it anew for a call that came late would help nobody."""
    bench, router = await failing()
    member = bench.roster.members[1]
    await bench.roster.mark_dead(member, "died")
    member.lifecycle.to(State.LAUNCHING, "is started anew")
    member.lifecycle.to(State.SYNCING, "answers")
    router.failures = [BUSY]
    await bench.admission.admit(member)
    assert (member.state, router.serves()) == (State.SERVING, {"a": 0})
    await keep_in_step(bench.roster)
    assert router.serves() == {"a": 0, "b": 0}


@virtual
async def test_a_router_that_has_other_engines_is_told_again() -> None:
    bench, router = await failing()
    async with watched(bench):
        router.known = Membership(router.known.epoch + 3, (), closed=True)
        await until(lambda: router.serves() == {"a": 0, "b": 0} and not router.closed)
        await OPERATIONS["pause"](bench)
        bench.check_belief()


@virtual
async def test_an_operation_goes_on_when_a_router_that_stood_still_was_told_again() -> None:
    bench, router = await failing()
    async with watched(bench):  # a router that will be there again is waited for
        router.failures = [LATE]
        await asyncio.wait_for(OPERATIONS["pause"](bench), 5.0)
        assert router.closed
        bench.check_belief()


async def test_a_gate_that_was_left_closed_by_who_died_is_opened_by_who_connects() -> None:
    async with SimServer(SimConfig(tokens_per_second=500, max_model_len=512)) as server, router_here() as router:
        router.dispatcher.set_membership(Membership(3, (EngineEntry("e0", server.url),), closed=True))
        async with Fleet.connect([server.url], url=router.url) as fleet:
            out = await asyncio.wait_for(fleet.sample([1, 2], 1, {"max_tokens": 3}), WAIT_S)
            assert len(out[0].token_ids) == 3
            assert (await fleet.router_admin.engines()).epoch == 4
