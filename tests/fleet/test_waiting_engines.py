"""Updates that leave no copy: who returns or is added waits and takes part in the next; what breaks while they run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fleet_fakes import Bench, FakeEngine, on_bench, until

from patience import HANG_S, WAIT_S
from penstock import Fleet, SamplingParams
from penstock.control_types import PauseMode
from penstock.errors import EngineDeadError, UpdateError, WeightsError
from penstock.fleet import delivery
from penstock.fleet.delivery import Delivery
from penstock.fleet.member import State
from sim_fleets import SIM, all_serve, begun, broadcast, engine_process, slowed, whole

WEIGHTS = [("w", torch.ones(500_000)), ("norm", torch.ones(7))]
OPTIONS: dict[str, Any] = {
    **SIM, "weight_transport": "broadcast", "hang_timeout_s": HANG_S,
    "restart_backoff_s": 0.05, "restart_window_s": 0.5, "max_restarts": 1000, "weight_host_copy": False,
}  # fmt: skip


@pytest.fixture(scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with Fleet.launch("sim-model", engines=2, log_dir=tmp_path_factory.mktemp("logs"), **OPTIONS) as fleet:
        yield fleet


async def killed(fleet: Fleet, index: int) -> None:
    """An engine dies, is started anew, and waits."""
    member = fleet._roster.members[index]
    engine_process(member.url).kill()
    assert await fleet._roster.until(lambda: member.state is State.DEAD, deadline_s=WAIT_S)
    assert await fleet._roster.until(lambda: member.awaiting_weights, deadline_s=WAIT_S)


async def updated(fleet: Fleet, tensors: Any = WEIGHTS) -> Any:
    return await asyncio.wait_for(fleet.update_weights(tensors), WAIT_S)


async def test_engines_that_died_or_were_added_serve_after_the_next_update(tmp_path: Any) -> None:
    async with Fleet.launch("sim-model", engines=2, log_dir=tmp_path, **OPTIONS) as fleet:
        await updated(fleet)
        assert fleet._operations._store.current is None  # type: ignore[attr-defined]
        await killed(fleet, 1)
        await fleet.add_engines(1)
        report = await updated(fleet)
        assert [update.engine for update in report.engines] == ["e0", "e1", "e2"]
        assert report.failures == {}
        await all_serve(fleet)


@pytest.mark.parametrize("engines", [1, 2])
async def test_the_last_engines_that_die_get_the_version_back_and_no_request_is_lost(
    tmp_path: Any, engines: int
) -> None:
    """Of one engine from a copy that is kept by default, of several from the module that gave it."""
    module = torch.nn.Linear(100, 100)
    options = {**OPTIONS, "weight_host_copy": None}
    async with Fleet.launch("sim-model", engines=engines, log_dir=tmp_path, **options) as fleet:
        given = module.named_parameters() if engines == 1 else module
        assert (await updated(fleet, given)).version == 1
        params = SamplingParams(max_tokens=400, detokenize=False)
        prompts = [[1 + i, 2] for i in range(4)]
        async with slowed(fleet):
            running = await begun(fleet, prompts, params)
            for member in fleet._roster.members:
                engine_process(member.url).kill()
        await whole(running, prompts, params)
        await all_serve(fleet)
        assert fleet.weight_version == 1
        assert [(await member.control.info()).weight_version for member in fleet._roster.members] == [1] * engines


async def test_a_trainer_that_has_gone_on_cannot_give_the_version_back(tmp_path: Any) -> None:
    module = torch.nn.Linear(3, 3)
    async with Fleet.launch("sim-model", engines=1, log_dir=tmp_path, **OPTIONS) as fleet:
        await updated(fleet, module.named_parameters)
        module.bias.data += 1
        await killed(fleet, 0)
        with pytest.raises(EngineDeadError, match=r"are not those of weight version 1 .*weight_host_copy"):
            await fleet.generate(prompt_token_ids=[[1]], sampling_params={"max_tokens": 1})
        assert [update.engine for update in (await updated(fleet, module)).engines] == ["e0"]
        await all_serve(fleet)


async def test_tensors_that_never_come_hold_nothing(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    class Stuck:
        passes = 0

        def __iter__(self) -> Any:
            self.passes += 1
            yield WEIGHTS[0]
            if self.passes == 2:
                go.wait(WAIT_S)
            yield WEIGHTS[1]

    version = (await updated(fleet)).version
    group = broadcast(fleet)._group
    group.spec = replace(group.spec, timeout_s=1.0)
    try:
        with monkeypatch.context() as short:
            short.setattr(delivery, "ANSWER_S", 0.5)  # for this update alone: in the others an engine may take longer
            with pytest.raises(UpdateError, match="has not given its next tensor"):
                await asyncio.wait_for(fleet.update_weights(Stuck()), WAIT_S)
        assert fleet.weight_version == version
        assert not (await fleet._roster.admin.engines()).gate_closed, "the gate"
        assert await fleet._roster.until(
            lambda: all(m.awaiting_weights for m in fleet._roster.members), deadline_s=WAIT_S
        )
        assert len((await updated(fleet)).engines) == 2
        await all_serve(fleet)
    finally:
        go.set()


async def test_no_second_group_and_nobody_with_half_a_version_serves(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "ANSWER_S", WAIT_S)  # a busy machine may stand still for so long
    await updated(fleet)
    store = broadcast(fleet)
    store._bucket_bytes = 2**21
    invite, calls = store.invite, []
    url = fleet._roster.members[1].url

    class Killing:
        """48 MB, more than sockets hold; while they are sent, an engine is killed."""

        passes = 0

        def __iter__(self) -> Any:
            self.passes += 1
            for i in range(40):
                if (self.passes, i) == (2, 20):
                    engine_process(url).kill()
                yield f"w{i}", torch.full((300_000,), float(i))

    def refused(layouts: Any) -> Any:
        calls.append(layouts)
        raise OSError("no port")

    store.invite = refused
    try:
        with pytest.raises(UpdateError, match="no port"):
            await updated(fleet, Killing())
    finally:
        store.invite = invite
    assert len(calls) == 1
    assert (await fleet._roster.admin.engines()).engines == ()
    assert await fleet._roster.until(lambda: all(m.awaiting_weights for m in fleet._roster.members), deadline_s=WAIT_S)
    assert len((await updated(fleet)).engines) == 2
    await all_serve(fleet)


# --- over fakes ------------------------------------------------------------------------------------------------------


async def waiting(bench: Bench, index: int) -> asyncio.Task[None]:
    member = bench.roster.members[index]
    await bench.roster.mark_dead(member, "gone")
    member.lifecycle.to(State.LAUNCHING, "test")
    member.lifecycle.to(State.SYNCING, "test")
    member.weight_version = bench.engine[member.name].version = 0
    admitting = asyncio.create_task(bench.admission.admit(member))
    await until(lambda: member.awaiting_weights)
    return admitting


@pytest.mark.parametrize("paused", [False, True])
@on_bench("ab")
async def test_an_engine_that_waited_for_weights_joins_paused_where_the_fleet_is(bench: Bench, *, paused: bool) -> None:
    await bench.operations.update([], None)
    bench.store.current = None
    if paused:
        await bench.operations.pause(PauseMode.KEEP, clear_cache=True)
    admitting = await waiting(bench, 1)
    bench.store.commit = lambda _: None  # type: ignore[method-assign] - nothing is kept of this one either
    assert len((await bench.operations.update([], None)).engines) == 2
    await asyncio.wait_for(admitting, 5.0)


@on_bench("ab")
async def test_an_engine_that_waits_misses_no_update_where_one_follows_another(bench: Bench) -> None:
    bench.store.commit = lambda _: None  # type: ignore[method-assign] - nothing is kept of any
    await bench.operations.update([], None)
    member = bench.roster.members[1]
    await bench.roster.mark_dead(member, "gone")
    bench.engine["a"].busy.clear()
    first = asyncio.create_task(bench.operations.update([], None))
    await until(lambda: bench.operations.queue.turns)
    member.lifecycle.to(State.LAUNCHING, "test")
    member.lifecycle.to(State.SYNCING, "test")
    member.weight_version = bench.engine["b"].version = 0
    admitting = asyncio.create_task(bench.admission.admit(member))
    bench.engine["a"].busy.set()
    assert [len((await update).engines) for update in (first, bench.operations.update([], None))] == [1, 2]
    await asyncio.wait_for(admitting, 5.0)


@on_bench("abc", min_engines=3, settled=False)
async def test_an_engine_that_waits_goes_on_waiting_where_the_update_does_not_commit(bench: Bench) -> None:
    await bench.operations.update([], None)
    bench.store.current = None
    admitting = await waiting(bench, 2)
    bench.engine["a"].faults["apply-load"] = "die"
    with pytest.raises(UpdateError, match="2 engines were good when it was applied"):
        await bench.operations.update([], None)
    assert bench.roster.members[2].awaiting_weights
    admitting.cancel()
    await asyncio.wait((admitting,))
    assert not bench.roster.members[2].awaiting_weights


@pytest.mark.parametrize("error", [WeightsError("the second pass"), OSError("no space left")])
@on_bench("ab")
async def test_a_store_that_cannot_keep_a_version_does_not_fail_the_update(bench: Bench, error: Exception) -> None:

    def commit(_: object) -> None:
        raise error

    bench.store.commit = commit  # type: ignore[method-assign]
    report = await bench.operations.update([], None)
    assert (report.version, len(report.engines), bench.roster.version) == (1, 2, 1)
    assert bench.store.current is None


class Shy(FakeEngine):
    """Does not come to a group."""

    released = False

    async def join_group(self, group: Any) -> None:  # noqa: ARG002 - the real one's
        await asyncio.Event().wait()

    async def release(self) -> None:
        self.released = True


class Host:
    """What `Delivery` needs of a sender, of a group that is never whole."""

    def invite(self, layouts: Any) -> list[dict[str, Any]]:
        return [{} for _ in layouts]

    def form(self) -> None: ...
    def absent(self, layouts: Any) -> list[int]:  # noqa: ARG002 - the real one's
        return []

    def formed(self) -> bool:
        return False

    def interrupt(self, why: str) -> None: ...


@pytest.mark.parametrize("torn", [False, True])
@on_bench("a", settled=False)
async def test_an_engine_that_does_not_come_to_a_second_group_is_released_if_torn(bench: Bench, *, torn: bool) -> None:
    member = bench.roster.members[0]
    member.control = shy = Shy("a", bench.journal)
    member.process = None
    member.torn = "half" if torn else None
    host: Any = Host()
    assert await Delivery(host, bench.roster, 0.05).gather([member]) == []
    assert (member.state, shy.released) == (State.DEAD, torn)
