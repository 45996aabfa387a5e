"""A run from its configuration alone, on a fleet of simulated engines behind the router."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from huggingface_hub import constants
from training_setup import Letters, Recorder, config_of

from chat_model import TEMPLATE, save_chat_tokenizer
from patience import WAIT_S
from penstock.config import RunConfig, load_config
from penstock.errors import ConfigError, EngineStartError, StateError, UserError
from penstock.fleet.remote import FleetClient
from penstock.fleet.service import present
from penstock.observe.run_folder import RunFolder
from penstock.rollout.environment import Task, Turn
from penstock.train.run import _served_dtype, run

ROOT = Path(__file__).parents[2]

SIM = {"vocab-size": 96, "eos-token-id": 2, "eos-share": 0.1, "tokens-per-second": 2000.0}
ONE_DIGIT = {"min_numbers": 1, "max_numbers": 1, "min_value": 0, "max_value": 9, "min_decimals": 0, "max_decimals": 0}


class Few(Letters):
    def heldout_tasks(self, n: int) -> list[Task]:
        raise ValueError(f"3 at most, not {n}")


class UsedUp(Letters):
    def train_task(self, index: int) -> Task:
        return next(iter(self.heldout_tasks(index)))


class NoTasks(Letters):
    def heldout_tasks(self, n: int) -> list[Task]:
        return super().heldout_tasks(n)[:0]


class NoTrainTasks(Letters):
    def train_task(self, index: int) -> Task:
        del index
        return None  # type: ignore[return-value]


class Prompts(Letters):
    def train_task(self, index: int) -> Task:
        return Task(f"t{index}", "")


class Again(Letters):
    """Two turns; the first has a reward of its own."""

    async def step(self, task: Task, responses: Sequence[str]) -> Turn | None:
        del task
        return Turn("t=", reward=0.5) if len(responses) == 1 else None


async def test_a_run_whose_learner_is_two_processes_and_its_resumption_by_one(chat_model: Path, tmp_path: Path) -> None:
    config = fleet_config(chat_model, tmp_path)
    config = config.model_copy(update={"train": config.train.model_copy(update={"ranks": 2})})
    before = set(psutil.Process().children(recursive=True))
    await run(config, resume=False, reporter=Recorder())
    assert set(psutil.Process().children(recursive=True)) <= before
    folder = RunFolder.open(tmp_path / "test")
    assert [row["version"] for row in folder.metrics()] == [1, 2, 3, 4]
    assert [row["update/engines"] for row in folder.metrics()] == [2] * 4
    train = config.train.model_copy(update={"ranks": 1, "steps": 6})
    await run(config.model_copy(update={"train": train}), resume=True, reporter=Recorder())
    assert [row["version"] for row in folder.metrics()] == [1, 2, 3, 4, 5, 6]


def fleet_config(chat_model: Path, run_dir: Path, **changes: object) -> RunConfig:
    engine = {"profile": "sim", "max_model_len": 64, "extra_args": SIM}
    config = config_of(
        chat_model,
        engine=engine,
        fleet={"engines": 2},
        environment={"name": "training_setup:Letters"},
        train={"steps": 4, "max_staleness": 1},
    )
    return RunConfig.model_validate({**config.model_dump(), "run_dir": run_dir, **changes})


async def test_a_run_on_two_engines_and_its_resumption(chat_model: Path, tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))  # other tests' shared servers among them
    summary = await run(fleet_config(chat_model, tmp_path), resume=False, reporter=Recorder())
    assert set(psutil.Process().children(recursive=True)) <= before
    folder = RunFolder.open(tmp_path / "test")
    assert [row["update/engines"] for row in folder.metrics()] == [2] * 4
    assert summary.wasted_tokens == summary.unconsumed_tokens == 0
    assert (folder.path / "plots.png").exists()
    assert any((folder.path / "logs").iterdir())
    assert {row["track"] for row in folder.spans()} == {"learner", "e0", "e1", "e0 weights", "e1 weights"}
    assert set(summary.idle) == {"learner", "engines"}
    assert all(0 <= share <= 1 for share in summary.idle.values())
    assert json.loads((folder.path / "trace.json").read_text())["traceEvents"]
    with pytest.raises(UserError, match="already holds a run"):
        await run(fleet_config(chat_model, tmp_path), resume=False, reporter=Recorder())
    longer = fleet_config(chat_model, tmp_path)
    longer = longer.model_copy(update={"train": longer.train.model_copy(update={"steps": 6})})
    summary = await run(longer, resume=True, reporter=Recorder())
    assert [row["step"] for row in folder.metrics()] == [1, 2, 3, 4, 5, 6]
    assert summary.resumed_at == (4,)


async def test_a_run_with_episodes_of_several_turns(chat_model: Path, tmp_path: Path) -> None:
    rollout = {"groups_per_batch": 2, "group_size": 4, "max_tokens": 12, "max_episode_tokens": 40}
    config = fleet_config(chat_model, tmp_path, environment={"name": f"{__name__}:Again"}, rollout=rollout)
    summary = await run(config, resume=False, reporter=Recorder())
    assert summary.steps == 4
    records = RunFolder.open(tmp_path / "test").trajectories()
    assert {record["reward"] for record in records} <= {0.5, 1.5}
    assert any("t=" in record["response"] for record in records)


@pytest.mark.parametrize(
    ("engine", "fleet", "cuda", "served"),
    [
        ({"profile": "cpu"}, {}, True, "float32"),
        ({"profile": "gpu"}, {}, False, "auto"),
        ({}, {}, False, "float32"),
        ({}, {}, True, "auto"),
        ({}, {"launcher": "ray"}, False, "auto"),
        ({"profile": "cpu"}, {"attach": ["http://127.0.0.1:8001"]}, False, "auto"),
        ({"profile": "cpu", "dtype": "bfloat16"}, {}, False, "bfloat16"),
        ({"dtype": "float16"}, {"attach": ["http://127.0.0.1:8001"]}, True, "float16"),
    ],
)
def test_weights_are_sent_in_what_the_engines_serve_in(
    engine: dict[str, object], fleet: dict[str, object], cuda: object, served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert _served_dtype(config_of("m", engine={"model": "m", **engine}, fleet=fleet)) == served


def test_sampling_that_the_loss_does_not_correct_for_is_refused_before_anything_starts() -> None:
    reason = r"rollout\.top_p.*0\.9 cannot be trained on: engines then give logprobs over the kept tokens alone"
    with pytest.raises(ConfigError, match=reason):
        load_config(ROOT / "examples" / "DEMO.yaml", ["rollout.top_p=0.9"])
    assert load_config(ROOT / "examples" / "DEMO.yaml", ["rollout.top_p=1"]).rollout.top_p == 1


class Misnamed(Again):
    tools = ({"name": "look_up"},)


@pytest.mark.parametrize(
    ("environment", "template", "message"),
    [
        ("Again", TEMPLATE.replace("{{ m.role }}", "{{ m.role }}{{ messages | length }}"), "extended turn by turn"),
        ("Misnamed", TEMPLATE, "tools are not in OpenAI's form: KeyError: 'function'"),
        ("Again", TEMPLATE, r"max_model_len is 32, and task 'heldout/10' has a prompt of \d\d tokens"),
    ],
)
async def test_turns_that_cannot_be_rendered_are_refused_before_engines_start(
    chat_model: Path, tmp_path: Path, environment: str, template: str, message: str
) -> None:
    tokenizer = save_chat_tokenizer(tmp_path / "tokenizer", template)
    engine = {"model": str(chat_model), "tokenizer": str(tokenizer), "profile": "sim", "max_model_len": 32}
    config = fleet_config(
        chat_model, tmp_path / "runs", engine=engine, environment={"name": f"{__name__}:{environment}"}
    )
    with pytest.raises(ConfigError, match=message):
        await run(config, resume=False, reporter=Recorder())
    assert not (tmp_path / "runs").exists()


async def test_a_learner_that_cannot_load_ends_the_start_of_the_engines(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = asyncio.Event()

    @asynccontextmanager
    async def slow(*_: object, **__: object) -> AsyncGenerator[None]:
        try:
            await asyncio.sleep(10 * WAIT_S)
            yield
        finally:
            ended.set()

    def refuse(*_: object, **__: object) -> None:
        raise ConfigError("the model cannot be packed")

    monkeypatch.setattr("penstock.train.run.Fleet.launch", slow)
    monkeypatch.setattr("penstock.train.ranks.LocalLearner", refuse)
    with pytest.raises(ConfigError, match="the model cannot be packed"):
        await asyncio.wait_for(run(fleet_config(chat_model, tmp_path), resume=False, reporter=Recorder()), WAIT_S)
    assert ended.is_set()


async def test_a_learner_that_fails_after_ctrl_c_is_not_the_reason_of_the_end(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, ending, ended = asyncio.Event(), threading.Event(), asyncio.Event()

    @asynccontextmanager
    async def slow(*_: object, **__: object) -> AsyncGenerator[None]:
        try:
            started.set()
            await asyncio.sleep(10 * WAIT_S)
            yield
        finally:
            ending.set()
            await asyncio.sleep(0.2)
            ended.set()

    def refuse(*_: object, **__: object) -> None:
        assert ending.wait(WAIT_S)
        raise ConfigError("the model cannot be packed")

    monkeypatch.setattr("penstock.train.run.Fleet.launch", slow)
    monkeypatch.setattr("penstock.train.ranks.LocalLearner", refuse)
    running = asyncio.create_task(run(fleet_config(chat_model, tmp_path), resume=False, reporter=Recorder()))
    await asyncio.wait_for(started.wait(), WAIT_S)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set(), "the end of the engines was not cut off"


async def test_a_learner_that_fails_after_the_start_of_the_engines_does_not_cut_off_their_end(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, ended = threading.Event(), asyncio.Event()

    @asynccontextmanager
    async def quick(*_: object, **__: object) -> AsyncGenerator[SimpleNamespace]:
        try:
            asyncio.get_running_loop().call_later(0.2, started.set)
            yield SimpleNamespace(url="http://router")
        finally:
            await asyncio.sleep(0.2)
            ended.set()

    def refuse(*_: object, **__: object) -> None:
        assert started.wait(WAIT_S)
        raise ConfigError("the model cannot be packed")

    monkeypatch.setattr("penstock.train.run.Fleet.launch", quick)
    monkeypatch.setattr("penstock.train.ranks.LocalLearner", refuse)
    with pytest.raises(ConfigError, match="the model cannot be packed"):
        await asyncio.wait_for(run(fleet_config(chat_model, tmp_path), resume=False, reporter=Recorder()), WAIT_S)
    assert ended.is_set(), "the end of the engines was cut off"


class Waiting(Recorder):
    """Says when the first step is done."""

    def __init__(self) -> None:
        super().__init__()
        self.stepped = asyncio.Event()

    def on_step(self, metrics: Mapping[str, float]) -> None:
        super().on_step(metrics)
        self.stepped.set()


async def test_a_run_is_found_by_penstock_fleet_which_can_stop_it(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path))
    before = set(psutil.Process().children(recursive=True))
    config = fleet_config(chat_model, tmp_path / "runs")
    config = config.model_copy(update={"train": config.train.model_copy(update={"steps": 10_000})})
    told = Waiting()
    running = asyncio.create_task(run(config, resume=False, reporter=told))
    await asyncio.wait_for(told.stepped.wait(), WAIT_S)
    (port,) = present()
    async with FleetClient.to(f"http://127.0.0.1:{port}") as link:
        state = await link.state()
        assert [member.name for member in state.members] == ["e0", "e1"]
        assert state.version >= 1
        await asyncio.wait_for(link.call("stop"), WAIT_S)
    with pytest.raises(StateError, match="the fleet was stopped, by `penstock fleet stop`"):
        await asyncio.wait_for(running, WAIT_S)
    assert set(psutil.Process().children(recursive=True)) <= before
    assert present() == {}


async def test_a_fresh_run_replaces_the_one_of_its_name(chat_model: Path, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "test", fleet_config(chat_model, tmp_path))
    folder.append_metrics({"step": 99})
    (folder.path / "summary.json").write_text("{}")
    with pytest.raises(UserError, match="--resume goes on with a run and --fresh deletes it"):
        await run(fleet_config(chat_model, tmp_path), resume=True, fresh=True, reporter=Recorder())
    wrong = fleet_config(chat_model, tmp_path, environment={"name": "nowhere:Nothing"})
    with pytest.raises(ConfigError, match="cannot be imported"):
        await run(wrong, resume=False, fresh=True, reporter=Recorder())
    assert folder.metrics() == [{"step": 99}]
    summary = await run(fleet_config(chat_model, tmp_path), resume=False, fresh=True, reporter=Recorder())
    assert [row["step"] for row in folder.metrics()] == [1, 2, 3, 4]
    assert folder.summary()["steps"] == summary.steps == 4


async def test_a_run_that_is_going_on_is_refused_to_every_other_and_keeps_its_past(
    chat_model: Path, tmp_path: Path
) -> None:
    config = fleet_config(chat_model, tmp_path)
    config = config.model_copy(update={"train": config.train.model_copy(update={"steps": 10_000})})
    told = Waiting()
    running = asyncio.create_task(run(config, resume=False, reporter=told))
    try:
        await asyncio.wait_for(told.stepped.wait(), WAIT_S)
        for flags in ({"fresh": True}, {"resume": True}, {}):
            with pytest.raises(UserError, match=rf"is going on: it is held by process {os.getpid()} on .* since "):
                await run(config, **{"resume": False, **flags}, reporter=Recorder())
        assert RunFolder.open(tmp_path / "test").metrics()[0]["step"] == 1
    finally:
        running.cancel()
        await asyncio.wait([running], timeout=WAIT_S)
    with RunFolder.lock(tmp_path / "test"):
        pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": {"name": "nowhere:Nothing"}}, "cannot be imported"),
        ({"environment": {"options": {"dataset": "number_sorting", "compact": True, **ONE_DIGIT}}}, "too few distinct"),
        ({"environment": {"name": "test_training_run:Few"}}, "no 16 held-out tasks .eval.size.: ValueError: 3 at most"),
        ({"environment": {"name": "test_training_run:NoTasks"}}, r"heldout_tasks.16. .* must give 16 tasks, got 0"),
        ({"environment": {"name": "test_training_run:UsedUp"}}, r"train_task.0. of .* failed: .*StopIteration: "),
        ({"environment": {"name": "test_training_run:NoTrainTasks"}}, r"train_task.0. of .* got None"),
        ({"environment": {"name": "test_training_run:Prompts"}}, r"train_task.0. of .* not empty"),
        ({"engine": {"model": "/nowhere", "profile": "sim"}}, "model path /nowhere does not exist"),
        ({"train": {"model": "/nowhere"}}, "model path /nowhere does not exist"),
        (
            {"train": {"model": "no-such/model"}},
            "no model 'no-such/model': .*HF_HUB_OFFLINE",
        ),
        ({"train": {"ranks": 4096}}, r"train\.ranks is 4096 and this machine has \d+ (GPUs|cores and no GPU)"),
        (
            {"rollout": {"max_tokens": 61}},
            r"max_model_len is 64, and task 'heldout/10' has .* 4 tokens .* to 65 or",
        ),
    ],
)
async def test_what_is_wrong_is_said_before_anything_is_started_or_written(
    chat_model: Path, tmp_path: Path, changes: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=message):
        await run(fleet_config(chat_model, tmp_path, **changes), resume=False, reporter=Recorder())
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="holds no run"):
        await run(fleet_config(chat_model, tmp_path), resume=True, reporter=Recorder())


async def test_fewer_steps_than_a_run_has_are_refused_before_engines_start(chat_model: Path, tmp_path: Path) -> None:
    config = fleet_config(chat_model, tmp_path)
    checkpoints = RunFolder.create(tmp_path / "test", config).path / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "step-00000009").mkdir()
    with pytest.raises(UserError, match=r"is at step 9, beyond train\.steps=4; ask for more steps"):
        await run(config, resume=True, reporter=Recorder())
    assert not (tmp_path / "test" / "logs").exists()


async def test_engines_that_do_not_start_leave_a_name_that_can_be_used_again(chat_model: Path, tmp_path: Path) -> None:
    broken = {"model": str(chat_model), "profile": "sim", "extra_args": {"vocab-size": -1}}
    with pytest.raises(EngineStartError):
        await run(fleet_config(chat_model, tmp_path, engine=broken), resume=False, reporter=Recorder())
    RunFolder.check_unused(tmp_path / "test")
