"""Engines that come and go while their caller gives up or the fleet ends: none is left that nobody can end."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Coroutine
from typing import Any, Self

import pytest
from fleet_fakes import until
from launched_rig import CONFIG, Launcher, launched
from virtual_fleet import Network, VirtualEngines, open_fleet, virtual_time, without_sockets

from patience import WAIT_S
from penstock.engine.vanilla import VanillaControl
from penstock.errors import DeadlineError, EngineError, EngineStartError, PenstockError, StateError, UserError
from penstock.fleet import attach
from penstock.fleet.engines import LaunchedEngines
from penstock.fleet.member import Lifecycle, Member, State, Substate
from penstock.settings import EngineConfig
from penstock.sim.config import SimConfig
from penstock.sim.server import SimServer
from penstock.types import PauseMode
from sim_fleets import check_serves


class Silent:
    """A server that answers nothing: `async with Silent() as silent`."""

    async def __aenter__(self) -> Self:
        self.asked, self.left = asyncio.Event(), asyncio.Event()
        self._server = await asyncio.start_server(self._met, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _met(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        self.asked.set()
        await reader.read()
        self.left.set()
        writer.close()


async def give_up(call: asyncio.Task[Any]) -> None:
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


def begun(call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.create_task(call)


async def test_an_engine_whose_end_has_begun_ends_though_nobody_waits_for_it() -> None:
    async with launched(2) as (fleet, launcher):
        leaving = launcher.processes[0]
        leaving.may_end.clear()
        removing = begun(fleet.remove("e0"))
        await asyncio.wait_for(leaving.stopping.wait(), WAIT_S)
        await give_up(removing)
        leaving.may_end.set()
        await until(lambda: launcher.released == ["e0"])
        assert leaving.ended.is_set()
        assert (await fleet.engines())[0].state is State.STOPPED
        with pytest.raises(StateError, match="engine e0 has left the fleet already"):
            await fleet.remove("e0")
        await check_serves(fleet, engines=1)


async def test_an_engine_that_is_ending_has_its_gpus_until_it_has_ended() -> None:
    async with launched(2, gpus=2) as (fleet, launcher):
        leaving = launcher.processes[1]
        leaving.may_end.clear()
        removing = begun(fleet.remove("e1"))
        await asyncio.wait_for(leaving.stopping.wait(), WAIT_S)
        with pytest.raises(UserError, match="no GPU is free"):
            await fleet.add_engines()
        await give_up(removing)
        with pytest.raises(UserError, match="no GPU is free"):
            await fleet.add_engines()
        leaving.may_end.set()
        await until(lambda: launcher.released == ["e1"])
        assert await fleet.add_engines() == ("e4",)
        assert fleet._roster.members[-1].gpus == ("1",)


async def test_a_fleet_that_ends_waits_for_an_engine_that_is_ending() -> None:
    async with launched(2) as (fleet, launcher):
        leaving = launcher.processes[0]
        leaving.may_end.clear()
        removing = begun(fleet.remove("e0"))
        await asyncio.wait_for(leaving.stopping.wait(), WAIT_S)
        ending = begun(fleet.teardown())
        await until(removing.done)
        assert not ending.done()
        leaving.may_end.set()
        await ending
        with pytest.raises(StateError, match="torn down"):
            await removing


async def test_an_engine_leaves_though_the_router_does_not_hear_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with launched(2) as (fleet, launcher):
        leaving = launcher.processes[0]
        leaving.may_end.clear()
        removing = begun(fleet.remove("e0"))
        member = fleet._roster.members[0]
        await fleet._roster.until(lambda: member.state is State.DRAINING)

        async def late(*_: object) -> None:
            raise DeadlineError("router did not answer", seconds=10.0)

        with monkeypatch.context() as patched:
            patched.setattr(fleet._roster.admin, "announce", late)
            await asyncio.wait_for(leaving.stopping.wait(), WAIT_S)
        leaving.may_end.set()
        await removing
        assert launcher.released == ["e0"]
        await check_serves(fleet, engines=1)


@pytest.mark.parametrize("heedless", [False, True])
async def test_engines_that_start_while_the_fleet_ends_are_ended(*, heedless: bool) -> None:
    async with launched(1) as (fleet, launcher):
        launcher.launching.clear()
        launcher.may_start.clear()
        launcher.heedless = heedless
        starting = begun(fleet.add_engines(2))
        await launcher.launching.wait()
        ending = begun(fleet.teardown())
        await asyncio.sleep(0)
        launcher.may_start.set()
        await ending
        with pytest.raises(StateError, match="torn down"):
            await asyncio.wait_for(starting, WAIT_S)
        with pytest.raises(StateError, match="torn down"):
            await fleet._elastic.add(1)


async def test_nothing_starts_once_all_have_been_ended() -> None:
    launcher = Launcher(1)
    engines = LaunchedEngines(CONFIG, launcher, api_key=None, parallel_starts=1, stop_timeout_s=1.0)
    launcher.may_start.clear()
    life, later = Lifecycle("e0"), Lifecycle("e1")
    starting = begun(engines.start(life, ()))
    await launcher.launching.wait()
    await engines.end_all()
    launcher.may_start.set()
    with pytest.raises(StateError, match="no engine of it can start any more"):
        await asyncio.wait_for(starting, WAIT_S)
    assert [process.ended.is_set() for process in launcher.processes] == [True]
    assert life.state is State.DEAD
    with pytest.raises(StateError, match="no engine of it can start any more"):
        await engines.start(later, ())
    assert len(launcher.processes) == 1


async def test_an_engine_whose_start_is_given_up_when_it_runs_is_ended_and_its_gpu_another_s() -> None:
    async with launched(1, gpus=2) as (fleet, launcher):
        async with Silent() as silent:
            launcher.url = silent.url
            adding = begun(fleet.add_engines())
            await silent.asked.wait()
            await give_up(adding)
        assert launcher.processes[1].ended.is_set()
        assert launcher.released == ["e1"]
        launcher.url = None
        assert await fleet.add_engines() == ("e2",)
        assert fleet._roster.members[-1].gpus == ("1",)


async def test_a_start_for_which_the_system_has_no_room_is_named_and_tried_until_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with launched(1, restart_backoff_s=0.001) as (fleet, launcher):
        launch, full = launcher.launch, 7 * [OSError(errno.ENOSPC, "No space left on device", "e0.log")]

        async def launch_or_fail(*given: Any) -> Any:
            if full:
                raise full.pop()
            return await launch(*given)

        monkeypatch.setattr(launcher, "launch", launch_or_fail)
        launcher.processes[0].kill()
        await until(lambda: not full)
        await check_serves(fleet, engines=1)
        reasons = [change.reason for change in fleet._roster.members[0].lifecycle.history]
        words = "no process can be started for it: [Errno 28] No space left on device"
        assert sum(words in reason for reason in reasons) == 7


async def test_adding_an_engine_that_never_joins_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started anew without end; who asked for it is told."""
    async with launched(1, restart_backoff_s=0.001) as (fleet, launcher):
        started = len(launcher.processes)

        async def never(member: Member) -> None:
            raise EngineError("it has other weights than its peers", engine=member.name)

        monkeypatch.setattr(fleet._elastic._supervisor, "_admit", never)
        config = fleet._elastic._engines.config.model_copy(update={"start_timeout_s": 0.2})
        monkeypatch.setattr(fleet._elastic._engines, "config", config)
        with pytest.raises(EngineStartError, match=r"not joined the fleet within 0\.2 s .*"):
            await fleet.add_engines()
        await until(lambda: len(launcher.processes) > started + 1)
        await check_serves(fleet, engines=1)


@pytest.mark.parametrize("paused", [False, True])
def test_an_engine_that_returns_while_it_is_taken_out_is_taken_out(*, paused: bool) -> None:
    async def main() -> None:
        network = Network(SimConfig())
        with without_sockets(network):
            fleet = await open_fleet(network, VirtualEngines(network), 2)
            if paused:
                await fleet.pause_generation(PauseMode.KEEP)
            member, over = fleet._roster.members[0], asyncio.Event()
            next(iter(network.nodes.values())).kill()
            await fleet._roster.until(lambda: member.state is State.LAUNCHING)
            before = begun(fleet._operations.queue.run(over.wait))
            removing = begun(fleet.remove("e0"))
            await fleet._roster.until(lambda: member.state is State.SYNCING)
            await asyncio.sleep(1.0)  # virtual: it waits for its turn to be admitted, behind the removal's
            over.set()
            await asyncio.gather(before, removing)
            assert member.state is State.STOPPED
            assert list(network.router.dispatcher.backends) == ["e1"]
            assert [node.name for node in network.nodes.values() if node.engine.death is None] == ["e1"]
            if paused:
                await fleet.resume_generation()
            await check_serves(fleet, engines=1)
            await fleet.teardown()

    with virtual_time() as runner:
        runner.run(main())


async def test_one_whose_removal_was_given_up_and_that_dies_serves_again_when_it_is_back() -> None:
    async with launched(2, restart_backoff_s=0.01) as (fleet, launcher):
        engines = [process._server.engine for process in launcher.processes]
        busy = begun(fleet.sample([1, 2], 1, {"max_tokens": 400, "ignore_eos": True}))
        await until(lambda: any(engine.scheduler.running for engine in engines))
        home = next(i for i, engine in enumerate(engines) if engine.scheduler.running)
        member = fleet._roster.members[home]
        removing = begun(fleet.remove(home))
        await until(lambda: member.drain_mode is Substate.ALL and not fleet._operations.queue.turns)
        await give_up(removing)
        launcher.processes[home].kill()
        await fleet._roster.until(lambda: member.state is State.SERVING)
        await until(lambda: not fleet._operations.queue.turns)
        known = (await fleet._roster.admin.engines()).engines
        assert {engine.name: engine.eligible for engine in known} == {"e0": True, "e1": True}
        assert len((await busy)[0].token_ids) == 400


async def test_a_drain_ends_with_the_fleet() -> None:
    async with launched(2) as (fleet, _):
        await fleet.sample([1, 2], 1, {"max_tokens": 2}, session_id="s")
        home = next(s.name for s in await fleet.engines() if s.stats is not None and s.stats.generation_tokens)
        draining = begun(fleet.drain(home))
        await until(lambda: fleet._elastic.find(home).state is State.DRAINING and not fleet._operations.queue.turns)
        await fleet.teardown()
        with pytest.raises(StateError, match="torn down"):
            await asyncio.wait_for(draining, WAIT_S)


async def test_nobody_is_watched_once_the_watch_has_ended() -> None:
    async with launched(1) as (fleet, _):
        supervisor = fleet._elastic._supervisor
        await fleet.teardown()
        with pytest.raises(StateError, match="engine e0 cannot join: this fleet was torn down"):
            supervisor.watch(fleet._roster.members[0])
        before = asyncio.all_tasks()
        await supervisor.probe_all()
        assert asyncio.all_tasks() == before


# --- servers of others -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["caller", "fleet"])
async def test_a_server_that_is_asked_what_it_is_is_let_go_with_the_caller_or_the_fleet(who: str) -> None:
    async with Silent() as silent, launched(1) as (fleet, _):
        attaching = begun(fleet.attach(silent.url))
        await silent.asked.wait()
        if who == "caller":
            await give_up(attaching)
        else:
            await fleet.teardown()
            with pytest.raises(StateError, match="torn down"):
                await asyncio.wait_for(attaching, WAIT_S)
        await asyncio.wait_for(silent.left.wait(), WAIT_S)


async def test_one_server_is_attached_once_by_two_who_attach_it_at_once() -> None:
    async with SimServer(SimConfig(tokens_per_second=500, max_model_len=512)) as server, launched(1) as (fleet, _):
        both = await asyncio.gather(fleet.attach(server.url), fleet.attach(server.url), return_exceptions=True)
        (name,) = [outcome for outcome in both if isinstance(outcome, tuple)]
        (refusal,) = [outcome for outcome in both if isinstance(outcome, BaseException)]
        assert isinstance(refusal, UserError)
        assert str(refusal) == f"the server {server.url} belongs to this fleet already; remove it first"
        await check_serves(fleet, engines=2)
        await fleet.remove(*name)
        await fleet.attach(server.url)


async def test_a_server_that_was_let_go_can_be_attached_again() -> None:
    async with Silent() as silent, launched(1) as (fleet, _):
        for _ in range(2):
            silent.asked.clear()
            attaching = begun(fleet.attach(silent.url))
            await silent.asked.wait()
            await give_up(attaching)


@pytest.mark.parametrize("wrong", ["60", -1, float("nan"), [60]])
async def test_what_is_no_time_is_refused_before_an_engine_is_told_anything(wrong: Any) -> None:
    async with launched(2) as (fleet, _):
        for call in (fleet.drain, fleet.remove):
            with pytest.raises(UserError, match="timeout_s is a number of seconds, 0 or more, got"):
                await call("e0", timeout_s=wrong)
        assert [status.state for status in await fleet.engines()] == [State.SERVING] * 2


async def test_servers_of_others_take_no_room_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray is asked for room for all that have none set aside yet."""
    async with SimServer(SimConfig(max_model_len=512)) as other, launched(1) as (fleet, launcher):
        await fleet.attach(other.url)
        place, asked = launcher.place, list[list[tuple[str, ...]]]()

        async def noted(config: EngineConfig, taken: Any) -> tuple[str, ...]:
            asked.append(list(taken))
            return await place(config, taken)

        monkeypatch.setattr(launcher, "place", noted)
        await fleet.add_engines()
        assert asked == [[("0",)]]


@pytest.mark.parametrize("what", ["no engine", "a router", "another model"])
async def test_no_connection_is_left_to_a_server_that_does_not_join(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clients: list[VanillaControl] = []

    class Noted(VanillaControl):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            clients.append(self)

    async with SimServer(SimConfig(vocab_size=512)) as other, launched(1) as (fleet, _):
        monkeypatch.setattr(attach, "VanillaControl", Noted)
        urls = {"no engine": "http://127.0.0.1:9", "a router": fleet.url, "another model": other.url}
        with pytest.raises(PenstockError):
            await fleet.attach(urls[what])
        assert [client.http._session for client in clients] == [None]
