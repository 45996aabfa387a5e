"""Returns over fakes, in virtual time: what is waited, and what a returning engine has."""

from __future__ import annotations

import asyncio

import pytest
from fleet_fakes import Bench, on_bench, until
from supervise_rig import begins_to_return, dies_and_returns, restarting, until_serves

from penstock.control_types import PauseMode
from penstock.errors import StateError, UpdateError
from penstock.fleet.member import State
from penstock.process import RestartBudget, keep_running
from penstock.settings import FleetConfig
from virtual_time import virtual

# --- what returns ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("watch", ["health", "admit"])
@on_bench("a")
async def test_an_engine_whose_watch_breaks_is_started_anew(bench: Bench, watch: str, caplog) -> None:

    async def breaks(*_: object) -> None:
        restarts.supervisor._admit = bench.admission.admit
        raise KeyError("version")

    async with restarting(bench) as restarts:
        if watch == "admit":
            restarts.supervisor._admit = breaks
            bench.process["a"].kill()
        else:
            bench.engine["a"].faults["health"] = "garbage"
            bench.engine["a"].gone.set()
        await until(lambda: len(restarts.engines.starts) == (2 if watch == "admit" else 1))
        await until_serves(bench, "a", 0)
    assert "a watch of engine a broke: KeyError('version')" in caplog.text


@on_bench("ab")
async def test_an_engine_that_is_watched_no_more_does_not_count_as_coming_back(bench: Bench) -> None:
    async with restarting(bench) as restarts:
        await asyncio.sleep(0.01)
        member = bench.roster.members[0]
        await restarts.supervisor.release(member)
        await bench.roster.mark_dead(member, "an update failed")
        assert not member.is_restarting


@pytest.mark.parametrize("kind", ["refuse", "hang", "die", "garbage"])
@pytest.mark.parametrize("step", ["prepare", "apply-pause", "apply-load", "apply-resume"])
@on_bench("ab", settled=False)
async def test_an_engine_that_cannot_take_the_weights_is_started_again(bench: Bench, step: str, kind) -> None:
    async with restarting(bench) as restarts:
        await bench.operations.update([], None)
        bench.engine["a"].faults[f"again {step}"] = kind
        bench.process["a"].kill()
        await until(lambda: len(restarts.engines.starts) >= 2)
        assert bench.router.serves() == {"b": 1}
        assert any("could not join" in c.reason for c in bench.roster.members[0].lifecycle.history)


@on_bench("ab")
async def test_weights_that_are_not_its_peers_are_not_served(bench: Bench) -> None:
    async with restarting(bench, FleetConfig(health_interval_s=3600.0, max_restarts=1)) as restarts:
        await bench.operations.update([], None)
        bench.engine["a"].faults["again checksum"] = "wrong"
        bench.process["a"].kill()
        await until(lambda: len(restarts.engines.starts) == 1 and bench.state("a") is State.DEAD)
        assert "have the checksum other, its peers' sum-1" in bench.roster.members[0].lifecycle.reason
        assert bench.router.serves() == {"b": 1}


@on_bench("ab")
async def test_an_update_while_an_engine_starts_is_the_version_it_comes_in_with(bench: Bench) -> None:
    async with restarting(bench) as restarts:
        await begins_to_return(bench, restarts, "a")
        for _ in range(3):
            await bench.operations.update([], None)
        restarts.engines.gate.set()
        await until_serves(bench, "a", 3)
        bench.check_belief()


@on_bench("ab")
async def test_an_update_waits_for_an_engine_that_is_being_admitted_and_brings_it_along(bench: Bench) -> None:
    bench.operations._control_s = 60.0
    async with restarting(bench) as restarts:
        await bench.operations.update([], None)
        await begins_to_return(bench, restarts, "a")
        bench.journal.clear()
        bench.engine["a"].busy.clear()  # it will be slow
        restarts.engines.gate.set()
        await until(lambda: ("a", "prepare") in bench.journal)
        update = asyncio.create_task(bench.operations.update([], None))
        await asyncio.sleep(0.02)
        assert ("b", "prepare") not in bench.journal
        bench.engine["a"].busy.set()
        assert len((await update).engines) == 2
        await until_serves(bench, "a", 2)
        bench.check_belief()


@virtual
async def test_weights_that_nobody_has_are_waited_for_until_the_next_update(caplog) -> None:
    caplog.set_level("INFO", "penstock.fleet")
    bench = await Bench("ab").started()
    async with restarting(bench) as restarts:
        await bench.operations.pause(PauseMode.KEEP, clear_cache=True)
        await bench.operations.native.update({}, 5)
        assert "weight version 5 came by update_named_weights, of which no copy is kept" in caplog.text
        await bench.operations.resume()
        bench.process["a"].kill()
        waits = "waits for the next update_weights: no process has the fleet's weights of version 5 any more"
        await until(lambda: bench.roster.members[0].lifecycle.reason.startswith(waits))
        assert f"engine a stays syncing: {waits}" in caplog.text
        await asyncio.sleep(0.05)
        assert bench.state("a") is State.SYNCING
        assert bench.router.serves() == {"b": 5}
        await bench.operations.update([], None)
        await until_serves(bench, "a", 6)
        assert bench.roster.members[0].lifecycle.reason == "weight version 6 confirmed"
        await dies_and_returns(bench, restarts, "b", 6)
        bench.check_belief()


# --- backoff and budget ----------------------------------------------------------------------------------------------


@virtual
async def test_starts_that_fail_are_tried_again_after_twice_the_wait_until_the_budget_ends(caplog) -> None:
    bench = await Bench("ab").started()
    fleet = FleetConfig(health_interval_s=3600.0, max_restarts=4, restart_backoff_s=0.5, restart_window_s=60.0)
    async with restarting(bench, fleet) as restarts:
        restarts.engines.failing = 9
        bench.process["a"].kill()
        await until(lambda: not bench.roster.members[0].lifecycle.restarts)
        assert restarts.waits == [0.5, 1.0, 2.0, 4.0]
        assert bench.state("a") is State.DEAD
        assert bench.router.serves() == {"b": 0}
        (line,) = [r.getMessage() for r in caplog.records if r.name.endswith("supervise") and r.levelname == "ERROR"]
        assert line.startswith("engine a stays dead: it died again after 4 restarts within 60 s (fleet.max_restarts)")
        assert (await bench.operations.update([], None)).failures == {}, "the fleet goes on"


@on_bench("a", settled=False)
async def test_a_used_up_budget_ends_requests_only_at_a_death_that_no_restart_follows(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[bool] = []
    monkeypatch.setattr(bench.roster.all_lost, "set", lambda: lost.append(True))
    async with restarting(bench, FleetConfig(health_interval_s=3600.0, max_restarts=1)) as restarts:
        for starts in (1, 2):
            bench.process["a"].kill()
            await until(lambda starts=starts: len(restarts.engines.starts) == starts)
            await until_serves(bench, "a", 0)
            assert lost == [], "a restart follows, or it joins"
            restarts.now += 1000.0 if starts == 1 else 0.0  # longer than `restart_window_s`
        bench.process["a"].kill()
        await until(lambda: lost)
        assert len(restarts.engines.starts) == 2


@on_bench("ab")
async def test_an_engine_is_tried_again_without_end_and_the_last_reason_is_told(bench: Bench) -> None:
    async with restarting(bench) as restarts:
        restarts.engines.failing = 20
        bench.process["a"].kill()
        await until(lambda: len(restarts.engines.starts) == 21)
        assert restarts.waits[:9] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 120.0, 120.0]
        assert any(change.reason == "port taken" for change in bench.roster.members[0].lifecycle.history)
        await until_serves(bench, "a", 0)


@on_bench("a")
async def test_an_update_waits_for_engines_that_come_back_where_too_few_are_left(bench: Bench) -> None:
    bench.operations._recovery_s = 60.0
    async with restarting(bench) as restarts:
        await begins_to_return(bench, restarts, "a")
        update = asyncio.create_task(bench.operations.update([], None))
        await asyncio.sleep(0.02)
        assert not update.done()
        with pytest.raises(StateError, match="a weight update is under way"):
            await bench.operations.update([], None)
        restarts.engines.gate.set()
        assert (await update).version == 1
        bench.check_belief()


@on_bench("a", settled=False)
async def test_an_update_waits_no_longer_than_its_deadline(bench: Bench) -> None:
    bench.operations._recovery_s = 0.05
    async with restarting(bench) as restarts:
        await begins_to_return(bench, restarts, "a")
        with pytest.raises(UpdateError, match="0 engines were good before it began"):
            await bench.operations.update([], None)


class Hand:
    """A clock that is turned by hand."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_restart_counts_no_more_when_its_window_has_passed() -> None:
    clock = Hand()
    budget = RestartBudget(2, 100.0, 1.0, clock)
    assert budget.spend() == 1.0
    clock.now += 60.0
    assert budget.spend() == 2.0
    assert not budget.left()
    clock.now += 39.0
    assert budget.spend() is None
    clock.now += 1.0
    assert budget.left(), "one of the two is left in the window"
    assert budget.spend() == 4.0, "and it has not been well for a window"
    clock.now += 1000.0
    assert budget.spend() == 1.0, "all is forgotten"


@virtual
async def test_a_start_longer_than_the_window_is_no_time_in_which_it_was_well() -> None:
    clock, waits = Hand(), []
    budget = RestartBudget(None, 100.0, 1.0, clock)

    async def dies() -> None:
        clock.now += 5.0

    async def starts() -> bool:
        clock.now += 150.0
        return True

    async def sleep(seconds: float) -> None:
        clock.now += seconds
        waits.append(seconds)
        if len(waits) == 5:
            budget.max_restarts = 0

    await keep_running(dies, starts, budget, sleep)
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0]


@on_bench("ab", settled=False)
async def test_an_engine_sees_no_request_before_its_weights_are_confirmed(bench: Bench) -> None:
    async with restarting(bench):
        await bench.operations.update([], None)
        bench.engine["a"].faults["again apply-load"] = "hang"
        bench.process["a"].kill()
        await until(lambda: ("a", "apply-load") in bench.journal[-3:])
        await bench.roster.push_membership()
        assert bench.router.serves() == {"b": 1}
