"""Pause, resume, sleep, wake and the rest over fakes: the fleet believes of every engine what it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from fleet_fakes import DEADLINE_S, Bench, Kind, on_bench, until

from patience import give_up
from penstock.control_types import PauseMode
from penstock.errors import (
    DeadlineError,
    EngineDeadError,
    EngineHTTPError,
    FanOutError,
    StateError,
    UpdateError,
    UserError,
)
from penstock.fleet.member import State, fan_out
from penstock.fleet.pausing import raise_for
from penstock.fleet.router_process import keep_in_step
from penstock.fleet.supervise import start_serving
from penstock.router.membership import Membership
from virtual_time import virtual

KINDS: list[Kind] = ["refuse", "hang", "die", "garbage"]


async def pause(bench: Bench, mode: PauseMode = PauseMode.KEEP) -> None:
    await bench.operations.pause(mode, clear_cache=True)


@on_bench("ab")
async def test_pause_closes_the_gate_first_and_resume_opens_it_last(bench: Bench) -> None:
    await bench.operations.pause(PauseMode.ABORT, clear_cache=False)
    assert bench.journal[0] == ("router", "gate closed")
    assert bench.router.closed
    assert bench.engine["a"].calls["pause"] == (PauseMode.ABORT, False, DEADLINE_S)
    bench.check_belief()
    bench.journal.clear()
    await bench.operations.resume()
    assert bench.journal[-1] == ("router", "gate open")


@on_bench("a")
async def test_pause_wait_has_the_deadline_of_a_request(bench: Bench) -> None:
    bench.engine["a"].busy.clear()
    call = asyncio.create_task(pause(bench, PauseMode.WAIT))
    await asyncio.sleep(2 * DEADLINE_S)
    bench.engine["a"].busy.set()
    await call
    assert bench.state("a") is State.PAUSED


@on_bench("abc")
async def test_a_pause_that_takes_longer_than_it_may_is_taken_back_and_nobody_dies_of_it(bench: Bench) -> None:
    bench.engine["b"].idle.clear()
    with pytest.raises(DeadlineError, match=r"pause \(wait\) took longer than 0.03 s; every engine goes on"):
        await bench.operations.pause(PauseMode.WAIT, clear_cache=True, timeout_s=0.03)
    assert {bench.state(name) for name in "abc"} == {State.SERVING}
    assert ("a", "resume") in bench.journal
    assert ("b", "resume") in bench.journal
    assert not bench.router.closed
    bench.check_belief()
    bench.engine["b"].idle.set()
    await bench.operations.pause(PauseMode.WAIT, clear_cache=True, timeout_s=5.0)


@on_bench("a")
async def test_a_pause_that_waited_for_another_operation_names_it_and_no_request_as_the_cause(bench: Bench) -> None:
    bench.engine["a"].faults["sleep"] = "hang"
    sleeping = asyncio.create_task(bench.operations.sleep(1))
    await until(lambda: bench.operations.queue.turns)
    with pytest.raises(DeadlineError, match="waited for an earlier operation of this fleet"):
        await bench.operations.pause(PauseMode.WAIT, clear_cache=True, timeout_s=0.01)
    assert "pause" not in {step for _, step in bench.journal}
    with pytest.raises(EngineDeadError):
        await sleeping


@on_bench("abc")
async def test_an_engine_that_cannot_go_on_after_a_pause_was_taken_back_is_dead(bench: Bench) -> None:
    bench.engine["a"].faults["pause"] = "die"
    bench.engine["b"].faults |= {"pause": "hang", "resume": "refuse"}
    with pytest.raises(DeadlineError, match="took longer than"):
        await bench.operations.pause(PauseMode.WAIT, clear_cache=True, timeout_s=0.03)
    assert bench.router.serves() == {"c": 0}
    assert not bench.router.closed
    bench.check_belief()
    with pytest.raises(UserError, match="timeout_s of a pause must be positive, got 0"):
        await bench.operations.pause(PauseMode.WAIT, clear_cache=True, timeout_s=0.0)


# --- a pause that waits for requests ---------------------------------------------------------------------------------


async def waiting_for_requests(bench: Bench, *queued: Callable[[], Coroutine[Any, Any, None]]) -> Sequence[Any]:
    """A pause that waits for the requests of engine b, and what was queued behind it as it was queued itself."""
    bench.engine["b"].busy.clear()
    bench.engine["b"].idle.clear()
    update = asyncio.create_task(bench.operations.update([], None))
    await asyncio.sleep(0)
    tasks = [asyncio.create_task(pause(bench, PauseMode.WAIT))]
    for operation in queued:
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(operation()))
    await asyncio.sleep(0)
    bench.engine["b"].busy.set()
    await update
    await until(lambda: ("b", "pause") in bench.journal)
    return tasks


@on_bench("ab")
async def test_an_abort_queued_behind_a_pause_passes_it_and_so_ends_it(bench: Bench) -> None:
    """One that comes later: `test_real_fleet.py`."""
    pausing, aborting = await waiting_for_requests(bench, bench.operations.abort)
    async with asyncio.timeout(5.0):
        await asyncio.gather(aborting, pausing)
    assert {bench.state(name) for name in "ab"} == {State.PAUSED}


@on_bench("ab")
async def test_a_resume_queued_behind_a_pause_ends_it(bench: Bench) -> None:
    pausing, resuming = await waiting_for_requests(bench, bench.operations.resume)
    async with asyncio.timeout(5.0):
        await resuming
        assert not bench.router.closed
        bench.check_belief()
        with pytest.raises(StateError, match="ended while it waited for requests; every engine goes on as before"):
            await pausing


@on_bench("ab")
async def test_a_resume_as_a_pause_has_ended_its_wait_resumes(bench: Bench) -> None:
    (pausing,) = await waiting_for_requests(bench)
    bench.engine["b"].idle.set()
    async with asyncio.timeout(5.0):
        await bench.operations.resume()
        await asyncio.gather(pausing, return_exceptions=True)
    assert not bench.operations.paused


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", ["pause", "resume"])
@on_bench("abc")
async def test_an_engine_that_fails_to_pause_or_resume_is_dead_and_the_others_go_on(
    bench: Bench, step: str, kind
) -> None:
    bench.engine["b"].faults[step] = kind
    await pause(bench)
    await bench.operations.resume()
    assert bench.state("b") is State.DEAD
    assert bench.router.serves() == {"a": 0, "c": 0}
    assert not bench.router.closed


@pytest.mark.parametrize("step", ["pause", "resume"])
@on_bench("ab")
async def test_when_none_is_left_the_gate_is_open_and_the_caller_is_told(bench: Bench, step: str) -> None:
    for engine in bench.engine.values():
        engine.faults[step] = "die"
    if step == "resume":
        await pause(bench)
    failing = bench.operations.resume() if step == "resume" else pause(bench)
    with pytest.raises(EngineDeadError, match=f"{step}.*: no engine is left"):
        await failing
    assert not bench.router.closed
    assert not bench.operations.paused


@pytest.mark.parametrize("mode", list(PauseMode))
@virtual
async def test_a_pause_cancelled_at_any_moment_is_undone(mode: PauseMode) -> None:
    for moment in range(1000):
        bench = await Bench("ab").started()
        caller = asyncio.create_task(pause(bench, mode))
        for _ in range(moment):
            await asyncio.sleep(0)
        if caller.done():
            break
        await give_up(caller)
        await until(lambda ops=bench.operations: not (ops.paused or ops.queue.turns))
        assert not bench.router.closed
        bench.check_belief()
    assert moment > len(["gate", "pause", "gate"])
    assert bench.operations.paused


@on_bench("ab")
async def test_a_pause_cancelled_while_the_router_hangs_is_undone_before_the_router_goes_on(bench: Bench) -> None:
    """Its deadline is over too, so its caller waits for the last call to the router."""
    announce, goes_on = bench.router.announce, asyncio.Event()

    async def hangs(membership: Membership) -> None:
        if bench.engine["a"].paused and not goes_on.is_set():
            await asyncio.sleep(10.0)
            raise DeadlineError("the router did not answer", seconds=10.0)
        await announce(membership)

    bench.router.announce = hangs
    caller = asyncio.create_task(bench.operations.pause(PauseMode.KEEP, clear_cache=True, timeout_s=1.0))
    await asyncio.sleep(2.0)
    assert bench.operations.paused
    await give_up(caller)
    await until(lambda: not (bench.operations.paused or bench.operations.queue.turns))
    assert {bench.state(name) for name in "ab"} == {State.SERVING}
    goes_on.set()
    await keep_in_step(bench.roster)
    assert not bench.router.closed


@on_bench("ab")
async def test_a_pause_cancelled_while_it_waits_its_turn_never_happens(bench: Bench) -> None:
    bench.engine["b"].busy.clear()
    update = asyncio.create_task(bench.operations.update([], None))
    await asyncio.sleep(0)
    caller = asyncio.create_task(pause(bench))
    await asyncio.sleep(0)
    caller.cancel()
    bench.engine["b"].busy.set()
    await update
    assert not bench.operations.paused


@pytest.mark.parametrize("step", ["abort", "reset", "sleep"])
@on_bench("ab")
async def test_a_refusal_by_all_is_the_callers_error_and_kills_nobody(bench: Bench, step: str) -> None:
    for engine in bench.engine.values():
        engine.faults[step] = "refuse"
    with pytest.raises(EngineHTTPError, match=f"engine a: no {step}"):
        await {
            "abort": bench.operations.abort,
            "reset": bench.operations.reset_prefix_cache,
            "sleep": lambda: bench.operations.sleep(1),
        }[step]()
    assert not bench.router.closed
    bench.check_belief()
    assert len(bench.roster.live()) == 2


@pytest.mark.parametrize("kind", KINDS)
@on_bench("abc")
async def test_a_failure_of_some_takes_these_out(bench: Bench, kind: Kind) -> None:
    bench.engine["c"].faults["sleep"] = kind
    await bench.operations.sleep(1)
    assert [m.name for m in bench.roster.live()] == ["a", "b"]
    assert bench.router.closed
    await bench.operations.wake_up(None)
    assert not bench.router.closed


@pytest.mark.parametrize(("tags", "told"), [(["weights", "kv_cache"], ["kv_cache"]), (["kv_cache"], ["kv_cache"])])
@on_bench("ab")
async def test_engines_are_not_asked_for_memory_that_is_back(bench: Bench, tags: list[str], told: list[str]) -> None:
    """Of such a call vLLM says "not in sleeping tags", answers 200, and takes nothing back."""
    await bench.operations.sleep(1)
    await bench.operations.wake_up(["weights"])
    bench.journal.clear()
    await bench.operations.wake_up(["weights"])
    assert bench.router.closed
    assert not [said for who, said in bench.journal if who != "router"]
    await bench.operations.wake_up(tags)
    assert [engine.calls["wake"] for engine in bench.engine.values()] == [told, told]
    assert not bench.router.closed


@on_bench("ab")
async def test_a_paused_fleet_that_slept_is_still_paused_though_waking_resumes_engines(bench: Bench) -> None:
    await pause(bench)
    await bench.operations.sleep(1)
    await bench.operations.wake_up(["weights"])
    await bench.operations.wake_up(["kv_cache"])
    assert bench.router.closed
    bench.check_belief()
    await bench.operations.resume()
    assert not bench.router.closed


@on_bench("a")
async def test_unknown_sleep_levels_and_tags(bench: Bench) -> None:
    with pytest.raises(UserError, match="sleep level must be 1 or 2"):
        await bench.operations.sleep(3)
    with pytest.raises(UserError, match=r"unknown memory tags \['kv'\]; known: kv_cache, weights"):
        await bench.operations.wake_up(["kv"])
    assert bench.journal == []


@on_bench("abc")
async def test_a_native_update_needs_a_pause_and_labels_every_engine(bench: Bench) -> None:
    with pytest.raises(StateError, match="pause generation before"):
        await bench.operations.native.update({}, 1)
    await pause(bench)
    bench.engine["b"].faults["native"] = "hang"
    await bench.operations.native.update({}, 1)
    assert bench.state("b") is State.DEAD
    bench.check_belief()
    with pytest.raises(UserError, match="not greater"):
        await bench.operations.native.update({}, 1)


@on_bench()
async def test_a_native_update_of_weights_that_sleep_is_refused_before_anyone_is_asked(bench: Bench) -> None:
    await bench.operations.pause(PauseMode.KEEP, clear_cache=True)
    await bench.operations.sleep(1)
    bench.journal.clear()
    with pytest.raises(StateError, match=r"wake_up\(\['weights'\]\) before an update"):
        await bench.operations.native.update({}, 1)
    assert bench.journal == []
    await bench.operations.wake_up(["weights"])
    await bench.operations.native.update({}, 1)
    assert bench.roster.version == 1


@pytest.mark.parametrize("way", ["update", "native"])
@on_bench("ab")
async def test_a_number_that_an_engine_may_have_served_is_given_to_no_other_weights(bench: Bench, way: str) -> None:
    for engine in bench.engine.values():
        engine.faults |= {"apply-resume": "die", "native": "die"}
    if way == "native":
        await pause(bench)
        with pytest.raises(EngineDeadError):
            await bench.operations.native.update({}, 1)
    else:
        with pytest.raises(UpdateError):
            await bench.operations.update([], 1)
    assert bench.roster.version == 0
    with pytest.raises(UserError, match="weight version 1 is not greater than 1, under which engines may"):
        await bench.operations.update([], 1)
    with pytest.raises(UpdateError, match="weight version 2 was not committed"):
        await bench.operations.update([], None)


@on_bench("ab", settled=False)
async def test_after_a_close_nothing_begins_and_what_runs_is_cut_short(bench: Bench) -> None:
    bench.engine["a"].faults["pause"] = "hang"
    bench.operations._control_s = 60.0
    running = asyncio.create_task(pause(bench))
    await until(lambda: ("a", "pause") in bench.journal)
    await asyncio.wait_for(bench.operations.close(), 30.0)
    with pytest.raises(StateError, match="torn down in the middle"):
        await running
    with pytest.raises(StateError, match="torn down"):
        await pause(bench)
    with pytest.raises(StateError, match="torn down"):
        await bench.operations.update([], None)


@virtual
async def test_an_engine_of_another_version_does_not_start_serving() -> None:
    bench = Bench("ab")
    member = bench.roster.members[1]
    await bench.roster.mark_dead(member, "gone")
    member.lifecycle.to(State.LAUNCHING, "test")
    member.lifecycle.to(State.SYNCING, "test")
    bench.roster.version = 3
    with pytest.raises(StateError, match="engine b has weight version 0, the fleet serves 3"):
        start_serving(bench.roster, member)
    assert member.state is State.SYNCING


@virtual
async def test_a_call_that_fails_on_some_engines_tells_of_each() -> None:
    bench = await Bench("abc").started()
    bench.engine["a"].faults["rpc"] = "refuse"
    bench.engine["c"].faults["rpc"] = "hang"
    outcome = await fan_out(bench.roster.live(), lambda e: e.collective_rpc("f", 1.0, (), None), deadline_s=DEADLINE_S)
    with pytest.raises(FanOutError, match=r"^f failed on 2 of 3 engines \(a: engine a: no rpc; c: ") as caught:
        raise_for(outcome, "f")
    failures = {name: type(failure) for name, failure in caught.value.failures.items()}
    assert failures == {"a": EngineHTTPError, "c": DeadlineError}
    assert caught.value.results == {"b": ["b.0"]}
    alone = await fan_out(bench.roster.live()[:1], lambda e: e.collective_rpc("f", 1.0, (), None), deadline_s=1.0)
    with pytest.raises(EngineHTTPError, match="engine a: no rpc"):
        raise_for(alone, "f")
