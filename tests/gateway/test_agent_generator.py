"""Episodes of a callable and of a command through a gateway that is served over HTTP."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from gateway_rig import KEY, Rig
from penstock.errors import PenstockError
from penstock.gateway.agent import AgentGenerator, Episode
from penstock.gateway.app import serving
from penstock.rollout.environment import Environment, Task
from penstock.rollout.generator import GeneratorInput
from penstock.rollout.tokenizer import Tokenizer
from penstock.train.rollouts import greedy_accuracy
from penstock.types import SamplingParams

PROGRAM = str(Path(__file__).with_name("agent_program.py"))


class Lengths(Environment):
    def train_task(self, index: int) -> Task:
        return Task(f"t{index}", f"task {index}", {"n": index})

    def heldout_tasks(self, n: int) -> list[Task]:
        return [self.train_task(-1 - i) for i in range(n)]

    def reward(self, task: Task, response_text: str) -> float:
        del task
        return float(len(response_text))


@pytest.fixture
async def served(tokenizer: Tokenizer) -> AsyncIterator[tuple[Rig, str]]:
    rig = Rig(tokenizer)
    async with serving(rig.gateway) as base:
        yield rig, base


def generator(served: tuple[Rig, str], agent: Any, **options: Any) -> AgentGenerator:
    rig, base = served
    tenant = rig.gateway.tenant_of(KEY)
    assert tenant is not None
    return AgentGenerator(rig.gateway, base, tenant, Lengths(), agent, **options)


def of_programs(log_dir: Path) -> list[psutil.Process]:
    """What is left of the children that the programs say they started."""
    found: list[psutil.Process] = []
    for log in log_dir.iterdir():
        for pid in re.findall(r"child (\d+)", log.read_text()):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(int(pid))
                found += [process] if process.status() != psutil.STATUS_ZOMBIE else []
    return found


async def test_a_command_plays_episodes_and_nothing_of_it_is_left(served: tuple[Rig, str], tmp_path: Path) -> None:
    rig, _ = served
    rig.engine.texts = ["one"] * 4
    made = generator(served, [sys.executable, PROGRAM, "{prompt}", "end"], log_dir=tmp_path, concurrency=2)
    batch = GeneratorInput([Lengths().train_task(i) for i in range(2)], num_samples=2, group_ids=["a", "b"])
    output = await made.generate(batch)
    assert [t.group_id for t in output.trajectories] == ["a", "a", "b", "b"]
    for t in output.trajectories:
        assert len(t.turn_rewards) == 2
        assert rig.tokenizer.decode(t.prompt_ids).count("task ") == 1
    assert set(output.rewards) <= {3.0, 4.0}  # of the last answer: `one` or `done`
    assert sum(map(sum, output.loss_masks)) == sum(len(ids) for ids in rig.engine.made)
    assert of_programs(tmp_path) == []
    assert all("said" in log.read_text() for log in tmp_path.iterdir())
    assert rig.gateway.sessions(rig.gateway.tenant_of(KEY)) == []


async def test_a_command_that_fails_has_no_reward(served: tuple[Rig, str], tmp_path: Path) -> None:
    made = generator(served, [sys.executable, PROGRAM, "{prompt}", "fail"], log_dir=tmp_path)
    output = await made.generate(GeneratorInput([Lengths().train_task(0)]))
    assert output.rewards == [0.0]
    assert of_programs(tmp_path) == []


async def test_an_agent_over_its_time_has_no_reward_and_its_processes_end(
    served: tuple[Rig, str], tmp_path: Path
) -> None:
    rig, _ = served

    async def agent(episode: Episode) -> float:
        headers = {"Authorization": f"Bearer {episode.api_key}"}
        await rig.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, **headers)
        await asyncio.Event().wait()
        return 1.0

    made = generator(served, agent, timeout_s=5.0)
    output = await made.generate(GeneratorInput([Lengths().train_task(0)]))
    assert output.rewards == [0.0]
    hanging = generator(served, ["sh", "-c", "sleep 600 & echo child $!; wait"], log_dir=tmp_path, timeout_s=5.0)
    with pytest.raises(PenstockError, match="asked for no turn within 5 s"):
        await hanging.generate(GeneratorInput([Lengths().train_task(0)]))
    assert of_programs(tmp_path) == []


async def test_an_agent_that_asks_nothing_is_an_error_with_its_output(served: tuple[Rig, str], tmp_path: Path) -> None:
    made = generator(served, [sys.executable, "-c", "raise SystemExit('no such tool')"], log_dir=tmp_path)
    with pytest.raises(PenstockError, match=r"asked for no turn: it ended with status 1; .*no such tool"):
        await made.generate(GeneratorInput([Lengths().train_task(0)]))


async def test_an_episode_without_a_turn_gives_no_row_until_many_in_a_row_have_none(
    served: tuple[Rig, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, _ = served

    async def agent(episode: Episode) -> float:
        if episode.task.metadata["n"] % 2:
            raise OSError("no sandbox")
        headers = {"Authorization": f"Bearer {episode.api_key}"}
        await rig.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, **headers)
        return 1.0

    monkeypatch.setattr("penstock.gateway.agent.MOST_SILENT", 4)
    made = generator(served, agent)
    tasks = [Lengths().train_task(i) for i in range(2)]
    assert [t.group_id for t in (await made.generate(GeneratorInput(tasks))).trajectories] == ["t0"]
    assert await greedy_accuracy(made, tasks, 9) == 0.5
    output = await made.generate(GeneratorInput(tasks[1:], num_samples=2))
    assert (output.trajectories, output.metrics) == ((), {})
    with pytest.raises(PenstockError, match=r"task 't1' asked for no turn.*no sandbox"):
        await made.generate(GeneratorInput(tasks[1:], num_samples=2))


async def test_a_callable_gives_its_reward_and_an_evaluation_one_row(served: tuple[Rig, str]) -> None:
    rig, _ = served

    async def agent(episode: Episode) -> float:
        headers = {"Authorization": f"Bearer {episode.api_key}"}
        for text in (episode.task.prompt, "a sub-agent"):
            await rig.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, **headers)
        return 0.5

    made = generator(served, agent)
    output = await made.generate(GeneratorInput([Lengths().train_task(0)]))
    assert output.rewards == [0.5, 0.5]
    greedy = SamplingParams(temperature=0.0)
    output = await made.generate(GeneratorInput([Lengths().train_task(0)] * 2, sampling_params=greedy))
    assert len(output.trajectories) == 2
    assert [params.temperature for params in rig.engine.params] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
