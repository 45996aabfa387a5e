"""Episodes of a callable and of a command through a gateway that is served over HTTP."""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from gateway_rig import KEY, PARAMETERS, Rig
from penstock.errors import PenstockError
from penstock.gateway.agent import AgentGenerator, Episode
from penstock.gateway.app import serving
from penstock.gateway.graph import Limits
from penstock.rollout.environment import Environment, Task
from penstock.rollout.generator import GeneratorInput
from penstock.rollout.tokenizer import Tokenizer
from penstock.train.rollouts import greedy_accuracy
from penstock.types import SamplingParams

TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
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
    assert {t.reward for t in output.trajectories} <= {3.0, 4.0}  # of the last answer: `one` or `done`
    assert sum(sum(t.loss_mask) for t in output.trajectories) == sum(len(ids) for ids in rig.engine.made)
    assert of_programs(tmp_path) == []
    assert all("said" in log.read_text() for log in tmp_path.iterdir())
    assert {t.episode_id for t in output.trajectories} == {log.stem for log in tmp_path.iterdir()}
    assert rig.gateway.sessions(rig.gateway.tenant_of(KEY)) == []


async def test_a_command_has_none_of_our_keys_and_its_output_is_kept_up_to_a_number(
    served: tuple[Rig, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PENSTOCK_API_KEY", "PENSTOCK_GATEWAY_KEY", "VLLM_API_KEY"):
        monkeypatch.setenv(name, "secret")
    program = "import os; print([name for name, value in os.environ.items() if value == 'secret'])"
    made = generator(served, [sys.executable, "-c", program], log_dir=tmp_path, most_logs=2, concurrency=1)
    with pytest.raises(PenstockError, match="asked for no turn"):
        await made.generate(GeneratorInput([Lengths().train_task(0)], num_samples=4))
    logs = list(tmp_path.iterdir())
    assert [log.read_text() for log in logs] == ["[]\n"] * 2


async def test_a_callable_makes_no_folder_for_output(
    served: tuple[Rig, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def agent(episode: Episode) -> float:
        await ask(served[0], episode, "be brief", "add")
        return 1.0

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    output = await generator(served, agent).generate(GeneratorInput([Lengths().train_task(0)], num_samples=1))
    assert [t.reward for t in output.trajectories] == [1.0]
    assert list(tmp_path.iterdir()) == []


async def ask(rig: Rig, episode: Episode, *messages: str, tools: Sequence[Any] = ()) -> httpx.Response:
    """Sends texts as messages in turns: system's first, then user's and the assistant's."""
    roles = ("system", "user", "assistant", "user", "assistant", "user")
    body: dict[str, Any] = {"messages": [{"role": r, "content": t} for r, t in zip(roles, messages, strict=False)]}
    headers = {"Authorization": f"Bearer {episode.api_key}"}
    return await rig.http.post("/v1/chat/completions", json=body | ({"tools": tools} if tools else {}), headers=headers)


async def test_an_agent_has_the_budget_of_its_generator(served: tuple[Rig, str]) -> None:
    codes: list[int] = []

    async def agent(episode: Episode) -> float:
        codes.extend([(await ask(served[0], episode, "s", f"{i}")).status_code for i in range(3)])
        return 1.0

    await generator(served, agent, limits=Limits(max_turns=2)).generate(GeneratorInput([Lengths().train_task(0)]))
    assert codes == [200, 200, 400]


@pytest.mark.parametrize("evaluation", [True, False])
async def test_the_last_answer_is_that_of_the_main_conversation(served: tuple[Rig, str], *, evaluation: bool) -> None:
    """A title at the end was scored in its place."""
    rig, _ = served
    rig.engine.texts = ["title", "one", "sub", "sub again", "the answer", "another title"]

    async def agent(episode: Episode) -> None:
        await ask(rig, episode, "Name this", "do it")
        await ask(rig, episode, "Work", "do it", tools=[TOOL])
        await ask(rig, episode, "Help", "a part")
        await ask(rig, episode, "Help", "a part", "sub", "more")
        await ask(rig, episode, "Work", "do it", "one", "go on", tools=[TOOL])
        await ask(rig, episode, "Name this", "it is done")

    given = SamplingParams(temperature=0.0) if evaluation else None
    batch = GeneratorInput([Lengths().train_task(0)], sampling_params=given)
    output = await generator(served, agent).generate(batch)
    assert {t.reward for t in output.trajectories} == {float(len("the answer"))}
    assert len(output.trajectories) == (1 if evaluation else 4)
    assert len({t.episode_id for t in output.trajectories}) == 1
    if evaluation:
        assert "the answer" in rig.tokenizer.decode(output.trajectories[0].response_ids)


async def test_of_conversations_of_one_turn_the_longest_has_the_last_answer(served: tuple[Rig, str]) -> None:
    rig, _ = served
    rig.engine.texts = ["an answer", "title"]

    async def agent(episode: Episode) -> None:
        await ask(rig, episode, "You work on whatever the user asks for", "do it")
        await ask(rig, episode, "Name this", "do it")

    output = await generator(served, agent).generate(GeneratorInput([Lengths().train_task(0)]))
    assert [t.reward for t in output.trajectories] == [float(len("an answer"))] * 2


async def test_a_row_has_the_rewards_of_its_turns(served: tuple[Rig, str]) -> None:
    rig, _ = served

    async def agent(episode: Episode) -> float:
        first = (await ask(rig, episode, "s", "x")).json()
        await ask(rig, episode, "s", "x", first["choices"][0]["message"]["content"], "y")
        rig.session(episode.session).give_reward(0.25, first["id"].removeprefix("chatcmpl-"))
        return 1.0

    (t,) = (await generator(served, agent).generate(GeneratorInput([Lengths().train_task(0)]))).trajectories
    assert (t.reward, [reward for _, reward in t.turn_rewards]) == (1.25, [0.25, 0.0])


async def test_an_evaluations_parameters_hold_for_each_turn(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer, sampling={"temperature": 1.0, "seed": None}, max_tokens=50)

    async def agent(episode: Episode) -> float:
        for text in ("x", "y"):
            await ask(rig, episode, "s", text)
        return 1.0

    params = SamplingParams(temperature=0.0, max_tokens=3)
    async with serving(rig.gateway) as base:
        made = generator((rig, base), agent, concurrency=1)
        batch = GeneratorInput([Lengths().train_task(0)], 2, sampling_params=params, seeds=[7])
        await made.generate(batch)
        await made.generate(GeneratorInput([Lengths().train_task(0)]))
    assert [p.max_tokens for p in rig.engine.params] == [3, 3, 3, 3, 50, 50]
    assert [p.temperature for p in rig.engine.params] == [0.0] * 4 + [1.0] * 2
    first, _, second, *_ = seeds = [p.seed for p in rig.engine.params]
    assert (first, second) == (7, 8), "of the second episode"
    assert len(set(seeds[:4])) == 4, "a turn of its own"
    assert seeds[4:] == [None, None]


async def test_a_command_that_fails_has_no_reward(served: tuple[Rig, str], tmp_path: Path) -> None:
    made = generator(served, [sys.executable, PROGRAM, "{prompt}", "fail"], log_dir=tmp_path)
    output = await made.generate(GeneratorInput([Lengths().train_task(0)]))
    assert [t.reward for t in output.trajectories] == [0.0]
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
    assert [t.reward for t in output.trajectories] == [0.0]
    hanging = generator(served, ["sh", "-c", "sleep 600 & echo child $!; wait"], log_dir=tmp_path, timeout_s=1.0)
    with pytest.raises(PenstockError, match="asked for no turn: it took over 1 s"):
        await hanging.generate(GeneratorInput([Lengths().train_task(0)]))
    assert of_programs(tmp_path) == []


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
