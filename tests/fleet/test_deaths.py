"""Deaths of engine and router processes under requests: noticed, replaced, and back with the weights of the moment."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from patience import WAIT_S
from penstock import Fleet, SamplingParams
from penstock.engine.client import DataClient
from penstock.errors import EngineDeadError, UpdateError
from penstock.fleet.member import Member, State
from sim_fleets import (
    CONTEXT,
    LONG,
    SIM,
    begun,
    check_serves,
    in_flight,
    returned,
    router_process,
    set_fault,
    slowed,
    strike,
    under_way,
    whole,
)
from sim_verify import verify

SHORT = SamplingParams(max_tokens=20, detokenize=False)
PROMPTS = [[1 + i, 2] for i in range(12)]


@pytest.fixture(scope="module")
async def mortal(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    logs = {"log_dir": tmp_path_factory.mktemp("logs")}
    options = {"max_restarts": 1000, "restart_backoff_s": 0.05, "restart_window_s": 0.5, "hang_timeout_s": 6.0}
    async with Fleet.launch("sim-model", engines=3, health_interval_s=0.2, **SIM, **logs, **options) as fleet:
        yield fleet


async def exit_with_a_status(member: Member) -> None:
    await set_fault(member, kind="exit", phase="tokens")


async def die_in_the_core(member: Member) -> None:
    await set_fault(member, kind="core_death", phase="tokens")


async def stop_in_the_core(member: Member) -> None:
    """As vLLM does whose core is a process of its own, and is stopped: the server before it is well."""
    for phase in ("control", "request", "tokens"):
        await set_fault(member, kind="hang", phase=phase, times=1 << 30)


async def refuse_health(member: Member) -> None:
    await set_fault(member, kind="refuse", phase="health", times=1000)  # the router asks too


async def serves_the_weights_in_force(fleet: Fleet, member: Member) -> None:
    """Asked itself, past the router: its label, and the tokens it makes."""
    assert (await member.control.info()).weight_version == fleet.weight_version
    engine = DataClient(member.url, api_key=member.api_key)
    try:
        (sample,) = await engine.sample([3, 1, 4], 1, SHORT)
    finally:
        await engine.close()
    assert verify([3, 1, 4], sample, params=SHORT, context=CONTEXT) == []
    assert set(sample.versions()) == {fleet.weight_version}


@pytest.mark.parametrize(
    "death",
    [exit_with_a_status, die_in_the_core, stop_in_the_core, refuse_health],
    ids=lambda death: death.__name__,
)
async def test_an_engine_that_dies_costs_no_request_and_returns(mortal: Fleet, death: Callable) -> None:
    fleet = mortal
    await fleet.update_weights([("w", torch.ones(4))])
    member = fleet._roster.members[1]
    process, before = member.process, len(member.lifecycle.history)
    running = await under_way(fleet, PROMPTS, LONG)
    await death(member)
    await whole(running, PROMPTS, LONG)
    await returned(fleet, member, before)
    assert [m.name for m in fleet._roster.members] == ["e0", "e1", "e2"]
    assert member.process is not process
    await serves_the_weights_in_force(fleet, member)
    report = await fleet.update_weights([("w", torch.zeros(4))])
    assert len(report.engines) == 3
    assert len({update.checksum for update in report.engines}) == 1
    await check_serves(fleet, engines=3)


@pytest.mark.parametrize("through", ["holder", "adopted"])
async def test_one_death_of_a_core_costs_a_request_one_try_and_the_engine_one_restart(
    through: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server lives on for 0.3 s, and answers everything at once with an error."""
    caplog.set_level("INFO", "penstock.fleet.supervise")
    monkeypatch.setattr("penstock.fleet.supervise.PROBE_ALL_S", WAIT_S)
    options = {"max_restarts": 1, "restart_backoff_s": 0.05, "log_dir": tmp_path}
    async with AsyncExitStack() as stack:
        holder = await stack.enter_async_context(Fleet.launch("sim-model", engines=2, **SIM, **options))
        fleet = holder if through == "holder" else await stack.enter_async_context(Fleet.connect(holder.url))
        member = holder._roster.members[1]
        async with slowed(holder):
            running = await begun(fleet, PROMPTS, LONG)
        before = len(member.lifecycle.history)
        await die_in_the_core(member)
        await whole(running, PROMPTS, LONG)
        # The router sends on what has had no byte yet; of the others each counts once.
        assert fleet.counters.deaths <= len(PROMPTS) // 2
        await returned(holder, member, before)
        assert caplog.text.count("engine e1 is restarted in 0.05 s") == 1


async def test_all_die_at_once_and_requests_wait_for_them(mortal: Fleet) -> None:
    fleet = mortal
    await fleet.update_weights([("w", torch.ones(4))])
    before = [len(m.lifecycle.history) for m in fleet._roster.members]
    for member in fleet._roster.members:
        strike(member)
    for member, length in zip(fleet._roster.members, before, strict=True):
        noticed = lambda m=member, b=length: len(m.lifecycle.history) > b  # noqa: E731
        assert await fleet._roster.until(noticed, deadline_s=WAIT_S)
    held = asyncio.create_task(fleet.generate(prompt_token_ids=PROMPTS, sampling_params=SHORT))
    report = await asyncio.wait_for(fleet.update_weights([("w", torch.zeros(4))]), WAIT_S)
    assert report.engines, "it waited for an engine that came back"
    await whole(held, PROMPTS, SHORT)
    for member, length in zip(fleet._roster.members, before, strict=True):
        await returned(fleet, member, length)
        await serves_the_weights_in_force(fleet, member)
    await check_serves(fleet, engines=3)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=str)
async def test_a_router_that_dies_is_back_on_its_port_with_its_engines_and_gate(
    mortal: Fleet, number: signal.Signals
) -> None:
    fleet = mortal
    await fleet.pause_generation()
    router = router_process(fleet.url)
    router.send_signal(number)
    _, alive = await asyncio.to_thread(psutil.wait_procs, [router], timeout=WAIT_S)
    assert alive == []
    await asyncio.wait_for(fleet.update_weights([("w", torch.ones(4))]), WAIT_S)
    state = await fleet._roster.admin.engines()
    assert state.gate_closed, "the fleet is paused"
    assert {e.name: e.weight_version for e in state.engines} == dict.fromkeys(["e0", "e1", "e2"], fleet.weight_version)
    late = asyncio.create_task(fleet.generate(prompt_token_ids=PROMPTS, sampling_params=SHORT))
    await asyncio.sleep(0.1)
    assert not late.done()
    await fleet.resume_generation()
    await whole(late, PROMPTS, SHORT)
    await check_serves(fleet, engines=3)


async def test_a_start_may_take_longer_than_the_router_holds_a_request(tmp_path: Path) -> None:
    options = {"max_hold_s": 0.5, "restart_backoff_s": 2.0, "log_dir": tmp_path}
    async with Fleet.launch("sim-model", engines=1, **SIM, **options) as fleet:
        async with slowed(fleet):
            running = await begun(fleet, PROMPTS, LONG)
            strike(fleet._roster.members[0])
        await whole(running, PROMPTS, LONG)


def streams(fleet: Fleet) -> list[AsyncGenerator[dict[str, Any]]]:
    body = {"model": "sim-model", "max_tokens": 300}
    chat = [{"role": "user", "content": "x"}]
    return [
        fleet.completion_stream({**body, "prompt": "x"}),
        fleet.chat_completion_stream({**body, "messages": chat}),
    ]


async def read(stream: AsyncGenerator[dict[str, Any]]) -> None:
    async for _ in stream:
        pass


async def test_an_exhausted_budget_is_said_and_with_none_left_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with Fleet.launch("sim-model", engines=2, max_restarts=0, **SIM) as fleet:
        first, second = fleet._roster.members
        strike(first)
        assert await fleet._roster.until(lambda: first.state is State.DEAD, deadline_s=WAIT_S)
        assert first.lifecycle.reason == "its process exited with status -9"
        report = await fleet.update_weights([("w", torch.ones(4))])
        assert [update.engine for update in report.engines] == ["e1"]
        await check_serves(fleet, engines=1)
        async with slowed(fleet):
            running = await begun(fleet, PROMPTS, LONG)
            open_ones = streams(fleet)
            for stream in open_ones:
                await anext(stream)
            await in_flight(fleet, lambda requests: requests == len(PROMPTS) + 2)
            strike(second)
        reading = [read(stream) for stream in (*open_ones, *streams(fleet))]
        for waiting in (running, *reading, fleet.sample([1], 1, LONG), fleet.pause_generation()):
            with pytest.raises(EngineDeadError, match="no engine is left, and none is coming back"):
                await asyncio.wait_for(waiting, WAIT_S)
        with pytest.raises(UpdateError, match="0 engines were good before it began"):
            await fleet.update_weights([("w", torch.ones(4))])
    logs = {log.name for folder in tmp_path.iterdir() for log in folder.iterdir()}
    assert logs == {"e0.log", "e1.log", "router.log"}, "kept, because some died"
