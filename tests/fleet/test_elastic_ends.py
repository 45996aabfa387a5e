"""Engines that come and go while their caller gives up or the fleet ends: none is left that nobody can end."""

from __future__ import annotations

import asyncio
import errno
from typing import Any, Self

import pytest
from fleet_fakes import until
from launched_rig import launched
from virtual_fleet import Network, VirtualEngines, open_fleet, virtual_time, without_sockets

from patience import WAIT_S, give_up
from penstock.control_types import PauseMode
from penstock.errors import EngineError, EngineStartError, StateError, UserError
from penstock.fleet.member import Member, State
from penstock.sim.config import SimConfig
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


async def test_an_engine_that_is_ending_has_its_gpus_until_it_has_ended() -> None:
    async with launched(2, gpus=2) as (fleet, launcher):
        leaving = launcher.processes[1]
        leaving.may_end.clear()
        removing = asyncio.create_task(fleet.remove("e1"))
        await asyncio.wait_for(leaving.stopping.wait(), WAIT_S)
        with pytest.raises(UserError, match="no GPU is free"):
            await fleet.add_engines()
        await give_up(removing)
        with pytest.raises(UserError, match="no GPU is free"):
            await fleet.add_engines()
        leaving.may_end.set()
        await until(lambda: not fleet._elastic._departures)
        assert launcher.released == ["e1"]
        assert await fleet.add_engines() == ("e4",)
        assert fleet._roster.members[-1].gpus == ("1",)


async def test_an_engine_that_outlives_sigkill_keeps_its_gpus(caplog: pytest.LogCaptureFixture) -> None:
    async with launched(2, gpus=2) as (fleet, launcher):
        launcher.processes[1].left = [4711]
        await fleet.remove("e1")
        with pytest.raises(UserError, match="no GPU is free"):
            await fleet.add_engines()
        reason = "processes [4711] outlive SIGKILL; its GPUs (1) stay taken"
        assert [engine.reason for engine in await fleet.engines(stats=False)][1] == reason
        assert f"engine e1 stays stopped: {reason}" in caplog.text


async def test_an_engine_starts_again_once_no_process_of_its_last_start_is_left() -> None:
    async with launched(2, restart_backoff_s=0.01) as (fleet, launcher):
        launcher.processes[1].left = [4711]
        launcher.processes[1].kill()
        reason = "processes [4711] of its last start outlive SIGKILL, and may hold its GPUs"
        await until(lambda: reason in fleet._roster.members[1].lifecycle.reason)
        assert len(launcher.processes) == 2
        launcher.processes[1].left = ()
        await until(lambda: fleet._roster.members[1].state is State.SERVING)


async def test_a_fleet_that_ends_waits_for_an_engine_that_is_ending() -> None:
    async with launched(2) as (fleet, launcher):
        leaving = launcher.processes[0]
        leaving.may_end.clear()
        removing = asyncio.create_task(fleet.remove("e0"))
        await asyncio.wait_for(leaving.stopping.wait(), WAIT_S)
        ending = asyncio.create_task(fleet.teardown())
        await until(removing.done)
        assert not ending.done()
        leaving.may_end.set()
        await ending
        with pytest.raises(StateError, match="torn down"):
            await removing


@pytest.mark.parametrize("heedless", [False, True])
async def test_engines_that_start_while_the_fleet_ends_are_ended(*, heedless: bool) -> None:
    async with launched(1) as (fleet, launcher):
        launcher.launching.clear()
        launcher.may_start.clear()
        launcher.heedless = heedless
        starting = asyncio.create_task(fleet.add_engines(2))
        await launcher.launching.wait()
        ending = asyncio.create_task(fleet.teardown())
        await asyncio.sleep(0)
        launcher.may_start.set()
        await ending
        with pytest.raises(StateError, match="torn down"):
            await asyncio.wait_for(starting, WAIT_S)
        with pytest.raises(StateError, match="torn down"):
            await fleet._elastic.add(1)


async def test_an_engine_whose_start_is_given_up_when_it_runs_is_ended_and_its_gpu_another_s() -> None:
    async with launched(1, gpus=2) as (fleet, launcher):
        async with Silent() as silent:
            launcher.url = silent.url
            adding = asyncio.create_task(fleet.add_engines())
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
        monkeypatch.setattr(fleet._elastic, "_start_s", 0.2)
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
            before = asyncio.create_task(fleet._operations.queue.run(over.wait))
            removing = asyncio.create_task(fleet.remove("e0"))
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


async def test_a_drain_ends_with_the_fleet() -> None:
    async with launched(2) as (fleet, _):
        await fleet.sample([1, 2], 1, {"max_tokens": 2}, session_id="s")
        home = next(s.name for s in await fleet.engines() if s.stats is not None and s.stats.generation_tokens)
        draining = asyncio.create_task(fleet.drain(home))
        await until(lambda: fleet._elastic.find(home).state is State.DRAINING and not fleet._operations.queue.turns)
        await fleet.teardown()
        with pytest.raises(StateError, match="torn down"):
            await asyncio.wait_for(draining, WAIT_S)


# --- servers of others -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["caller", "fleet"])
async def test_a_server_that_is_asked_what_it_is_is_let_go_with_the_caller_or_the_fleet(who: str) -> None:
    async with Silent() as silent, launched(1) as (fleet, _):
        attaching = asyncio.create_task(fleet.attach(silent.url))
        await silent.asked.wait()
        if who == "caller":
            await give_up(attaching)
        else:
            await fleet.teardown()
            with pytest.raises(StateError, match="torn down"):
                await asyncio.wait_for(attaching, WAIT_S)
        await asyncio.wait_for(silent.left.wait(), WAIT_S)
