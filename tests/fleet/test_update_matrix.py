"""Six phases of an update times three kinds of failure, on processes: one leaves and returns, the others commit."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from patience import HANG_S, WAIT_S
from penstock import Fleet
from penstock.errors import EngineHTTPError, UpdateError, WeightsError
from penstock.fleet.member import Member
from sim_fleets import LONG, SIM, check_serves, impatient, returned, router_process, set_fault, strike, under_way, whole

PROMPTS = [[1 + i, 2] for i in range(9)]
GOOD = [("w", torch.ones(64))]
FAULT = {"refused": "refuse", "hung": "hang", "killed": "exit"}
OPTIONS: dict[str, Any] = {
    **SIM, "hang_timeout_s": HANG_S, "restart_backoff_s": 0.05, "restart_window_s": 0.5, "max_restarts": 1000,
}  # fmt: skip


@pytest.fixture(scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with Fleet.launch("sim-model", engines=3, log_dir=tmp_path_factory.mktemp("logs"), **OPTIONS) as fleet:
        yield fleet


async def arm(member: Member, phase: str, kind: str) -> None:
    if kind == "hung":
        impatient(member)
    await set_fault(member, kind=FAULT[kind], phase=phase)


def send(member: Member, kind: str) -> None:
    if kind == "hung":
        impatient(member)
    strike(member, signal.SIGSTOP if kind == "hung" else signal.SIGKILL)


async def update_under_load(fleet: Fleet, tensors: Any, before: Callable[[], Any]) -> Any:
    """The report, or the error, of an update among requests, none of which is lost; then all serve one version."""
    member = fleet._roster.members[1]
    changes = len(member.lifecycle.history)
    running = await under_way(fleet, PROMPTS, LONG)
    await before()
    try:
        outcome: Any = await asyncio.wait_for(fleet.update_weights(tensors), WAIT_S)
    except (WeightsError, EngineHTTPError, UpdateError) as error:
        outcome = error
    await whole(running, PROMPTS, LONG)
    if not isinstance(outcome, Exception) and outcome.failures:
        await returned(fleet, member, changes)
    await check_serves(fleet, engines=3)
    for each in fleet._roster.members:
        info = await each.control.info()
        assert (info.weight_version, info.paused) == (fleet.weight_version, False)
    assert not (await fleet._roster.admin.engines()).gate_closed
    return outcome


async def nothing() -> None:
    pass


def one_left(report: Any) -> None:
    assert list(report.failures) == ["e1"]
    assert [update.engine for update in report.engines] == ["e0", "e2"]


@pytest.mark.parametrize("kind", ["refused", "hung", "killed"])
@pytest.mark.parametrize("phase", ["prepare", "pause", "load", "resume"])
async def test_an_engine_that_fails_in_a_phase_leaves_alone(fleet: Fleet, phase: str, kind: str) -> None:
    version = fleet.weight_version
    one_left(await update_under_load(fleet, GOOD, lambda: arm(fleet._roster.members[1], phase, kind)))
    assert fleet.weight_version == version + 1


@pytest.mark.parametrize("kind", ["refused", "hung", "killed"])
async def test_an_update_meets_a_failure_while_the_trainer_publishes(fleet: Fleet, kind: str) -> None:
    version = fleet.weight_version

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(8)
        if kind != "refused":
            send(fleet._roster.members[1], kind)
        yield "b", torch.full((8,), float("nan") if kind == "refused" else 1.0)

    outcome = await update_under_load(fleet, tensors(), nothing)
    if kind == "refused":
        assert isinstance(outcome, WeightsError)
        assert fleet.weight_version == version
    else:
        one_left(outcome)
        assert fleet.weight_version == version + 1


@pytest.mark.parametrize("kind", ["refused", "hung", "killed"])
async def test_an_update_meets_a_failure_at_the_gate(fleet: Fleet, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router refuses, an engine stops, the router is killed, each when the gate is to close."""
    version, roster = fleet.weight_version, fleet._roster
    gate = roster.gate

    async def failing(*, closed: bool) -> None:
        monkeypatch.setattr(roster, "gate", gate)
        if kind == "refused":
            raise EngineHTTPError("no gate today", status=500)
        if kind == "hung":
            send(roster.members[1], kind)
        else:
            router_process(fleet.url).kill()
        await gate(closed=closed)

    monkeypatch.setattr(roster, "gate", failing)
    outcome = await update_under_load(fleet, GOOD, nothing)
    if kind == "refused":
        assert isinstance(outcome, EngineHTTPError)
        assert fleet.weight_version == version
    elif kind == "hung":
        one_left(outcome)
    else:
        assert len(outcome.engines) == 3
        assert fleet.weight_version == version + 1


async def test_too_few_made_it_and_all_are_back_at_the_version_before(tmp_path: Path) -> None:
    async with Fleet.launch("sim-model", engines=2, min_engines=2, log_dir=tmp_path, **OPTIONS) as fleet:
        await fleet.update_weights(GOOD)
        good, killed = fleet._roster.members
        process = good.process
        await arm(killed, "load", "killed")
        with pytest.raises(UpdateError, match="version 2 was not committed: 1 engines were good when it was applied"):
            await fleet.update_weights(GOOD)
        assert fleet.weight_version == 1
        assert await fleet._roster.until(lambda: len(fleet._roster.live()) == 2, deadline_s=WAIT_S)
        await check_serves(fleet, engines=2)
        assert good.process is process, "it went back, and was not started anew"
        for member in (good, killed):
            assert (await member.control.info()).weight_version == 1
        assert (await fleet.update_weights(GOOD)).version == 3, "tokens were made under 2"
