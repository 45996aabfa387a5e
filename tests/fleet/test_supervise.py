"""Deaths and returns over fakes, in virtual time: what is noticed, what is waited, what a returning engine has."""

# ruff: noqa: FBT003 - positional as in the fakes

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from fleet_fakes import Bench, FakeEngine, FakeProcess, until

from penstock.config import FleetConfig
from penstock.engine.control import EngineInfo
from penstock.errors import DeadlineError, EngineDeadError, EngineStartError, StateError, UpdateError
from penstock.fleet.lifecycle import Lifecycle, State
from penstock.fleet.member import Member
from penstock.fleet.operations import Operations
from penstock.fleet.supervise import HUNG_CHECKS, Supervisor
from penstock.types import PauseMode

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
        return Member(name, f"http://127.0.0.1:{90 + len(self.starts)}", fake, info, lifecycle, 0, process)


class Restarts:
    """A supervisor with engines to start, over a clock that only its own waits move."""

    def __init__(self, bench: Bench, fleet: FleetConfig = NEVER) -> None:
        self.now = 0.0
        self.waits: list[float] = []
        self.engines = FakeEngines(bench)
        self.supervisor = Supervisor(
            bench.roster,
            admit=bench.operations.admit,
            fleet=fleet,
            engines=self.engines,
            clock=lambda: self.now,
            sleep=self.sleep,
        )
        for member in bench.roster.members:
            self.supervisor.watch(member)

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


@asynccontextmanager
async def watched(bench: Bench, fleet: FleetConfig) -> AsyncIterator[None]:
    supervisor = Supervisor(bench.roster, admit=bench.operations.admit, fleet=fleet)
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


# --- what is noticed -------------------------------------------------------------------------------------------------


async def test_an_exit_is_noticed_by_event_not_by_the_next_health_check() -> None:
    bench = await Bench("ab").started()
    async with watched(bench, NEVER):
        await asyncio.sleep(0)
        bench.process["a"].kill()
        assert await until_dead(bench, "a") == "its process exited with status -9"
        assert bench.router.serves() == {"b": 0}


@pytest.mark.parametrize("kind", ["die", "refuse"])
async def test_a_failed_health_check_takes_an_engine_out(kind) -> None:
    bench = await Bench("ab").started()
    async with watched(bench, FleetConfig(health_interval_s=0.01)):
        bench.engine["b"].faults["health"] = kind
        assert (await until_dead(bench, "b")).startswith("health check failed: engine b: ")
        assert bench.process["b"].killed
        await asyncio.sleep(0.05)
        assert bench.state("a") is State.SERVING


async def test_a_hang_is_many_late_answers_in_a_row() -> None:
    bench = await Bench("ab").started()
    answers = iter([*[False] * (HUNG_CHECKS - 1), True, *[False] * HUNG_CHECKS])
    checks = 0

    async def health(timeout_s: float) -> None:
        nonlocal checks
        checks += 1
        if not next(answers):
            raise DeadlineError("no answer", seconds=timeout_s, engine="a")

    bench.engine["a"].health = health
    async with watched(bench, FleetConfig(health_interval_s=0.001)):
        reason = await until_dead(bench, "a")
    assert checks == 2 * HUNG_CHECKS, "one answer in time begins the count anew"
    assert reason.startswith(f"{HUNG_CHECKS} health checks without an answer")


async def test_a_hang_is_noticed_within_its_deadline() -> None:
    bench = await Bench("ab").started()
    bench.engine["a"].faults["health"] = "hang"
    async with watched(bench, FleetConfig(health_interval_s=0.01, hang_timeout_s=0.15)):
        begin = asyncio.get_running_loop().time()
        assert await until_dead(bench, "a") == f"{HUNG_CHECKS} health checks without an answer in 0.15 s"
        assert 0.1 < asyncio.get_running_loop().time() - begin < 1.0


async def test_an_engine_may_be_silent_for_as_long_as_the_fleet_says() -> None:
    bench = await Bench("ab").started()
    async with watched(bench, FleetConfig(health_interval_s=0.001, hang_timeout_s=600.0)):
        await until(lambda: "health" in bench.engine["a"].calls)
    assert bench.engine["a"].calls["health"] == 600.0 / HUNG_CHECKS


# --- a core that says nothing, behind a server that is well -----------------------------------------------------------

SLOW_HEALTH = {"health_interval_s": 0.01, "hang_timeout_s": 0.15}


async def test_a_core_that_hangs_is_noticed_though_its_server_is_well() -> None:
    bench = await Bench("ab").started()
    bench.engine["a"].faults["question"] = "hang"
    async with watched(bench, FleetConfig(**SLOW_HEALTH)):
        begin = asyncio.get_running_loop().time()
        reason = await until_dead(bench, "a")
        assert 0.1 < asyncio.get_running_loop().time() - begin < 1.0
        assert reason == "its core has answered nothing for 0.15 s, though its server is well"
        assert bench.state("b") is State.SERVING
        bench.check_belief()


async def test_nobody_is_asked_any_more_when_the_watch_has_ended() -> None:
    bench = await Bench("ab").started()

    async def ends_slowly(_: float) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.2)

    bench.engine["b"].health = ends_slowly
    before = asyncio.all_tasks()
    async with watched(bench, FleetConfig(health_interval_s=0.01, hang_timeout_s=5.0)):
        await asyncio.sleep(0.1)
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("kind", ["refuse", "garbage"])
async def test_any_answer_of_a_core_is_a_sign_of_life(kind) -> None:
    bench = await Bench("ab").started()
    bench.engine["a"].faults["question"] = kind
    async with watched(bench, FleetConfig(**SLOW_HEALTH)):
        await asyncio.sleep(0.4)
        assert bench.journal.count(("a", "question")) > 5
        assert bench.state("a") is State.SERVING


async def test_a_core_may_be_silent_while_a_call_of_ours_keeps_it_busy() -> None:
    bench = await Bench("ab").started()
    bench.operations = Operations(
        bench.roster, bench.store, min_engines=1, control_timeout_s=5.0, request_timeout_s=5.0
    )
    engine = bench.engine["a"]
    engine.health = lambda _: asyncio.sleep(0)  # its server is not its core
    async with watched(bench, FleetConfig(**SLOW_HEALTH)):
        for keep_busy in (
            lambda: bench.operations.update([], None),
            lambda: bench.operations.sleep(1),
            lambda: bench.operations.wake_up(None),
            lambda: bench.operations.collective_rpc("save", 5.0, (), None),
            lambda: bench.operations.load_adapter("style", "/adapters/style", 5.0),
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


async def test_a_pause_that_waits_hides_no_core_that_hangs() -> None:
    bench = await Bench("ab").started()
    bench.operations._request_s = 3600.0
    engine = bench.engine["a"]
    async with watched(bench, FleetConfig(**SLOW_HEALTH)):
        engine.faults |= {"pause": "hang", "question": "hang"}
        pausing = asyncio.create_task(bench.operations.pause(PauseMode.WAIT, clear_cache=True))
        await until_dead(bench, "a")
        pausing.cancel()
        await asyncio.gather(pausing, return_exceptions=True)


async def test_a_core_that_has_made_no_token_yet_compiles_its_kernels_in_peace() -> None:
    bench = await Bench("ab").started()
    engine = bench.engine["a"]
    engine.tokens = 0
    engine.faults["question"] = "hang"
    async with watched(bench, FleetConfig(**SLOW_HEALTH)):
        await asyncio.sleep(0.5)
        assert bench.state("a") is State.SERVING
        engine.tokens = 1
        assert (await until_dead(bench, "a")).startswith("its core has answered nothing for 0.")
    bench = await Bench("ab").started()
    bench.engine["a"].tokens = 0
    bench.engine["a"].faults["question"] = "hang"
    async with watched(bench, FleetConfig(**SLOW_HEALTH)):
        assert await until_dead(bench, "a") == "its core has answered nothing for 1.5 s, though its server is well"


# --- deaths that requests have seen ----------------------------------------------------------------------------------


async def test_who_has_seen_an_engine_die_waits_until_it_gets_no_more_requests() -> None:
    bench = await Bench("abc").started()
    async with restarting(bench) as restarts:  # its own health checks come in an hour
        bench.engine["b"].faults["health"] = "refuse"
        bench.engine["c"].faults["health"] = "hang"
        restarts.engines.gate.clear()
        begin = asyncio.get_running_loop().time()
        await asyncio.gather(*(restarts.supervisor.look() for _ in range(100)))
        assert asyncio.get_running_loop().time() - begin < 2.0
        assert bench.router.serves() == {"a": 0, "c": 0}
        assert bench.journal.count(("b", "health")) == 1, "asked once for all"
        restarts.engines.gate.set()
        await until_serves(bench, "b", 0)
        assert len(restarts.engines.starts) == 1, "one death is one restart"


# --- what returns ----------------------------------------------------------------------------------------------------


async def test_a_dead_engine_returns_under_its_name_and_index_with_the_fleets_weights() -> None:
    bench = await Bench("abc").started()
    bench.roster.members[1].gpus = ("6", "7")
    async with restarting(bench) as restarts:
        await bench.operations.update([], None)
        await bench.operations.update([], None)
        old = bench.engine["b"]
        await dies_and_returns(bench, restarts, "b", 2)
        assert [m.name for m in bench.roster.members] == ["a", "b", "c"]
        assert restarts.engines.starts == [("b", ("6", "7"))]
        assert bench.engine["b"] is not old
        assert bench.engine["b"].version == 2
        assert [change.new for change in bench.roster.members[1].lifecycle.history[-4:]] == [
            State.DEAD, State.LAUNCHING, State.SYNCING, State.SERVING,
        ]  # fmt: skip
        assert next(e for e in bench.router.set if e.name == "b").url == "http://127.0.0.1:91"
        bench.check_belief()
        assert len((await bench.operations.update([], None)).engines) == 3
        await dies_and_returns(bench, restarts, "b", 3)


async def test_version_0_needs_nothing_of_anyone() -> None:
    bench = await Bench("ab").started()
    async with restarting(bench) as restarts:
        await dies_and_returns(bench, restarts, "a", 0)
        assert ("a", "prepare") not in bench.journal
        bench.check_belief()


async def test_an_engine_sees_no_request_before_its_weights_are_confirmed() -> None:
    bench = await Bench("ab").started()
    async with restarting(bench):
        await bench.operations.update([], None)
        bench.engine["a"].faults["again apply-load"] = "hang"
        bench.process["a"].kill()
        await until(lambda: ("a", "apply-load") in bench.journal[-3:])
        assert bench.router.serves() == {"b": 1}


@pytest.mark.parametrize("kind", ["refuse", "hang", "die", "garbage"])
@pytest.mark.parametrize("step", ["prepare", "apply-pause", "apply-load", "apply-resume"])
async def test_an_engine_that_cannot_take_the_weights_does_not_serve_and_is_tried_again(step: str, kind) -> None:
    bench = await Bench("ab").started()
    async with restarting(bench) as restarts:
        await bench.operations.update([], None)
        bench.engine["a"].faults[f"again {step}"] = kind
        bench.process["a"].kill()
        await until(lambda: len(restarts.engines.starts) >= 2)
        assert bench.router.serves() == {"b": 1}
        assert any("could not join" in c.reason for c in bench.roster.members[0].lifecycle.history)


async def test_weights_that_are_not_its_peers_are_not_served() -> None:
    bench = await Bench("ab").started()
    async with restarting(bench, FleetConfig(health_interval_s=3600.0, max_restarts=1)) as restarts:
        await bench.operations.update([], None)
        bench.engine["a"].faults["again checksum"] = "wrong"
        bench.process["a"].kill()
        await until(lambda: len(restarts.engines.starts) == 1 and bench.state("a") is State.DEAD)
        assert "have the checksum other, its peers' sum-1" in bench.roster.members[0].lifecycle.reason
        assert bench.router.serves() == {"b": 1}


async def test_an_update_while_an_engine_starts_is_the_version_it_comes_in_with() -> None:
    bench = await Bench("ab").started()
    async with restarting(bench) as restarts:
        await begins_to_return(bench, restarts, "a")
        for _ in range(3):
            await bench.operations.update([], None)
        restarts.engines.gate.set()
        await until_serves(bench, "a", 3)
        bench.check_belief()


async def test_an_update_waits_for_an_engine_that_is_being_admitted_and_brings_it_along() -> None:
    bench = await Bench("ab").started()
    bench.operations._control_s = 5.0
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


async def test_an_engine_joins_a_paused_fleet_paused() -> None:
    bench = await Bench("ab").started()
    async with restarting(bench) as restarts:
        await bench.operations.pause(PauseMode.KEEP, clear_cache=True)
        await dies_and_returns(bench, restarts, "a", 0)
        assert bench.state("a") is State.PAUSED
        bench.check_belief()
        await bench.operations.resume()
        bench.check_belief()


async def test_an_engine_joins_a_sleeping_fleet_asleep() -> None:
    bench = await Bench("ab").started()
    async with restarting(bench) as restarts:
        await bench.operations.sleep(2)
        await bench.operations.wake_up(["weights"])
        await dies_and_returns(bench, restarts, "a", 0)
        assert bench.engine["a"].calls == {"sleep": 1, "wake": ["weights"]}
        await bench.operations.wake_up(["kv_cache"])
        assert bench.router.closed, "the weights of the others are gone until the next update"
        await bench.operations.update([], None)
        assert not bench.router.closed
        bench.check_belief()


async def test_weights_that_nobody_has_are_waited_for_until_the_next_update(caplog) -> None:
    caplog.set_level("INFO", "penstock.fleet")
    bench = await Bench("ab").started()
    async with restarting(bench) as restarts:
        await bench.operations.pause(PauseMode.KEEP, clear_cache=True)
        await bench.operations.native_update({}, 5)
        assert "weight version 5 came by update_named_weights, of which no copy is kept" in caplog.text
        await bench.operations.resume()
        bench.process["a"].kill()
        waits = "waits for the next update_weights: nobody has the fleet's weights of version 5 any more"
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


async def test_starts_that_fail_are_tried_again_after_twice_the_wait_until_the_budget_ends(caplog) -> None:
    bench = await Bench("ab").started()
    fleet = FleetConfig(health_interval_s=3600.0, max_restarts=4, restart_backoff_s=0.5, restart_window_s=60.0)
    async with restarting(bench, fleet) as restarts:
        restarts.engines.failing = 9
        bench.process["a"].kill()
        await until(lambda: not bench.roster.members[0].returns)
        assert restarts.waits == [0.5, 1.0, 2.0, 4.0]
        assert bench.state("a") is State.DEAD
        assert bench.router.serves() == {"b": 0}
        (line,) = [r.getMessage() for r in caplog.records if r.name.endswith("supervise") and r.levelname == "ERROR"]
        assert line.startswith("engine a stays dead: it died again after 4 restarts within 60 s (fleet.max_restarts)")
        assert (await bench.operations.update([], None)).failures == {}, "the fleet goes on"


async def test_deaths_far_apart_never_end_the_budget() -> None:
    bench = await Bench("ab").started()
    async with restarting(bench, FleetConfig(health_interval_s=3600.0, max_restarts=1)) as restarts:
        for death in range(4):
            bench.process["a"].kill()
            await until(lambda died=death: len(restarts.engines.starts) == died + 1)
            await until_serves(bench, "a", 0)
            restarts.now += 3600.0
        assert restarts.waits == [1.0] * 4


async def test_when_none_is_left_and_none_comes_back_it_is_said() -> None:
    bench = await Bench("ab").started()
    async with restarting(bench, FleetConfig(health_interval_s=3600.0, max_restarts=0)):
        for name in "ab":
            bench.process[name].kill()
            await until_dead(bench, name)
        await until(lambda: not any(m.coming for m in bench.roster.members))
        with pytest.raises(EngineDeadError, match=r"no engine is left, and none is coming back \(a, b dead: its"):
            await bench.operations.pause(PauseMode.KEEP, clear_cache=True)
        with pytest.raises(UpdateError, match="0 engines were good before it began"):
            await bench.operations.update([], None)


async def test_an_update_waits_for_engines_that_come_back_where_too_few_are_left() -> None:
    bench = await Bench("a").started()
    bench.operations._recovery_s = 5.0
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


async def test_an_update_waits_no_longer_than_its_deadline() -> None:
    bench = await Bench("a").started()
    bench.operations._recovery_s = 0.05
    async with restarting(bench) as restarts:
        await begins_to_return(bench, restarts, "a")
        with pytest.raises(UpdateError, match="0 engines were good before it began"):
            await bench.operations.update([], None)


async def test_what_is_released_is_not_started_anew() -> None:
    bench = await Bench("ab").started()
    async with restarting(bench) as restarts:
        await restarts.supervisor.release(bench.roster.members[0])
        bench.process["a"].kill()
        await asyncio.sleep(0.05)
        assert restarts.engines.starts == []
        assert bench.state("a") is State.SERVING, "nobody looks"
