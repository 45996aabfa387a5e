"""Deaths over fakes, in virtual time: what is noticed, and when."""

from __future__ import annotations

import asyncio

import pytest
from fleet_fakes import Bench, on_bench, until
from supervise_rig import NEVER, restarting, until_dead, until_serves, watched

from penstock.control_types import CoreState, PauseMode
from penstock.fleet.member import State
from penstock.fleet.pausing import AllOperations as Operations
from penstock.settings import FleetConfig

# --- a core that says nothing, behind a server that is well -----------------------------------------------------------

SLOW_HEALTH = {"health_interval_s": 0.01, "hang_timeout_s": 0.15}


@on_bench("ab")
async def test_a_core_whose_connection_breaks_is_asked_at_once(bench: Bench) -> None:
    async with watched(bench, NEVER):
        await asyncio.sleep(0)
        bench.engine["a"].faults["question"] = "die"
        bench.engine["a"].gone.set()
        assert await until_dead(bench, "a") == "health check failed: engine a: connection broke at question"
        assert bench.router.serves() == {"b": 0}


@pytest.mark.parametrize("kind", ["refuse", "garbage"])
@on_bench("ab")
async def test_any_answer_of_a_core_is_a_sign_of_life(bench: Bench, kind) -> None:
    bench.engine["a"].faults["question"] = kind
    async with watched(bench, FleetConfig(**SLOW_HEALTH)):
        # One every 15 ms at most: that is twice the time after which it would be dead.
        await until(lambda: bench.journal.count(("a", "question")) > 20)
        assert bench.state("a") is State.SERVING


@on_bench("ab")
async def test_a_core_may_be_silent_while_a_call_of_ours_keeps_it_busy(bench: Bench) -> None:
    bench.operations = Operations(
        bench.roster, bench.store, FleetConfig(), control_timeout_s=60.0, request_timeout_s=60.0
    )
    engine = bench.engine["a"]
    engine.health = lambda _: asyncio.sleep(0)  # its server is not its core
    async with watched(bench, FleetConfig(**SLOW_HEALTH)):
        for keep_busy in (
            lambda: bench.operations.update([], None),
            lambda: bench.operations.sleep(1),
            lambda: bench.operations.wake_up(None),
            lambda: bench.operations.collective_rpc("save", 60.0, (), None),
            lambda: bench.operations.adapters.load("style", "/adapters/style", 60.0),
        ):
            asked = bench.journal.count(("a", "question"))
            engine.busy.clear()
            await until(lambda before=asked: bench.journal.count(("a", "question")) > before)  # and is not answered
            busy = asyncio.create_task(keep_busy())
            await asyncio.sleep(0.4)
            assert not busy.done()
            assert bench.state("a") is State.SERVING, "its silence is that of the call"
            engine.busy.set()
            await busy
        engine.faults["question"] = "hang"
        await until_dead(bench, "a")


@on_bench("ab")
async def test_a_pause_that_waits_hides_no_core_that_hangs(bench: Bench) -> None:
    bench.operations._request_s = 3600.0
    engine = bench.engine["a"]
    async with watched(bench, FleetConfig(**SLOW_HEALTH)):
        engine.faults |= {"pause": "hang", "question": "hang"}
        pausing = asyncio.create_task(bench.operations.pause(PauseMode.WAIT, clear_cache=True))
        await until_dead(bench, "a")
        pausing.cancel()
        await asyncio.gather(pausing, return_exceptions=True)


# --- what somebody else does to an engine ----------------------------------------------------------------------------


@pytest.mark.parametrize("paused", [True, False])
@on_bench("ab")
async def test_an_engine_that_another_process_pauses_or_resumes_is_brought_back(bench: Bench, *, paused: bool) -> None:
    async with watched(bench, FleetConfig(health_interval_s=0.01)):
        if not paused:
            await bench.operations.pause(PauseMode.KEEP, clear_cache=True)
        bench.engine["a"].paused = paused
        await until(lambda: bench.engine["a"].paused is not paused)
        bench.check_belief()
    assert State.DEAD not in [c.new for c in bench.roster.members[0].lifecycle.history]


@on_bench("a")
async def test_an_answer_from_before_a_call_of_ours_changes_nothing(bench: Bench) -> None:
    (member,) = bench.roster.members
    answer = asyncio.get_running_loop().create_future()
    checking = asyncio.create_task(bench.operations.check(member, answer))
    await asyncio.sleep(0)
    await bench.operations.pause(PauseMode.KEEP, clear_cache=True)
    answer.set_result(CoreState(paused=False, weight_version=0, torn=False, foreign=0))
    await checking
    assert member.state is State.PAUSED


@pytest.mark.parametrize(("what", "value"), [("version", 7), ("torn", True), ("foreign", 7), ("checksum", "sum-7")])
@on_bench("ab")
async def test_an_engine_whose_weights_somebody_else_changed_gets_those_of_the_fleet(
    bench: Bench, what: str, value: object
) -> None:
    async with restarting(bench, FleetConfig(health_interval_s=0.01)) as restarts:
        await bench.operations.update([], None)
        member = bench.roster.members[0]
        await until(lambda: member.foreign == 0)
        setattr(bench.engine["a"], what, value)
        await until(lambda: bool(restarts.engines.starts))
        await until_serves(bench, "a", 1)
        (reason,) = [change.reason for change in member.lifecycle.history if change.new is State.DEAD]
        assert reason.startswith(("another process", "its weights were dropped or half written by another process"))
        bench.check_belief()


@on_bench("ab")
async def test_operations_of_the_fleet_itself_restart_no_engine(bench: Bench) -> None:
    async with restarting(bench, FleetConfig(health_interval_s=0.001)) as restarts:

        async def counts() -> list[str]:
            bench.engine["a"].foreign += 1
            await asyncio.sleep(0.01)
            return []

        bench.engine["a"].collective_rpc = lambda *_: counts()
        for _ in range(5):
            await bench.operations.update([], None)
            await bench.operations.collective_rpc("save", 60.0, (), None)
            await bench.operations.pause(PauseMode.KEEP, clear_cache=True)
            await asyncio.sleep(0.01)
            await bench.operations.native.update({}, bench.roster.version + 1)
            await bench.operations.resume()
            await bench.operations.sleep(1)
            await asyncio.sleep(0.01)
            await bench.operations.wake_up(None)
        await until(lambda: bench.roster.members[0].foreign == 5)
        assert restarts.engines.starts == []
