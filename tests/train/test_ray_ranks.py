"""Ranks that are actors of a Ray cluster of two nodes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from random_trajectories import trajectories_of
from test_torchrun import FILE

from patience import WAIT_S
from penstock.config import TrainConfig
from penstock.errors import LearnerError
from penstock.train.grpo import Trainee
from penstock.train.learner import LocalLearner
from penstock.train.ranks import Ranks
from ray_nodes import LOOPBACK, RayNodes

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
CONFIG = TrainConfig(threads=1, micro_batch_tokens=64)


@pytest.fixture
async def nodes(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RayNodes]:
    """Two nodes of one CPU each, and a head that has none."""
    for name, value in {**LOOPBACK, "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    cluster = await RayNodes.start()
    try:
        await cluster.add("127.0.0.2", 1)
        await cluster.add("127.0.0.3", 1)
        yield cluster
    finally:
        await cluster.stop()


def rank_processes() -> list[psutil.Process]:
    below = psutil.Process().children(recursive=True)
    return [p for p in below if p.status() != psutil.STATUS_ZOMBIE and "penstock.train.ranks" in p.cmdline()]


async def test_ranks_on_two_nodes_train_as_one_process_and_a_lost_node_is_named(
    nodes: RayNodes, micro_model: str, tmp_path: Path
):
    one = Trainee(LocalLearner(micro_model, CONFIG, seed=0), CONFIG)
    async with asyncio.timeout(240), Ranks(3, tmp_path, {}, nodes.address) as ranks:
        learner = await ranks.load(micro_model, CONFIG, seed=0)
        three = Trainee(learner, CONFIG)
        (group,) = await nodes.groups()
        assert sorted(group["nodes"]) == ["127.0.0.2", "127.0.0.3"]
        assert len(rank_processes()) == 2
        for step in range(3):
            batch = trajectories_of(one, seed=step, version=step)
            there, here = one.step(batch), await asyncio.to_thread(three.step, batch)
            assert here["loss"] == pytest.approx(there["loss"], rel=1e-3, abs=1e-4)
        await nodes.lose(1)

        async def steps() -> None:
            while True:
                await asyncio.to_thread(three.step, batch)

        with pytest.raises(LearnerError, match=r"rank [12] (was lost with its node|ended with status)"):
            await ranks.during(steps())
    for _ in range(100):
        if not rank_processes():
            break
        await asyncio.sleep(0.1)  # they end with their actors, of which no event comes here
    assert not rank_processes()


async def test_a_run_with_ranks_of_ray_ends_and_leaves_none(nodes: RayNodes, tmp_path: Path):
    (tmp_path / "run.yaml").write_text(FILE)
    command = ["-m", "penstock", "train", "run.yaml", "train.ranks=3", f"train.ray_address={nodes.address}"]
    run = await asyncio.create_subprocess_exec(
        sys.executable, *command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await asyncio.wait_for(run.communicate(), 250)
    assert run.returncode == 0, said.decode()[-2000:]
    folder = tmp_path / "runs" / "short"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["version"] for row in rows] == [1, 2, 3]
    assert len(list(folder.glob("checkpoints/step-00000003/*.distcp"))) == 3
    assert not rank_processes()
    await nodes.until(lambda groups: all(group["state"] == "REMOVED" for group in groups), within_s=WAIT_S)
