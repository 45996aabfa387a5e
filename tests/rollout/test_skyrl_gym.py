"""`environment.name: skyrl-gym:ID` against the real package."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gateway_rig import Engine, logprob
from penstock.config import EnvironmentConfig
from penstock.errors import ConfigError, PenstockError
from penstock.rollout.environment import Environment, load_environment
from penstock.rollout.episodes import MultiTurnGenerator
from penstock.rollout.generator import GeneratorInput, Trajectory
from penstock.rollout.skyrl_gym_env import AT_ONCE
from penstock.rollout.tokenizer import Tokenizer
from penstock.types import SamplingParams

pytest.importorskip("skyrl_gym")
sys.path.append(str(Path(__file__).parent))


def save(folder: Path, rows: int = 40, **columns: Any) -> str:
    """Rows as SkyRL's data sets have them."""
    path = folder / "train.jsonl"
    given = [
        {"prompt": [{"role": "user", "content": f"what is {i}+1?"}], "data_source": "sums", **columns}
        | {"reward_spec": {"method": "rule", "ground_truth": str(i + 1)}}
        for i in range(rows)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return str(path)


def load(name: str, seed: int = 0, **options: Any) -> Environment:
    return load_environment(EnvironmentConfig(name=f"skyrl-gym:{name}", options=options), seed)


async def play(environment: Environment, tokenizer: Tokenizer, texts: list[str], episodes: int = 1) -> list[Trajectory]:
    engine = Engine(tokenizer, texts)
    made = MultiTurnGenerator(
        engine, tokenizer, environment, SamplingParams(max_tokens=64), 8, max_turns=5, max_tokens=2000
    )
    output = await made.generate(GeneratorInput([environment.train_task(i) for i in range(episodes)]))
    for t in output.trajectories:
        ids, start = [*t.prompt_ids, *t.response_ids], len(t.prompt_ids)
        assert all(t.logprobs[i] == logprob(ids[: start + i + 1]) for i, mask in enumerate(t.loss_mask) if mask)
    return list(output.trajectories)


async def test_gsm8k_of_several_turns_answers_until_the_answer_is_right(tmp_path: Path, tokenizer: Tokenizer) -> None:
    environment = load("gsm8k_multi_turn", data=save(tmp_path), extras={"max_turns": 4})
    right = environment.train_task(0).metadata["reward_spec"]["ground_truth"]
    (row,) = await play(environment, tokenizer, ["#### 99", f"#### {right}"])
    assert row.turn_rewards[0][1] == pytest.approx(0.05)
    assert row.turn_rewards[1][1] == 1.0
    assert row.reward == pytest.approx(1.05)
    text = tokenizer.decode(row.response_ids, skip_special_tokens=False)
    assert "Please provide your step-by-step reasoning" in text


async def test_an_episode_has_an_instance_of_its_own(tmp_path: Path, tokenizer: Tokenizer) -> None:
    options = {"env_config": {"rule": "be short"}, "extras": {"max_turns": 3}, "imports": "own_gym"}
    environment = load("counts", data=save(tmp_path), **options)
    rows = await asyncio.wait_for(play(environment, tokenizer, ["a"] * 24, episodes=8), 60)
    assert [[reward for _, reward in row.turn_rewards] for row in rows] == [[1.0, 2.0, 3.0]] * 8
    assert all("be short" in tokenizer.decode(row.prompt_ids) for row in rows)
    assert sys.modules["own_gym"].ALIVE == []


async def test_a_few_instances_run_at_once_so_that_the_event_loop_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each instance in a thread of its own, a thousand that compute stopped the event loop until the last had ended."""
    options = {"env_config": {"rule": "x"}, "extras": {"max_turns": 3}, "imports": "own_gym"}
    environment = load("counts", data=save(tmp_path), **options)
    running: set[int] = set()
    most: list[int] = []

    def init(_: Any, prompt: Any) -> Any:
        running.add(threading.get_ident())
        time.sleep(0.1)
        most.append(len(running))
        running.discard(threading.get_ident())
        return prompt, {}

    async def episode() -> None:
        async with environment.dialogue(environment.train_task(0)):
            pass

    monkeypatch.setattr(sys.modules["own_gym"].Counts, "init", init)
    await asyncio.gather(*(episode() for _ in range(4 * AT_ONCE)))
    assert len(most) == 4 * AT_ONCE
    assert max(most) <= AT_ONCE


async def test_an_environment_that_rewrites_the_response_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    options = {"env_config": {"rule": "x"}, "extras": {"max_turns": 3, "rewrites": True}, "imports": "own_gym"}
    with pytest.raises(PenstockError, match="tokens that no engine sampled"):
        await play(load("counts", data=save(tmp_path), **options), tokenizer, ["a"])
    assert sys.modules["own_gym"].ALIVE == []


def test_tasks_are_the_rows_and_a_tenth_is_held_out(tmp_path: Path) -> None:
    data = save(tmp_path, 200)
    environment, other = load("gsm8k", data=data), load("gsm8k", data=data, seed=1)
    heldout = {task.prompt for task in environment.heldout_tasks(10)}
    first_pass = [environment.train_task(i).prompt for i in range(170)]
    assert len(set(first_pass)) == 170
    assert not heldout & set(first_pass)
    assert [environment.train_task(i).prompt for i in range(9)] == first_pass[:9]
    assert first_pass[:9] != [other.train_task(i).prompt for i in range(9)]


def test_a_row_may_hold_every_end_of_line_that_json_may(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": "one\u2028two\x85three"}]
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n", "utf-8-sig")
    assert load("gsm8k", data=str(tmp_path / "train.jsonl")).train_task(0).messages == prompt


def test_rows_in_parquet_are_read(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    path = tmp_path / "train.parquet"
    question = {"prompt": [{"role": "user", "content": "1?"}], "reward_spec": {"ground_truth": "1"}}
    frame = pandas.DataFrame([question] * 30)
    frame.to_parquet(path)
    assert load("gsm8k", data=str(path)).train_task(0).metadata["reward_spec"] == {"ground_truth": "1"}


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("gsm9k", {}, "no environment 'gsm9k'; known: aime"),
        ("gsm8k", {"dat": "x"}, "did you mean 'data'"),
        ("gsm8k", {"data": "nowhere.jsonl"}, "nowhere.jsonl"),
    ],
)
def test_what_cannot_be_had_is_named(tmp_path: Path, name: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load(name, **{"data": save(tmp_path), **options})
