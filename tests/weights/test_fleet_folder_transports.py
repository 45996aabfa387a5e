"""A fleet whose versions lie in a folder: engines that join and die get them, and a damaged one changes nothing."""

from __future__ import annotations

import asyncio

import pytest
import torch

from patience import WAIT_S
from penstock.errors import WeightsError
from penstock.fleet.fleet import Fleet
from penstock.fleet.member import State


@pytest.fixture(params=["disk", "delta"])
async def fleet(request, tmp_path):
    options = {"weight_transport": request.param, "weight_folder": tmp_path, "restart_backoff_s": 0.05}
    async with Fleet.launch("sim-model", engines=2, profile="sim", **options) as fleet:
        yield fleet


async def test_updates_joins_and_returns(fleet):
    weights = {"w": torch.randn(64, 32).bfloat16(), "v": torch.randn(9)}
    for version in (1, 2, 3):
        weights["w"][version] += 1
        report = await fleet.update_weights(weights.items())
        assert (report.version, len(report.engines), report.failures) == (version, 2, {})
    await fleet.add_engines(1)
    (first, *_) = fleet._roster.members
    first.process.kill()
    async with asyncio.timeout(WAIT_S):
        await fleet._roster.until(lambda: first.state is State.DEAD)
        await fleet._roster.until(lambda: first.state is State.SERVING)
    assert [member.weight_version for member in fleet._roster.members] == [3, 3, 3]
    report = await fleet.update_weights(weights.items())
    assert len({engine.checksum for engine in report.engines}) == 1
    assert len(report.engines) == 3


async def test_a_damaged_file_is_refused_and_nothing_changes(fleet, tmp_path, monkeypatch):
    weights = {"w": torch.randn(64, 32)}
    await fleet.update_weights(weights.items())
    stores = fleet._operations._store
    publish = stores.publish

    def damaged(*arguments):
        before = set(tmp_path.glob("v*"))
        manifest = publish(*arguments)
        (file,) = set(tmp_path.glob("v*")) - before
        data = bytearray(file.read_bytes())
        data[-9] ^= 1
        file.write_bytes(data)
        return manifest

    weights["w"][5] += 1
    with monkeypatch.context() as patch:
        patch.setattr(stores, "publish", damaged)
        with pytest.raises(WeightsError, match=r"checksum|damaged"):
            await fleet.update_weights(weights.items())
    assert fleet.weight_version == 1
    assert (await fleet.update_weights(weights.items())).version == 2
