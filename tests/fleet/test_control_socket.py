"""A fleet that another process holds: found, adopted, ordered about, and stopped; nothing left of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from patience import WAIT_S, give_up
from penstock import Fleet, PauseMode, SamplingParams
from penstock.engine.control import ControlClient
from penstock.engine.launch import reserved_port
from penstock.errors import (
    DeadlineError,
    EngineDeadError,
    EngineError,
    PenstockError,
    StateError,
    UserError,
    WeightsError,
)
from penstock.fleet import remote as link_module
from penstock.fleet import service
from penstock.fleet.member import State
from penstock.fleet.remote import AdoptedRoster, FleetClient
from penstock.fleet.service import folder, present, refuse_second, shown, socket_of, state_of
from penstock.http import HttpTransport
from penstock.router_settings import RouterConfig
from penstock.sim.config import SimConfig
from penstock.sim.server import SimServer
from sim_fleets import SIM, begun, check_serves, slowed, whole

PARAMS = SamplingParams(max_tokens=400, detokenize=False)
PROMPTS = [[1 + i, 2] for i in range(12)]
OPTIONS = {**SIM, "restart_backoff_s": 0.05, "health_interval_s": 0.2}

TRAINER = """
import asyncio, sys, torch
import penstock

async def main():
    fleet = await penstock.Fleet.connect(sys.argv[1])
    for value in range(2):
        report = await fleet.update_weights([("w", torch.full((1000,), float(value)))])
    print(report.version, fleet.weight_version, flush=True)
    import os; os.kill(os.getpid(), 9)

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def runtime(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path_factory.mktemp("r")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(path))
    return path


async def holder_of(fleet: Fleet) -> psutil.Process:
    async with FleetClient.to(fleet.url) as link:
        return psutil.Process((await link.state()).pid)


OWNER = """
import asyncio, json, sys
from penstock import Fleet

async def main():
    async with Fleet.launch("sim-model", engines=2, **json.loads(sys.argv[1])) as fleet:
        print(fleet.url, flush=True)
        await fleet.endpoint.stopping.wait()

asyncio.run(main())
"""


async def started(**options: object) -> str:
    """Have a process of a session of its own launch a fleet; returns its URL."""
    given = json.dumps({**OPTIONS, **options}, default=str)
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, given, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert owner.stdout is not None
    return (await asyncio.wait_for(owner.stdout.readline(), WAIT_S)).decode().strip()


@asynccontextmanager
async def detached(**options: object) -> AsyncIterator[Fleet]:
    """A fleet of another process, adopted by this one; all of it is gone at the end."""
    fleet = await Fleet.connect(await started(**options))
    holder = await holder_of(fleet)
    family = [holder, *holder.children(recursive=True)]
    try:
        yield fleet
    finally:
        await fleet.teardown()
        if holder.is_running():
            async with FleetClient.to(fleet.url) as link:
                await link.call("stop")
        _, left = await asyncio.to_thread(psutil.wait_procs, family, timeout=WAIT_S)
        assert left == []
        assert list(folder().iterdir()) == []


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_a_pause_cancelled_here_is_undone_at_the_owner_who_runs_on(
    mode: PauseMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, in_force, goes_on = FleetClient.call, asyncio.Event(), asyncio.Event()

    async def held(client: FleetClient, name: str, /, **arguments: Any) -> Any:
        result = await call(client, name, **arguments)
        if name == "pause":
            in_force.set()
            await goes_on.wait()
        return result

    async with detached() as fleet:
        await fleet.update_weights([("w", torch.ones(4))])
        monkeypatch.setattr(FleetClient, "call", held)
        caller = asyncio.create_task(fleet.pause_generation(mode))
        await asyncio.wait_for(in_force.wait(), WAIT_S)
        await give_up(caller)
        goes_on.set()
        await fleet.teardown()
        async with Fleet.connect(fleet.url + "/") as again:
            assert again.weight_version == 1
            assert {(s.state, s.weight_version) for s in await again.engines()} == {(State.SERVING, 1)}
            await check_serves(again, engines=2)


async def test_everything_a_fleet_can_do_can_be_done_by_who_adopted_it() -> None:
    async with detached() as fleet:
        async with slowed(fleet):
            running = await begun(fleet, PROMPTS, PARAMS)
            with pytest.raises(DeadlineError, match=r"pause \(wait\) took longer than 0\.01 s"):
                await fleet.pause_generation(PauseMode.WAIT, timeout_s=0.01)
            await fleet.pause_generation(PauseMode.KEEP)
        assert {s.state for s in await fleet.engines()} == {State.PAUSED}
        with pytest.raises(StateError, match="already paused"):
            await fleet.pause_generation()
        await fleet.load_adapter("style", "/adapters/style", timeout_s=WAIT_S)
        assert (await fleet.adapters())["style"].engines == 2
        report = await fleet.update_weights([("w", torch.ones(100))])
        assert (report.version, report.bytes, fleet.weight_version) == (1, 400, 1)
        assert [update.engine for update in report.engines] == ["e0", "e1"]
        assert set(report.seconds) == {"publish", "prepare", "gate", "total"}
        await fleet.resume_generation()
        await whole(running, PROMPTS, PARAMS)
        await fleet.reset_prefix_cache()
        await fleet.abort_generation()
        await fleet.sleep(1)
        await fleet.wake_up(["weights"])
        await fleet.wake_up(["kv_cache"])
        assert len(await fleet.collective_rpc("ping", args=["a"])) == 2
        await fleet.init_weight_update_communicator({"rank_offset": 1})
        await fleet.pause_generation()
        await fleet.update_named_weights({"names": []}, version=7)
        await fleet.resume_generation()
        assert fleet.weight_version == 7
        assert await fleet.drain("e1")
        with pytest.raises(UserError, match=r"fleet\.min_engines=1"):
            await fleet.remove("e0")
        await fleet.remove("e1")
        assert [s.state for s in await fleet.engines()] == [State.SERVING, State.STOPPED]
        with pytest.raises(WeightsError, match="no tensors"):
            await fleet.update_weights([])
        with pytest.raises(UserError, match="weight version 7 is not greater than 7"):
            await fleet.update_weights([("w", torch.ones(2))], version=7)
        await fleet.update_weights([("w", torch.ones(2))])
        await fleet.add_engines()
        await fleet.remove("e0")
        assert [s.state for s in await fleet.engines()] == [State.STOPPED, State.STOPPED, State.SERVING]
        assert fleet.weight_version == 8
        await check_serves(fleet, engines=1)
        async with SimServer(SimConfig(served_model_name="other")) as other:
            assert len(await fleet.attach(other.url)) == 1


async def test_the_weights_of_a_trainer_that_was_killed_are_those_of_engines_that_return() -> None:
    async with detached() as fleet:
        trainer = await asyncio.create_subprocess_exec(
            sys.executable, "-c", TRAINER, fleet.url, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await asyncio.wait_for(trainer.communicate(), WAIT_S)
        assert (out, trainer.returncode) == (b"2 2\n", -signal.SIGKILL)
        port = fleet._roster.members[1].url.rpartition(":")[2]
        holder = await holder_of(fleet)
        (engine,) = [p for p in holder.children() if f"port={port}" in p.cmdline()]
        engine.kill()
        joined = (State.SERVING, "weight version 2 confirmed")
        back = lambda: ((m := fleet._roster.members[1]).state, m.lifecycle.reason) == joined  # noqa: E731
        assert await fleet._roster.until(back, deadline_s=WAIT_S), "the state is followed"
        assert fleet.weight_version == 2
        control = ControlClient("e1", fleet._roster.members[1].url, api_key=fleet.key_of("e1"))
        assert (await control.info()).weight_version == 2
        await control.close()
        await check_serves(fleet, engines=2)
        assert (await fleet.update_weights([("w", torch.zeros(1000))])).version == 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=str)
async def test_when_the_holder_dies_or_hangs_nobody_waits(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pid, follow = asyncio.get_running_loop().create_future(), AdoptedRoster.follow

    async def soon(roster: AdoptedRoster, link: FleetClient) -> None:
        pid.set_result((await link.state()).pid)
        monkeypatch.setattr(link_module, "ANSWER_S", 0.5)  # the start has more: the machine may stand still for so long
        monkeypatch.setattr(link_module, "QUIET_S", 0.5)  # ours; the owner answers after 5 s, too late then
        await follow(roster, link)

    monkeypatch.setattr(AdoptedRoster, "follow", soon)
    fleet = await Fleet.connect(await started(log_dir=tmp_path))
    holder = psutil.Process(await pid)
    family = [holder, *holder.children(recursive=True)]
    try:
        waiting = asyncio.create_task(fleet.pause_generation())
        holder.send_signal(number)
        with pytest.raises((EngineDeadError, DeadlineError)):
            await asyncio.wait_for(waiting, WAIT_S)
        with pytest.raises(EngineDeadError, match="is coming back"):
            await asyncio.wait_for(fleet.sample([1], 1, PARAMS), WAIT_S)
        tensors = iter([("w", torch.ones(2))])
        with pytest.raises((EngineDeadError, DeadlineError)):
            await asyncio.wait_for(fleet.update_weights(tensors), WAIT_S)
        assert len(list(tensors)) == 1, "a holder that was stopped goes on, and its engines may read that memory"
        if number == signal.SIGKILL:  # router and engines end a moment after it, and can be taken over until then
            await asyncio.to_thread(psutil.wait_procs, family, timeout=WAIT_S)
        with pytest.raises((EngineDeadError, DeadlineError)):
            await asyncio.wait_for(asyncio.ensure_future(_connect(fleet.url)), WAIT_S)
    finally:
        await fleet.teardown()
        if holder.is_running():
            holder.kill()
    _, left = await asyncio.to_thread(psutil.wait_procs, family, timeout=WAIT_S)
    assert left == [], "engines end with who holds them"
    assert present() == {}
    assert list(folder().iterdir()) == []


async def _connect(url: str) -> None:
    async with Fleet.connect(url):
        pass


async def test_calls_on_an_adopted_fleet_that_was_stopped_say_so() -> None:
    async with detached() as fleet:
        holder = await holder_of(fleet)
        async with FleetClient.to(fleet.url) as link:
            await link.call("stop")
        await asyncio.to_thread(holder.wait, WAIT_S)
        assert await fleet._roster.until(lambda: fleet._roster.lost is not None, deadline_s=WAIT_S)
        with pytest.raises(EngineDeadError, match="this fleet was stopped"):
            await fleet.pause_generation()
        with pytest.raises(EngineDeadError, match=r"none is coming back \(e0, e1 dead: this fleet was stopped\)"):
            await fleet.sample([1], 1)


async def test_a_socket_of_a_fleet_that_was_killed_is_in_nobodys_way(fleet: Fleet) -> None:
    path = socket_of(fleet.url)
    assert path is not None
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    assert path.exists()
    with pytest.raises(EngineDeadError, match="no process of yours on this machine owns a fleet"):
        await Fleet.connect(fleet.url)
    async with FleetClient(path) as link:
        with pytest.raises(EngineDeadError, match="nothing answers"):
            await link.state()
    with pytest.raises(UserError, match=r"no process of yours on this machine owns a fleet at .* known here: none"):
        FleetClient.to(fleet.url)
    assert not path.exists()


async def test_a_look_for_fleets_leaves_a_starting_one_its_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched(socket.socket):
        def bind(self, address: Any, /) -> None:
            super().bind(address)
            present()  # as another process may, between any two steps

    monkeypatch.setattr(socket, "socket", Watched)
    async with Fleet.launch("sim-model", engines=1, **OPTIONS) as fleet:
        path = socket_of(fleet.url)
        assert path is not None
        assert [*present().values()] == [*path.parent.iterdir()] == [path]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        monkeypatch.setattr(service, "refuse_second", lambda _: None)  # a second owner, as fast as the first
        with pytest.raises(StateError, match=r"cannot make the control socket .*fleet-\d+\.sock: .*exists"):
            await fleet.endpoint.open(fleet.endpoint.close)
        async with FleetClient.to(fleet.url) as link:
            assert (await link.state()).pid == os.getpid()


async def test_a_port_whose_fleet_still_ends_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with reserved_port() as port:
        pass
    path = socket_of(f"http://127.0.0.1:{port}")
    assert path is not None
    with service._listen_at(path):  # as if the router had ended, and engines still held their GPUs
        refuse_second(RouterConfig(host="10.0.0.5", port=port).known_url)  # a router there has another address
        with pytest.raises(StateError, match=f"another process owns the fleet behind http://127.0.0.1:{port}"):
            await Fleet.launch("sim-model", engines=1, port=port, log_dir=tmp_path / "logs", **OPTIONS)
    assert not (tmp_path / "logs").exists()
    assert RouterConfig(host="::1", port=8000).known_url == "http://[::1]:8000"


async def test_bad_calls_are_answered(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the fleet's socket lies where it was launched
    async with FleetClient.to(fleet.url) as link:
        with pytest.raises(UserError, match="there is no call 'dance'; known: pause, "):
            await link.call("dance")
        with pytest.raises(UserError, match="malformed arguments of the call 'pause': TypeError"):
            await link.call("pause")
        with pytest.raises(UserError, match="unknown pause mode 'quickly'; known: keep, wait, abort"):
            await link.call("pause", mode="quickly", clear_cache=True, timeout_s=None)
        with pytest.raises(WeightsError, match="malformed weight manifest"):
            await link.call("update_from", manifest={})
        manifest = {"version": 99, "transport": "shared_memory", "location": {"path": "/etc/passwd"}, "tensors": []}
        with pytest.raises(WeightsError, match="it is no store's file"):
            await link.call("update_from", manifest=manifest)
        before = fleet._roster.members
        for count in (1e30, -1, True, "2"):
            with pytest.raises(UserError, match="the number of engines to add is a whole number from 1 to 40"):
                await link.call("add", count=count)
        for seconds in (-1, "nan", None):
            with pytest.raises(UserError, match=r"timeout_s|NoneType"):
                await link.call("collective_rpc", method="m", args=[], kwargs={}, timeout_s=seconds)
        assert fleet._roster.members == before
        for body in (b"[" * 100_000, b"7", b"\xff", b'{"count": 1e999}'):
            answer = await link._http.call("POST", "/control/add", body, timeout_s=WAIT_S)
            assert b'"UserError"' in answer
        http = HttpTransport(fleet.url)
        with pytest.raises(PenstockError):
            await http.post("/control/stop", {}, timeout_s=WAIT_S)  # the router has no such thing
        await http.close()


def test_a_folder_that_others_may_enter_or_that_lies_elsewhere_is_refused(runtime: Path, tmp_path: Path) -> None:
    name = f"penstock-{os.getuid()}"
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (runtime / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="must be a folder of this user that nobody else can enter"):
        folder()
    (runtime / name).unlink()
    (runtime / name).mkdir()
    (runtime / name).chmod(0o750)
    for call in (folder, lambda: socket_of("http://127.0.0.1:1"), lambda: refuse_second(None)):
        with pytest.raises(UserError, match="chmod 700"):
            call()
    assert socket_of("http://example.org:8000") is None
    (runtime / name).chmod(0o700)
    assert folder() == runtime / name


async def test_a_process_of_the_same_user_gets_the_keys_and_nothing_shows_them() -> None:
    async with Fleet.launch("sim-model", engines=2, api_key="of-clients", **SIM) as fleet:
        async with FleetClient.to(fleet.url) as link:
            state = await link.state()
        key = state.admin_key
        assert {m.name: m.api_key for m in state.members} == {
            s.name: fleet.key_of(s.name) for s in await fleet.engines()
        }
        assert key is not None
        assert key == fleet.key_of("e0")
        assert key not in f"{state}{shown(state)}"
        async with Fleet.connect(fleet.url) as adopted:  # without the clients' key too
            await adopted.set_policy("round-robin")
            assert (await adopted.router_admin.engines()).policy["policy"] == "round-robin"
            await adopted.add_engines()
            await check_serves(adopted, engines=3)
            assert adopted.key_of("e2") == key


def test_a_state_that_cannot_be_read_shows_no_key() -> None:
    with pytest.raises(EngineError, match=r"cannot be read \(.*admin_key.*\)") as refused:
        state_of({"admin_key": ["secret"]})
    assert "secret" not in str(refused.value)
