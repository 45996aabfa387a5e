"""Calls to the router that fail or come into force late: its gate ends where it is to be, and what was done holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fleet_fakes import Bench, FakeProcess, FakeRouter, until

from penstock import Fleet
from penstock.aio import cancelled
from penstock.errors import DeadlineError, EngineHTTPError, PenstockError
from penstock.fleet.member import State
from penstock.fleet.router_process import RouterGuard, settle
from penstock.router import EngineEntry
from penstock.router.admin_client import RouterAdmin
from penstock.router.server import Router
from penstock.settings import FleetConfig
from penstock.sim.config import SimConfig
from penstock.sim.server import SimServer
from penstock.types import PauseMode

LATE = DeadlineError("router http://127.0.0.1:1 did not answer within 10 s", seconds=10.0)
BUSY = EngineHTTPError("every process of the router is being started anew", status=503)


class Failing(FakeRouter):
    """A router whose calls fail when they are in force already, as long as `failures` has an error for them."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench.journal)
        self.failures: dict[str, list[PenstockError]] = {"gate": [], "set": []}
        bench.router = bench.roster.admin = self

    async def gate(self, closed: bool) -> None:  # noqa: FBT001 - the router's own signature
        await super().gate(closed)
        self._fail("gate")

    async def set_engines(self, epoch: int, engines: Sequence[EngineEntry], cut: Sequence[str] = ()) -> None:
        if not self.failures["set"]:
            await super().set_engines(epoch, engines, cut)
        self._fail("set")

    def _fail(self, call: str) -> None:
        if self.failures[call]:
            raise self.failures[call].pop(0)


async def failing(names: str = "ab") -> tuple[Bench, Failing]:
    bench = Bench(names)
    router = Failing(bench)
    return await bench.started(), router


OPERATIONS: dict[str, Callable[[Bench], Coroutine[Any, Any, Any]]] = {
    "pause": lambda bench: bench.operations.pause(PauseMode.KEEP, clear_cache=True),
    "update": lambda bench: bench.operations.update([], None),
    "sleep": lambda bench: bench.operations.sleep(1),
}


@pytest.mark.parametrize("error", [LATE, BUSY], ids=["late", "busy"])
@pytest.mark.parametrize("operation", OPERATIONS)
async def test_a_gate_that_closes_after_its_deadline_is_opened_again(operation: str, error: PenstockError) -> None:
    bench, router = await failing()
    router.failures["gate"] = [error]
    with pytest.raises(type(error)):
        await OPERATIONS[operation](bench)
    assert not router.closed
    bench.check_belief()
    await OPERATIONS[operation](bench)


async def test_a_router_is_told_once_that_its_gate_is_closed_and_again_where_it_may_not_have_heard() -> None:
    bench, router = await failing()
    bench.roster.router_returns = True

    def told() -> list[str]:
        said = [what for who, what in bench.journal if who == "router" and what.startswith("gate")]
        bench.journal.clear()
        return said

    bench.journal.clear()
    await OPERATIONS["pause"](bench)
    assert told() == ["gate closed"]
    await OPERATIONS["update"](bench)
    assert told() == [], "held engines do not wait for a router that has answered"
    await bench.operations.resume()
    assert told() == ["gate open"]
    bench.roster.router_returns = False
    await OPERATIONS["pause"](bench)
    told()
    await OPERATIONS["update"](bench)
    assert told() == ["gate closed", "gate closed"], "one that others keep up may have been started anew"
    await bench.operations.resume()
    router.failures["gate"] = [LATE]
    with pytest.raises(DeadlineError):
        await OPERATIONS["pause"](bench)
    told()
    await OPERATIONS["pause"](bench)
    assert "gate closed" in told()


async def test_an_update_whose_engines_the_router_does_not_take_is_committed_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench, router = await failing()
    router.failures["set"] = [LATE]
    report = await bench.operations.update([], None)
    assert (report.version, [e.engine for e in report.engines]) == (1, ["a", "b"])
    assert bench.store.current is not None
    assert bench.store.current.version == bench.roster.version == 1
    assert not router.closed
    assert router.serves() == {"a": 0, "b": 0}
    assert "the router does not know yet that its engines serve weight version 1: router http" in caplog.text
    await bench.roster.check_router()
    bench.check_belief()


async def test_an_engine_that_the_router_does_not_hear_of_has_joined_all_the_same() -> None:
    """It is well, and serves the fleet's weights: to start it anew for a call that came late would help nobody."""
    bench, router = await failing()
    member = bench.roster.members[1]
    await bench.roster.mark_dead(member, "died")
    member.lifecycle.to(State.LAUNCHING, "is started anew")
    member.lifecycle.to(State.SYNCING, "answers")
    router.failures["set"] = [LATE]
    await bench.operations.admit(member)
    assert (member.state, router.serves()) == (State.SERVING, {"a": 0})
    await bench.roster.check_router()
    assert router.serves() == {"a": 0, "b": 0}


async def test_a_native_update_that_the_router_does_not_hear_of_is_committed_too() -> None:
    bench, router = await failing()
    await bench.operations.pause(PauseMode.KEEP, clear_cache=True)
    router.failures["set"] = [BUSY]
    await bench.operations.native.update({}, 1)
    await bench.roster.check_router()
    bench.check_belief()


async def test_a_gate_that_cannot_be_opened_fails_nothing_and_is_opened_by_who_watches_the_router(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench, router = await failing()
    close = router.gate

    async def gate(closed: bool) -> None:  # noqa: FBT001 - the router's own signature
        if not closed:
            raise LATE
        await close(closed)

    router.gate = gate  # type: ignore[method-assign]
    report = await bench.operations.update([], None)
    assert report.version == 1
    assert router.closed
    assert "the router does not know yet that its gate is open now" in caplog.text
    async with watched(bench):
        router.gate = close  # type: ignore[method-assign]
        await until(lambda: not router.closed)
        bench.check_belief()


@asynccontextmanager
async def watched(bench: Bench, **options: float) -> AsyncIterator[RouterChild]:
    """A router that the fleet started."""

    async def relaunch(*_: object) -> Any:
        raise AssertionError("nothing has ended")

    child = RouterChild()
    guard = RouterGuard(child, relaunch)
    guard.watch(bench.roster, FleetConfig(health_interval_s=0.01, **options))
    try:
        yield child
    finally:
        await guard.stop()


class RouterChild(FakeProcess):
    async def stop(self, timeout_s: float = 0.0) -> None:
        await super().stop(timeout_s)


@asynccontextmanager
async def settled(bench: Bench) -> AsyncIterator[None]:
    """A router that someone else started."""
    task = asyncio.create_task(settle(bench.roster, 0.01))
    try:
        yield
    finally:
        await cancelled(task)


async def test_a_router_that_has_another_gate_or_other_engines_is_told_again() -> None:
    bench, router = await failing()
    async with watched(bench):
        router.closed = True  # by a call that nobody waits for any more
        await until(lambda: not router.closed)
        router.epoch, router.set = router.epoch + 3, ()
        await until(lambda: router.serves() == {"a": 0, "b": 0})
        await OPERATIONS["pause"](bench)
        router.closed = False
        await until(lambda: router.closed)
        bench.check_belief()


async def test_a_router_that_is_as_it_was_told_is_left_alone() -> None:
    bench, router = await failing()
    questions = 0
    ask = router.engines

    async def engines() -> Any:
        nonlocal questions
        questions += 1
        return await ask()

    router.engines = engines  # type: ignore[method-assign]
    async with watched(bench):
        await until(lambda: questions > 3)
    assert bench.journal == []


async def test_a_router_that_answers_lives_though_it_does_not_take_its_engines() -> None:
    bench, router = await failing()
    async with watched(bench, hang_timeout_s=0.3) as child:
        router.failures["set"] = [BUSY] * 60
        with pytest.raises(EngineHTTPError):
            await bench.roster.push_membership()
        await until(lambda: not bench.roster.router_uncertain)
        assert not child.killed


async def test_what_a_call_changes_between_question_and_answer_is_no_difference() -> None:
    bench, router = await failing()
    asked, go = asyncio.Event(), asyncio.Event()
    ask = router.engines

    async def engines() -> Any:
        state = await ask()
        asked.set()
        await go.wait()
        return state

    router.engines = engines  # type: ignore[method-assign]
    checking = asyncio.create_task(bench.roster.check_router())
    await asked.wait()
    await bench.roster.gate(closed=True)
    go.set()
    await checking
    assert bench.journal == [("router", "gate closed")]


async def test_an_operation_goes_on_when_a_router_that_stood_still_was_told_again() -> None:
    bench, router = await failing()
    router.failures["gate"] = [LATE]
    async with watched(bench):  # a router that will be there again is waited for
        await asyncio.wait_for(OPERATIONS["pause"](bench), 5.0)
        assert router.closed
        bench.check_belief()


async def test_a_gate_that_failed_to_close_is_not_taken_for_closed_by_a_restoration_that_was_under_way() -> None:
    bench, router = await failing()
    bench.roster.router_returns = True
    pushing, go, take = asyncio.Event(), asyncio.Event(), router.set_engines

    async def set_engines(*given: Any) -> None:
        pushing.set()
        await go.wait()
        await take(*given)

    router.set_engines = set_engines  # type: ignore[method-assign]
    restoring = asyncio.create_task(bench.roster.restore())
    await pushing.wait()
    closing = asyncio.create_task(bench.roster.gate(closed=True))
    await asyncio.sleep(0)
    say, late = router.gate, [True]

    async def gate(closed: bool) -> None:  # noqa: FBT001 - the router's own signature
        if closed and late:
            late.clear()
            raise LATE
        await say(closed)

    router.gate = gate  # type: ignore[method-assign]
    go.set()
    await restoring
    await until(lambda: bench.roster.router_uncertain)
    assert not closing.done()
    assert not router.closed
    await bench.roster.restore()
    await closing
    assert router.closed


async def test_a_router_of_others_is_told_again_until_it_has_taken_it_and_once_more() -> None:
    bench, router = await failing()
    say, late = router.gate, [True]

    async def gate(closed: bool) -> None:  # noqa: FBT001 - the router's own signature
        await say(closed)
        if router.serves() == {"a": 1, "b": 1} and late:
            late.clear()
            router.closed = True  # a call that had failed comes into force now

    router.gate = gate  # type: ignore[method-assign]
    async with settled(bench):
        router.failures["set"] = [BUSY] * 3
        assert (await bench.operations.update([], None)).version == 1
        assert router.serves() == {"a": 0, "b": 0}
        await until(lambda: not late and not router.closed)
        bench.check_belief()


async def test_a_gate_that_was_left_closed_by_who_died_is_opened_by_who_connects() -> None:
    async with SimServer(SimConfig(tokens_per_second=500, max_model_len=512)) as server:
        router = Router()
        await router.start("127.0.0.1", 0)
        admin = RouterAdmin(router.url)
        try:
            await admin.set_engines(3, [EngineEntry("e0", server.url)])
            await admin.gate(closed=True)
            async with Fleet.connect([server.url], url=router.url) as fleet:
                out = await asyncio.wait_for(fleet.sample([1, 2], 1, {"max_tokens": 3}), 5.0)
                assert len(out[0].token_ids) == 3
                assert (await admin.engines()).epoch == 4
        finally:
            await admin.close()
            await router.close()
