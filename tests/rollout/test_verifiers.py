"""`environment.name: verifiers:ID` against the real package (`make test-harnesses` has it; `make setup` has not)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from gateway_rig import Engine, Rig, logprob
from penstock.config import EnvironmentConfig
from penstock.errors import ConfigError, UserError
from penstock.gateway.agent import AgentGenerator
from penstock.gateway.app import serving
from penstock.rollout.environment import Environment, load_environment
from penstock.rollout.episodes import MultiTurnGenerator
from penstock.rollout.generator import GeneratorInput, Trajectory
from penstock.rollout.tokenizer import Tokenizer
from penstock.types import SamplingParams

pytest.importorskip("verifiers.v1")
sys.path.append(str(Path(__file__).parent))


def load(name: str, **options: Any) -> Environment:
    return load_environment(EnvironmentConfig(name=f"verifiers:{name}", options=options), 0)


def check(row: Trajectory) -> None:
    ids, start = [*row.prompt_ids, *row.response_ids], len(row.prompt_ids)
    trained = [i for i, mask in enumerate(row.loss_mask) if mask]
    assert trained
    assert all(row.logprobs[i] == logprob(ids[: start + i + 1]) for i in trained)


async def test_without_an_agent_the_one_that_plays_it_is_named(tokenizer: Tokenizer) -> None:
    environment = load("own_tool_taskset")
    made = MultiTurnGenerator(Engine(tokenizer), tokenizer, environment, SamplingParams(max_tokens=64), 8)
    with pytest.raises(UserError, match=r"penstock.gateway.verifiers:play"):
        await made.generate(GeneratorInput([environment.train_task(0)]))


@pytest.mark.parametrize("name", ["own_taskset", "own_tool_taskset"])
async def test_verifiers_plays_its_own_environment_and_the_row_is_exact(
    name: str, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # of the process that serves the tools
    from penstock.gateway.verifiers import play

    environment = load(name, **({"most_tasks": 50} if name == "own_taskset" else {}))
    task = environment.train_task(0)
    rig = Rig(tokenizer, max_model_len=100_000)
    call = '<tool_call>\n{"name": "shelf_look", "arguments": {"book":  "7"}}\n</tool_call>'
    tool_turn = [f"<think>\nlook\n</think>\n\n{call}", "41"]
    rig.engine.texts = tool_turn if name == "own_tool_taskset" else [task.metadata["task"].data.answer]
    async with serving(rig.gateway) as base:
        made = AgentGenerator(rig.gateway, base, rig.tenant, environment, play, timeout_s=90, log_dir=tmp_path)
        output = await made.generate(GeneratorInput([task]))
    assert [t.reward for t in output.trajectories] == [1.0 if name == "own_tool_taskset" else 2.5]
    (row,) = output.trajectories
    check(row)
    text = tokenizer.decode(row.response_ids, skip_special_tokens=False)
    if name == "own_tool_taskset":
        assert call in text
        assert "7: 41" in text
        assert sum(row.loss_mask) == sum(map(len, rig.engine.made))


def test_what_cannot_be_had_is_named() -> None:
    with pytest.raises(ConfigError, match="own_taskset_of_nobody"):
        load("own_taskset_of_nobody")
    with pytest.raises(ConfigError, match="did you mean 'taskset'"):
        load("own_taskset", tasket={})
    with pytest.raises(ConfigError, match="largst"):
        load("own_taskset", taskset={"largst": 9})
