"""Ranks that torchrun starts: rank 0 owns the fleet, the other one follows."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from penstock.cli.train import take_launched, train
from penstock.errors import ConfigError
from penstock.train.ranks import Ranks

MODEL = Path(__file__).parents[2] / "examples" / "models" / "sorter-0.8m"
FILE = f"""
name: short
engine: {{model: {MODEL}, profile: sim, max_model_len: 128, extra_args: {{vocab-size: 96, tokens-per-second: 5000}}}}
environment:
  name: reasoning_gym
  options: {{dataset: number_sorting, compact: true, min_numbers: 3, max_numbers: 5, min_decimals: 0, max_decimals: 0}}
rollout: {{groups_per_batch: 2, group_size: 2, max_tokens: 8}}
train: {{steps: 3, checkpoint_every: 2, threads: 1}}
eval: {{size: 4}}
"""
LAUNCHED = {
    "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("nodes", [1, 2])
def test_torchrun_starts_the_ranks_of_a_run(tmp_path: Path, nodes: int):
    (tmp_path / "run.yaml").write_text(FILE)
    agents = start_agents(tmp_path, nodes)
    try:
        said = [agent.communicate(timeout=280)[0] for agent in agents]
    finally:
        end(agents)
    assert [agent.returncode for agent in agents] == [0] * nodes, "\n".join(each[-2000:] for each in said)
    folder = tmp_path / "runs" / "short"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["version"] for row in rows] == [1, 2, 3]
    assert len(list(folder.glob("checkpoints/step-00000003/*.distcp"))) == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_node_that_is_lost_ends_the_run_on_the_other(tmp_path: Path):
    (tmp_path / "run.yaml").write_text(FILE.replace("steps: 3", "steps: 100000"))
    agents = start_agents(tmp_path, 2)
    try:
        metrics = tmp_path / "runs" / "short" / "metrics.jsonl"
        deadline = time.monotonic() + 150
        while not (metrics.exists() and metrics.read_text().count("\n") > 2):
            assert all(agent.poll() is None for agent in agents), agents[0].communicate()[0][-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for process in [*psutil.Process(agents[1].pid).children(recursive=True), agents[1]]:
            process.kill()
        said, _ = agents[0].communicate(timeout=120)
        assert agents[0].returncode
        assert "the ranks of the learner lost each other" in " ".join(said.split())
        assert list(metrics.parent.glob("checkpoints/step-*[0-9]/record.json"))
    finally:
        end(agents)


def start_agents(folder: Path, nodes: int) -> list[subprocess.Popen[str]]:
    """Start torchrun once for each "node", two ranks in all."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), "--nproc-per-node", str(2 // nodes),
        "--master-addr", "127.0.0.1", "--master-port", str(port),
    ]  # fmt: skip
    return [
        subprocess.Popen(
            [*command, "--node-rank", str(node), "-m", "penstock", "train", "run.yaml"],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
        )
        for node in range(nodes)
    ]  # fmt: skip


def end(agents: list[subprocess.Popen[str]]) -> None:
    """End what a test left, and see that nothing else of it lives."""
    for agent in agents:
        if agent.poll() is None:
            for process in [*psutil.Process(agent.pid).children(recursive=True), agent]:
                process.kill()
            agent.wait()


def test_torchrun_is_given_our_message_to_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """torchrun prints `py_callstack` of this file at its end, and no more than a link if there is none."""
    file = tmp_path / "error.json"
    for name, value in {**LAUNCHED, "TORCHELASTIC_ERROR_FILE": str(file)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="no such config file"):
        train(tmp_path / "none.yaml")
    shown = json.loads(file.read_text())["message"]["extraInfo"]
    assert shown["py_callstack"].startswith("no such config file")
    assert shown["timestamp"].isdigit()


def test_engines_do_not_find_the_variables_of_torchrun():
    environment = {"PATH": "/bin", "RANKS_OF_MINE": "x", **LAUNCHED}
    assert take_launched(environment) == LAUNCHED
    assert environment == {"PATH": "/bin", "RANKS_OF_MINE": "x"}
    alone = {"RANK": "3", "PATH": "/bin"}  # of something else than torchrun
    assert take_launched(alone) == {}
    assert alone == {"RANK": "3", "PATH": "/bin"}
    assert os.environ.get("RANK") is None


def test_another_number_of_ranks_than_torchrun_started_is_refused(tmp_path: Path):
    assert Ranks(1, tmp_path, LAUNCHED).count == Ranks(2, tmp_path, LAUNCHED).count == 2
    with pytest.raises(ConfigError, match=r"torchrun started 2 ranks and train\.ranks is 4"):
        Ranks(4, tmp_path, LAUNCHED)
