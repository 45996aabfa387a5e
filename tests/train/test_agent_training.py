"""`rollout.generator: agent`: a run on simulated engines whose episodes a callable or a command plays."""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from training_setup import Recorder, config_of

from penstock.config import RunConfig
from penstock.errors import ConfigError
from penstock.gateway.agent import Episode
from penstock.observe.run_folder import RunFolder
from penstock.options import validate
from penstock.train.run import run

PROGRAM = Path(__file__).parents[1] / "gateway" / "agent_program.py"
SIM = {"vocab-size": 96, "eos-token-id": 2, "eos-share": 0.3, "tokens-per-second": 2000.0}


async def play(episode: Episode) -> float:
    """Two turns and a sub-agent's; harnesses may ask for sampling that cannot be trained on."""
    import asyncio

    messages: list[Any] = [{"role": "user", "content": episode.task.prompt}]
    for _ in range(2):
        body = {"messages": messages, "top_p": 0.5, "temperature": 0.1, "seed": 1, "max_tokens": 500}
        request = urllib.request.Request(  # noqa: S310
            f"{episode.base_url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Authorization": f"Bearer {episode.api_key}", "Content-Type": "application/json"},
        )
        answer = json.load(await asyncio.to_thread(urllib.request.urlopen, request, timeout=60))
        text = answer["choices"][0]["message"]["content"] or ""
        messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "t="}]
    return float(len(text) % 2)


def blocking(episode: Episode) -> float:
    raise NotImplementedError(episode)


def agent_config(chat_model: Path, run_dir: Path, agent: dict[str, Any] | None, **engine: Any) -> RunConfig:
    config = config_of(
        chat_model,
        engine={"profile": "sim", "max_model_len": 64, "extra_args": SIM, **engine},
        environment={"name": "training_setup:Letters"},
        rollout={"groups_per_batch": 2, "generator": "agent", "agent": agent},
        train={"steps": 2, "max_staleness": 1},
        eval={"size": 4},
    )
    return config.model_copy(update={"run_dir": run_dir})


async def test_a_callable_plays_the_episodes_of_a_run(chat_model: Path, tmp_path: Path) -> None:
    summary = await run(
        agent_config(chat_model, tmp_path, {"callable": f"{__name__}:play"}), resume=False, reporter=Recorder()
    )
    assert summary.steps == 2
    records = RunFolder.open(tmp_path / "test").trajectories()
    assert {record["reward"] for record in records} <= {0.0, 1.0}
    assert any("t=" in record["response"] for record in records)


async def plays_badly(episode: Episode) -> float:
    """One turn; another that forgets it; then half of the agents fail."""
    import asyncio

    for text in (episode.task.prompt, "t="):
        messages: list[Any] = [{"role": "user", "content": text}]
        messages += [{"role": "assistant", "content": "9"}, *messages] * (text == "t=")
        request = urllib.request.Request(  # noqa: S310
            f"{episode.base_url}/v1/chat/completions",
            json.dumps({"messages": messages, "max_tokens": 4}).encode(),
            {"Authorization": f"Bearer {episode.api_key}", "Content-Type": "application/json"},
        )
        await asyncio.to_thread(urllib.request.urlopen, request, timeout=60)
    FAILED.append(len(FAILED) % 2 == 0)
    if FAILED[-1]:
        raise ValueError("my late bug")
    return 1.0


FAILED: list[bool] = []


async def test_a_step_says_how_many_agents_failed_and_what_broke_their_rows(chat_model: Path, tmp_path: Path) -> None:
    config, recorder = agent_config(chat_model, tmp_path, {"callable": f"{__name__}:plays_badly"}), Recorder()
    await run(config, resume=False, reporter=recorder)
    folder = RunFolder.open(tmp_path / "test")
    rows, records = folder.metrics(), folder.trajectories()
    assert all(row["agent/breaks/edited_history"] == 1.0 for row in rows)
    assert 0 < sum(row["agent/failed"] for row in rows) < len(rows)
    shown = [text for name, text in recorder.events if name == "warning"]
    for row in rows:
        said = f"step {row['step']}: {row['agent/failed']:.0%} of the agents failed; see run.log"
        assert (said in shown) == (row["agent/failed"] > 0)
    assert all(record["episode"] for record in records)
    assert "my late bug" in (tmp_path / "test" / "run.log").read_text()


async def test_a_command_plays_the_episodes_and_its_output_is_kept_up_to_a_number(
    chat_model: Path, tmp_path: Path
) -> None:
    words = [sys.executable, str(PROGRAM), "{prompt}", "end"]
    config = agent_config(chat_model, tmp_path, {"command": words, "concurrency": 4, "keep_output": 3})
    rollout = config.rollout.model_copy(update={"groups_per_batch": 1, "group_size": 2})
    short = config.model_copy(update={"rollout": rollout, "train": config.train.model_copy(update={"steps": 1})})
    await run(short, resume=False, reporter=Recorder())
    logs = list((tmp_path / "test" / "logs" / "agents").iterdir())
    assert len(logs) == 3
    assert all("said" in log.read_text() for log in logs)


def test_tasks_that_verifiers_plays_need_the_agent() -> None:
    given = {"engine": {"model": "m"}, "environment": {"name": "verifiers:reverse-text"}}
    with pytest.raises(ConfigError, match=r"rollout\.generator: agent and rollout\.agent\.callable"):
        validate(RunConfig, given)


@pytest.mark.parametrize(
    ("agent", "engine", "why"),
    [
        (None, {}, "belong together"),
        ({}, {}, "either command or callable"),
        ({"callable": "a:b", "command": ["a"]}, {}, "either command or callable"),
        ({"callable": "nothing_here:f"}, {}, "cannot be imported"),
        ({"callable": f"{__name__}:blocking"}, {}, "no `async def`"),
        ({"command": ["no-such-program"]}, {}, "no program 'no-such-program'"),
        ({"callable": f"{__name__}:play"}, {"max_model_len": None}, r"needs engine\.max_model_len"),
    ],
)
async def test_what_cannot_play_is_refused_before_engines_start(
    chat_model: Path, tmp_path: Path, agent: dict[str, Any] | None, engine: dict[str, Any], why: str
) -> None:
    with pytest.raises((ConfigError, ValueError), match=why):  # pydantic's own, of the config alone
        await run(agent_config(chat_model, tmp_path, agent, **engine), resume=False, reporter=Recorder())
    assert list(tmp_path.iterdir()) == []
