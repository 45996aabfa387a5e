"""Calls to an engine that died before it answered, and that fail when it has been started anew: it is another one."""

from __future__ import annotations

import asyncio

import pytest
from fleet_fakes import Bench, on_bench, until
from launched_rig import Launcher
from supervise_rig import begins_to_return, dies_and_returns, restarting, until_serves

from penstock.engine.control import ControlClient
from penstock.errors import StateError
from penstock.fleet.member import Lifecycle, State
from penstock.fleet.pausing import command


async def asked(bench: Bench) -> None:
    await until(lambda: ("a", "abort") in bench.journal)


@pytest.mark.parametrize("refusable", [False, True])
@on_bench("ab")
async def test_an_engine_lives_though_its_predecessor_fails_a_command_late(bench: Bench, *, refusable: bool) -> None:
    async with restarting(bench) as restarts:
        go = asyncio.Event()
        bench.engine["a"].faults["abort"] = "refuse"

        async def abort(engine: ControlClient) -> None:
            if engine is old:
                await go.wait()
            await engine.abort()

        old = bench.roster.members[0].control
        asking = asyncio.create_task(command(bench.roster, abort, what="abort", deadline_s=5.0, refusable=refusable))
        await dies_and_returns(bench, restarts, "a", 0)
        go.set()
        await asking
        assert bench.state("a") is State.SERVING
        bench.check_belief()


@on_bench("ab")
async def test_an_engine_that_is_being_started_is_not_given_up_for_what_its_predecessor_failed(bench: Bench) -> None:
    async with restarting(bench) as restarts:
        bench.engine["a"].faults["abort"] = "hang"
        asking = asyncio.create_task(command(bench.roster, lambda e: e.abort(), what="abort", deadline_s=0.1))
        await asked(bench)
        await begins_to_return(bench, restarts, "a")
        await asking
        assert bench.state("a") is State.LAUNCHING
        restarts.engines.gate.set()
        await until_serves(bench, "a", 0)
        assert len(restarts.engines.starts) == 1
        bench.check_belief()


async def test_an_engine_that_was_found_dead_while_it_started_leaves_no_process() -> None:
    launcher = Launcher(1)
    life = Lifecycle("e0")
    launcher.may_start.clear()
    starting = asyncio.create_task(launcher.start(life, ()))
    await launcher.launching.wait()
    life.to(State.DEAD, "a call to the one before it failed")
    launcher.may_start.set()
    with pytest.raises(StateError, match="cannot go from dead to syncing"):
        await starting
    assert [process.ended.is_set() for process in launcher.processes] == [True]
    await launcher.end_all()
