"""Engines under Ray, on a cluster of several nodes: where they are, what is left of them, nodes that are lost."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from patience import WAIT_S
from penstock import Fleet, SamplingParams
from penstock.errors import ConfigError, EngineStartError
from penstock.fleet.member import State
from penstock.fleet.ray_driver import bundles_of, host_of
from penstock.fleet.ray_engines import RayEngine
from penstock.process import SCRATCH_ENV
from penstock.settings import EngineConfig, FleetConfig
from ray_nodes import LOOPBACK, RayNodes, ignore_present, processes
from sim_fleets import SIM, check_serves, under_way, whole

KEY = "a key, without which nothing listens but on 127.0.0.1"
PROMPTS = [[1 + i, 2, 3] for i in range(16)]

LAUNCHER = """
import asyncio, sys
import penstock

async def main():
    async with penstock.Fleet.launch(
        "sim-model", engines=1, profile="sim", launcher="ray", ray_address=sys.argv[1], api_key="k"
    ) as fleet:
        print("ready", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture(scope="module", autouse=True)
def _only_ours() -> None:
    ignore_present()


@pytest.fixture(scope="module")
async def nodes() -> AsyncIterator[RayNodes]:
    """Two nodes of two CPUs besides the head, which has none and is where the fleets of the tests are held."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LOOPBACK.items():
            patch.setenv(name, value)
        cluster = await RayNodes.start()
        try:
            await cluster.add("127.0.0.2", 2)
            await cluster.add("127.0.0.3", 2)
            yield cluster
        finally:
            await cluster.stop()


def options(nodes: RayNodes, **more: Any) -> dict[str, Any]:
    return {**SIM, "launcher": "ray", "ray_address": nodes.address, "api_key": KEY, "start_timeout_s": WAIT_S, **more}


def hosts(statuses: Any) -> dict[str, str]:
    return {s.name: s.url.split("/")[2].rpartition(":")[0] for s in statuses if s.state is State.SERVING}


def left(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [group for group in groups if group["state"] != "REMOVED"]


def test_an_engine_asks_a_node_for_its_ranks() -> None:
    config = EngineConfig(model="m", profile="gpu", tensor_parallel_size=2, data_parallel_size=2)
    ray = FleetConfig(launcher="ray")
    assert bundles_of(config, ray) == [{"CPU": 1.0, "GPU": 1.0}] * 4
    share = FleetConfig(launcher="ray", ray_cpus=0, ray_gpus=0.5)
    assert bundles_of(config, share) == [{"CPU": 0.0, "GPU": 0.5}] * 4
    assert bundles_of(config.model_copy(update={"profile": "cpu"}), ray) == [{"CPU": 4.0}]


def test_an_engine_on_another_node_is_not_without_a_key() -> None:
    assert host_of("e0", "127.0.0.2", "127.0.0.1", with_key=True) == "127.0.0.2"
    assert host_of("e0", "127.0.0.1", "127.0.0.1", with_key=False) == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"placed on another node, 127\.0\.0\.2, .* there is no key"):
        host_of("e0", "127.0.0.2", "127.0.0.1", with_key=False)


async def test_an_ended_engine_of_which_ray_says_nothing_is_waited_for_no_longer(monkeypatch) -> None:
    monkeypatch.setattr("penstock.fleet.ray_engines.GONE_S", 0.05)

    class Driver:
        async def ask(self, call: str, **_: object) -> None:
            if call == "wait":
                await asyncio.Event().wait()

    driver: Any = Driver()
    engine = RayEngine("e0", "http://127.0.0.1:1", driver)
    await asyncio.wait_for(engine.stop(0.0), WAIT_S)
    assert await engine.wait() == -signal.SIGKILL


@pytest.mark.slow
async def test_a_lost_node_is_engines_lost_and_they_come_back_elsewhere(nodes: RayNodes, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=400, detokenize=False)
    shared = {"weight_transport": "disk", "weight_folder": tmp_path}
    async with Fleet.launch("sim-model", engines=2, **options(nodes, ray_cpus=2, **shared)) as fleet:
        groups = left(await nodes.groups())
        assert [(g["state"], g["strategy"], g["bundles"]) for g in groups] == [
            ("CREATED", "STRICT_PACK", [{"CPU": 2.0}])
        ] * 2
        placed = hosts(await fleet.engines())
        assert (
            sorted(placed.values()) == ["127.0.0.2", "127.0.0.3"] == sorted(node for g in groups for node in g["nodes"])
        )

        with pytest.raises(EngineStartError, match="has no room now for"):
            await fleet.add_engines(1)
        await nodes.add("127.0.0.4", 2)
        (third,) = await fleet.add_engines(1)
        await fleet.remove(third)
        await nodes.until(lambda groups: len(left(groups)) == 2, within_s=WAIT_S)

        await fleet.update_weights([("w", torch.ones(4))])
        running = await under_way(fleet, PROMPTS, params)
        lost = placed["e0"]
        await nodes.lose({"127.0.0.2": 1, "127.0.0.3": 2}[lost])
        out = await whole(running, PROMPTS, params)
        assert out.stop_reasons == ["length"] * len(PROMPTS)
        assert {span.version for spans in out.response_spans for span in spans} == {1}
        await fleet._roster.until(lambda: all(m.state in {State.SERVING, State.STOPPED} for m in fleet._roster.members))
        assert hosts(await fleet.engines()) == {"e0": "127.0.0.4", "e1": placed["e1"]}
        await check_serves(fleet, engines=2)
    await nodes.until(lambda groups: left(groups) == [], within_s=WAIT_S)
    assert processes("sim") == []


@pytest.mark.slow
async def test_a_killed_launcher_leaves_no_engine_and_no_placement_group(nodes: RayNodes) -> None:
    argv = (sys.executable, "-c", LAUNCHER, nodes.address)
    launcher = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    assert launcher.stdout is not None
    try:
        assert await asyncio.wait_for(launcher.stdout.readline(), WAIT_S) == b"ready\n"
        (engine,) = processes("sim")
        scratch = Path(engine.environ()[SCRATCH_ENV])
        assert scratch.is_dir()
        assert len(left(await nodes.groups())) == 1
    finally:
        launcher.kill()
        await launcher.wait()
    await nodes.until(lambda groups: left(groups) == [], within_s=WAIT_S)
    await asyncio.to_thread(psutil.wait_procs, [engine], 20.0)
    assert not engine.is_running()
    assert not scratch.exists()  # by its lifeline: Ray would have killed it alone, and left its cores to themselves


@pytest.mark.parametrize(
    ("more", "error", "says"),
    [
        ({"extra_args": {"no-such-option": 1}}, EngineStartError, "no_such_option"),
        ({"ray_cpus": 0}, ConfigError, r"fleet\.ray_cpus is 0"),
        (
            {"engines": 2, "tensor_parallel_size": 3},
            EngineStartError,
            r"whose nodes have .*CPU: 2, .* has no room now for .*'CPU': 3\.0",
        ),
    ],
    ids=["does not start", "asks for nothing", "too large"],
)
async def test_a_start_that_cannot_be_leaves_no_placement_group(
    nodes: RayNodes, more: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        await Fleet.launch("sim-model", **options(nodes, **more))
    await nodes.until(lambda groups: left(groups) == [], within_s=WAIT_S)
    assert processes("sim") == []


@pytest.mark.slow
async def test_a_driver_that_dies_is_engines_lost_and_a_new_one_takes_its_place(nodes: RayNodes) -> None:
    async with Fleet.launch("sim-model", **options(nodes)) as fleet:
        (driver,) = processes("fleet.ray_driver")
        os.kill(driver.pid, signal.SIGKILL)
        await fleet._roster.until(lambda: fleet._roster.members[0].state is State.DEAD, deadline_s=WAIT_S)
        await fleet._roster.until(lambda: fleet._roster.members[0].state is State.SERVING, deadline_s=WAIT_S)
        await check_serves(fleet, engines=1)
        assert len(left(await nodes.groups())) == 1


@pytest.mark.slow
async def test_engines_share_a_placement_group_that_they_are_given(nodes: RayNodes) -> None:
    group = await nodes.make_group(2)
    async with Fleet.launch("sim-model", engines=2, **options(nodes, ray_placement_group=group)) as fleet:
        await check_serves(fleet, engines=2)
        assert [g["bundles"] for g in left(await nodes.groups())] == [[{"CPU": 1.0}] * 2]
        with pytest.raises(EngineStartError, match="has no 1 bundles left"):
            await fleet.add_engines(1)
        await fleet.remove("e0")
        assert len(await fleet.add_engines(1)) == 1, "in the bundle of the one that left"
    assert len(left(await nodes.groups())) == 1, "it is not ours to remove"
