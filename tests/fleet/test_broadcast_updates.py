"""Updates by broadcast to simulated engines, over a real group: in flight, and with engines that die or hang in it."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from patience import HANG_S, WAIT_S
from penstock import Fleet, SamplingParams
from penstock.engine.control import ControlClient
from penstock.errors import UpdateError, WeightsError
from penstock.fleet import delivery
from sim_fleets import SIM, all_serve, broadcast, check_serves, impatient, set_fault, under_way, whole

PARAMS = SamplingParams(max_tokens=400, detokenize=False)
PROMPTS = [[1 + i, 2] for i in range(9)]
OPTIONS: dict[str, Any] = {
    **SIM, "weight_transport": "broadcast", "hang_timeout_s": HANG_S, "restart_backoff_s": 0.05,
    "restart_window_s": 0.5, "max_restarts": 1000, "weight_host_copy": True,
}  # fmt: skip


@pytest.fixture(scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with Fleet.launch("sim-model", engines=3, log_dir=tmp_path_factory.mktemp("logs"), **OPTIONS) as fleet:
        yield fleet


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still makes none of those dead whose transfer another's death has cut."""
    monkeypatch.setattr(delivery, "ANSWER_S", WAIT_S)


def weights(value: float, count: int = 3) -> list[tuple[str, torch.Tensor]]:
    return [(f"w{i}", torch.full((500_000,), value + i)) for i in range(count)] + [("norm", torch.ones(7))]


async def updated(fleet: Fleet, tensors: Any) -> Any:
    """The report of an update among requests, none of which is lost."""
    running = await under_way(fleet, PROMPTS, PARAMS)
    report = await asyncio.wait_for(fleet.update_weights(tensors), WAIT_S)
    await whole(running, PROMPTS, PARAMS)
    return report


async def whole_again(fleet: Fleet) -> None:
    await all_serve(fleet)
    for member in fleet._roster.members:
        info = await member.control.info()
        assert (info.weight_version, info.paused) == (fleet.weight_version, False)


async def test_one_group_carries_every_version(fleet: Fleet) -> None:
    seen = set()
    for i in range(3):
        report = await updated(fleet, iter(weights(float(i))))
        assert [update.engine for update in report.engines] == ["e0", "e1", "e2"]
        assert len({update.checksum for update in report.engines}) == 1
        assert report.bytes == 4 * (3 * 500_000 + 7)
        seen.add(broadcast(fleet)._group.spec.epoch)
    assert len(seen) == 1, "nothing about the membership has changed"
    await whole_again(fleet)


@pytest.mark.parametrize("kind", ["exit", "refuse", "hang"])
async def test_an_engine_that_fails_in_a_broadcast_takes_no_other_along(
    fleet: Fleet, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "hang":
        monkeypatch.setattr(delivery, "ANSWER_S", 10.0)  # it gives no answer
        impatient(fleet._roster.members[1], 15.0)
    await fleet.update_weights(weights(4.0))
    group = broadcast(fleet)._group
    group.spec = replace(group.spec, timeout_s=10.0)  # what hangs is not noticed before this deadline
    before = group.spec.epoch
    await set_fault(fleet._roster.members[1], kind=kind, phase="load")
    report = await updated(fleet, weights(5.0))
    assert list(report.failures) == ["e1"]
    assert [update.engine for update in report.engines] == ["e0", "e2"]
    await whole_again(fleet)  # e1 too: from the copy in host memory
    assert (await fleet.update_weights(weights(6.0))).failures == {}
    # The others may have had all of it when e1 failed, and then it was not sent again.
    assert broadcast(fleet)._group.spec.epoch != before


async def test_nothing_is_held_of_a_version_that_engines_refuse(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    async def unfit(*_: object) -> None:
        raise WeightsError("does not fit")

    tensors = [torch.ones(5)]
    ours = weakref.ref(tensors[0])
    with monkeypatch.context() as patch:
        patch.setattr(ControlClient, "prepare_weights", unfit)
        with pytest.raises(WeightsError, match="does not fit"):
            await fleet.update_weights((name, tensors.pop()) for name in ("w",))
    gc.collect()
    assert ours() is None, "a trainer that goes on needs that memory"
    await whole_again(fleet)


async def test_tensors_that_are_not_twice_the_same_commit_nowhere(fleet: Fleet) -> None:
    class Fickle:
        passes = 0

        def __iter__(self) -> Any:
            self.passes += 1
            yield f"w{self.passes}", torch.ones(3)

    version = fleet.weight_version
    with pytest.raises(UpdateError, match="the second pass over the tensors gave"):
        await asyncio.wait_for(fleet.update_weights(Fickle()), WAIT_S)
    assert fleet.weight_version == version
    await whole_again(fleet)


async def test_an_engine_that_cannot_join_is_named(tmp_path: Path) -> None:
    options = {**OPTIONS, "extra_args": {"data-parallel-size": 2}, "log_dir": tmp_path}
    async with Fleet.launch("sim-model", engines=1, **options) as fleet:
        with pytest.raises(WeightsError, match=r"^weights cannot go by broadcast: engine e0: a simulated"):
            await fleet.update_weights([("w", torch.ones(3))])
        assert fleet.weight_version == 0
        await check_serves(fleet, engines=1)
