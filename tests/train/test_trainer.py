"""The asynchronous schedule with a real learner of a nano model, on a simulated engine over HTTP."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from training_setup import (
    SIM,
    Characters,
    Letters,
    Recorder,
    config_of,
    cut_off_after,
    learner_of,
    run_on_sim,
    run_with,
    what_counts,
)

from patience import WAIT_S
from penstock.config import RunConfig
from penstock.control_types import TensorSpec
from penstock.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    MissingCapabilityError,
    PenstockError,
    StateError,
)
from penstock.observe.run_folder import RunFolder
from penstock.rollout.environment import Task
from penstock.rollout.generator import Generator, GeneratorInput, GeneratorOutput, Trajectory
from penstock.sim.config import Fault, FaultKind, Phase
from penstock.train import rollouts
from penstock.train.rollouts import group_seed
from penstock.types import FinishReason, Sample, SamplingParams, VersionSpan
from sim_verify import verify


def synchronous(model: Path, steps: int = 6) -> RunConfig:
    return config_of(model, train={"steps": steps, "max_staleness": 0})


def sample_of(record: dict[str, Any]) -> Sample:
    """The engine's answer from which a trajectory was recorded."""
    return Sample(
        token_ids=tuple(token["id"] for token in record["tokens"]),
        finish_reason=record["stop_reason"],  # pyright: ignore[reportArgumentType]
        logprobs=tuple(token["logprob"] for token in record["tokens"]),
        spans=tuple(VersionSpan(token["version"], i, i + 1) for i, token in enumerate(record["tokens"])),
    )


# --- a whole run -----------------------------------------------------------------------------------------------------


async def test_a_run_trains_on_every_token_once_within_the_bound(model: Path, tmp_path: Path) -> None:
    config = config_of(model, train={"steps": 8})
    folder = RunFolder.create(tmp_path, config)
    reporter = Recorder()
    summary = await run_on_sim(config, folder, reporter=reporter)
    rows = folder.metrics()
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert [row["version"] for row in rows] == list(range(1, 9))
    assert all(row["samples"] == 16 for row in rows)
    assert max(row["staleness_max"] for row in rows) in {1, 2}
    assert sum(summary.staleness.values()) == sum(row["tokens"] for row in rows) == summary.tokens
    assert summary.wasted_tokens == summary.unconsumed_tokens == 0
    assert summary.updates == summary.steps == 8
    assert set(summary.evaluations) == {0, 8}
    assert summary.bubble_max >= summary.bubble_median > 0
    assert "update/tokens_lost" not in rows[0], "it is of the update of the row before"
    assert all(row["update/tokens_lost"] >= 0 for row in rows[1:])
    assert summary.tokens_lost == sum(row["update/tokens_lost"] for row in rows[1:])
    assert set(summary.seconds) == {"waiting", "training", "update", "evaluation", "checkpoint", "total"}
    assert sum(v for k, v in summary.seconds.items() if k != "total") <= summary.seconds["total"]
    assert all(row["tokens_per_second"] == pytest.approx(row["generated_tokens"] / row["seconds/step"]) for row in rows)
    assert folder.summary()["accuracy_after"] == summary.accuracy_after
    kinds = [kind for kind, _ in reporter.events if kind in {"update", "step"}]
    assert kinds == ["update", "step"] * 8
    assert [value for kind, value in reporter.events if kind == "phase"][:2] == ["evaluate", "train"]
    assert reporter.events[-1] == ("end", summary)
    warning = next(value for kind, value in reporter.events if kind == "warning")
    assert warning.startswith("step 1: trainer and engine disagree by")


async def test_recorded_tokens_are_those_of_the_version_they_claim(model: Path, tmp_path: Path) -> None:
    config = config_of(model, train={"steps": 5, "kv": "recompute"})  # records do not say which tokens kept their KV
    folder = RunFolder.create(tmp_path, config)
    await run_on_sim(config, folder, sim=replace(SIM, tokens_per_second=300))
    records = folder.trajectories()
    assert {record["step"] for record in records} == set(range(1, 6))
    assert any(len({token["version"] for token in record["tokens"]}) > 1 for record in records)
    for record in records:
        params = SamplingParams(n=config.rollout.group_size, max_tokens=config.rollout.max_tokens)
        wrong = verify(Characters().encode(record["prompt"]), sample_of(record), model=SIM.model, params=params)
        assert not wrong
    assert "logprob | version |" in (tmp_path / "trajectories.md").read_text()


async def test_evaluation_in_the_middle_is_recorded_under_its_step(model: Path, tmp_path: Path) -> None:
    config = config_of(model, train={"steps": 5}, eval={"size": 4, "every": 2})
    folder = RunFolder.create(tmp_path, config)
    reporter = Recorder()
    await run_on_sim(config, folder, reporter=reporter)
    assert list(folder.evaluations()) == [0, 2, 4, 5]
    rows = folder.metrics()
    assert [row["step"] for row in rows if "seconds/evaluation" in row] == [3, 5], "its time is in the row after"
    names = [value[0] for kind, value in reporter.events if kind == "eval"]
    assert names == ["before", "step 2", "step 4", "after"]


async def test_a_cancelled_run_does_not_wait_for_held_out_tasks(model: Path, tmp_path: Path) -> None:
    class Endless(Letters):
        begun, end = threading.Event(), threading.Event()

        def heldout_tasks(self, n: int) -> list[Task]:
            self.begun.set()
            self.end.wait(60.0)
            return super().heldout_tasks(n)

    config = config_of(model)
    endless = Endless()
    running = asyncio.create_task(run_on_sim(config, RunFolder.create(tmp_path, config), environment=endless))
    try:
        assert await asyncio.to_thread(endless.begun.wait, 60.0)
        running.cancel()
        await asyncio.wait([running], timeout=WAIT_S)
        assert running.cancelled()
        assert not endless.end.is_set()
    finally:
        endless.end.set()


async def test_an_evaluation_is_made_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def answer(name: str, end: FinishReason) -> Trajectory:
        return Trajectory((1,), (2,), (1,), (0.0,), (0,), float(int(name) % 2), end, name)

    class Counting(Generator):
        tokenizer = None  # type: ignore[assignment]

        async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
            sizes.append(len(input_batch.tasks))
            names = input_batch.group_ids or ()
            cut = "1" if len(sizes) == 1 else None
            return GeneratorOutput.of([answer(name, "abort" if name == cut else "stop") for name in names])

    monkeypatch.setattr(rollouts, "EVALUATED_AT_ONCE", 4)
    assert await rollouts.greedy_accuracy(Counting(), Letters().heldout_tasks(10), 8) == 0.5
    assert sizes == [4, 4, 2, 1]


async def test_a_synchronous_run_samples_by_seeds_of_its_own_for_each_group(model: Path, tmp_path: Path) -> None:
    config = synchronous(model, steps=2)
    folder = RunFolder.create(tmp_path, config)
    await run_on_sim(config, folder)
    for record in folder.trajectories():
        sample = sample_of(record)
        prompt = Characters().encode(record["prompt"])
        seed = group_seed(config.seed, int(record["group"]))
        params = SamplingParams(n=4, max_tokens=config.rollout.max_tokens, seed=seed)
        assert not verify(prompt, sample, model=SIM.model, params=params)
        assert verify(prompt, sample, model=SIM.model, params=replace(params, seed=None))
    assert len({group_seed(s, g) for s in range(20) for g in range(200)}) == 4000


# --- the same again --------------------------------------------------------------------------------------------------


async def test_a_run_that_was_cut_off_and_resumed_equals_one_that_was_not(model: Path, tmp_path: Path) -> None:
    config = synchronous(model)
    whole = RunFolder.create(tmp_path / "whole", config)
    await run_on_sim(config, whole)

    cut = RunFolder.create(tmp_path / "cut", config)
    await cut_off_after(5, config, cut)
    rows_at_the_cut = cut.metrics()
    assert [row["step"] for row in rows_at_the_cut] == [1, 2, 3, 4, 5]
    reporter = Recorder()
    summary = await run_on_sim(config, cut, reporter=reporter, resume=True)
    lost = rows_at_the_cut[4]["generated_tokens"]
    assert [{**row, "wasted_tokens": 0} for row in what_counts(cut)] == what_counts(whole)
    assert cut.evaluations() == whole.evaluations()
    assert summary.resumed_at == (4,)
    assert summary.wasted_tokens == lost
    assert summary.unconsumed_tokens == 0
    assert reporter.events[:2] == [("phase", "resume"), ("eval", ("before", cut.evaluations()[0]))]
    assert [r["step"] for r in cut.trajectories()] == [r["step"] for r in whole.trajectories()]


@pytest.mark.parametrize("merge", [True, False], ids=["merged", "alone"])
async def test_a_run_of_an_adapter_is_resumed_from_the_adapter_alone(
    model: Path,
    tmp_path: Path,
    merge: bool,  # noqa: FBT001
) -> None:
    engine = {"model": str(model), "enable_lora": True}
    lora = {"rank": 2, "merge": merge}

    def config(steps: int) -> RunConfig:
        train = {"steps": steps, "max_staleness": 0, "checkpoint_every": 2, "lora": lora}
        return config_of(model, train=train, engine=engine)

    whole = RunFolder.create(tmp_path / "whole", config(4))
    await run_on_sim(config(4), whole)
    folder = RunFolder.create(tmp_path / "parts", config(2))
    await run_on_sim(config(2), folder)
    await run_on_sim(config(4), folder, resume=True)
    assert what_counts(folder) == what_counts(whole)
    assert [row["version"] for row in whole.metrics()] == [2, 3, 4, 5], "1 is the adapter as it was created"
    assert all(row["learner/grad_norm"] > 0 for row in whole.metrics())
    size = (model / "model.safetensors").stat().st_size
    assert all((row["update/bytes"] > size / 2) == merge for row in whole.metrics())


async def test_a_run_cut_off_before_its_first_checkpoint_starts_over(model: Path, tmp_path: Path) -> None:
    config = synchronous(model, steps=2)
    folder = RunFolder.create(tmp_path, config)
    folder.append_metrics({"step": 1, "generated_tokens": 50})
    folder.append_evaluation(0, 0.25)
    reporter = Recorder()
    summary = await run_on_sim(config, folder, reporter=reporter, resume=True)
    assert reporter.events[:2] == [("phase", "resume"), ("phase", "restart")]
    assert [row["step"] for row in folder.metrics()] == [1, 2]
    assert summary.evaluations[0] == 0.25
    assert summary.wasted_tokens == 50
    assert summary.resumed_at == (0,)


async def test_kill_minus_nine_and_resume_leave_one_contiguous_record(model: Path, tmp_path: Path) -> None:
    script = Path(__file__).with_name("killable_run.py")

    async def run_until(last: str, *arguments: str) -> asyncio.subprocess.Process:
        command = [sys.executable, str(script), str(model), str(tmp_path / "run"), "14", *arguments]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            async for line in process.stdout:
                if line.decode().strip() == last:
                    return process
        raise AssertionError(f"the run ended without saying {last!r}")

    process = await run_until("step 8", "8")
    os.kill(process.pid, signal.SIGKILL)
    await process.communicate()
    folder = RunFolder.open(tmp_path / "run")
    rows = folder.metrics()
    assert [row["step"] for row in rows] == list(range(1, 9))
    process = await run_until("done", "0", "--resume")
    await process.communicate()
    assert process.returncode == 0
    assert [row["step"] for row in folder.metrics()] == list(range(1, 15))
    assert folder.metrics()[:6] == rows[:6]
    assert max(row["staleness_max"] for row in folder.metrics()) <= 2
    summary = folder.summary()
    assert summary["resumed_at"] == [6]
    assert summary["wasted_tokens"] >= rows[6]["generated_tokens"] + rows[7]["generated_tokens"]
    assert list(folder.evaluations()) == [0, 14]


# --- what is refused -------------------------------------------------------------------------------------------------


async def test_resuming_is_refused_before_anything_is_changed(model: Path, tmp_path: Path) -> None:
    config = synchronous(model, steps=2)
    folder = RunFolder.create(tmp_path, config)
    await run_on_sim(config, folder)
    rows = folder.metrics()
    with pytest.raises(ConfigError, match=r"train\.max_staleness was 0 and is now 2"):
        await run_on_sim(config_of(model, train={"steps": 2}), folder, resume=True)
    assert folder.metrics() == rows


async def test_engines_that_serve_other_weights_are_refused(model: Path, tmp_path: Path) -> None:
    class Learned:
        weight_version = 3

    config = synchronous(model)
    with pytest.raises(StateError, match="engines serve weight version 3 and the learner starts at 0"):
        await run_with(config, Learned(), learner_of(config), RunFolder.create(tmp_path, config))


@pytest.mark.parametrize("lora", [None, {"rank": 2, "merge": True}, {"rank": 2}], ids=["all", "merged", "adapter"])
async def test_engines_of_another_checkpoint_get_the_learners_weights_before_the_first_token(
    model: Path, tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    def config(steps: int) -> RunConfig:
        train = {"model": str(model), "steps": steps, "max_staleness": 0, "lora": lora}
        return config_of("another", engine={"model": "another", "enable_lora": True}, train=train)

    folder = RunFolder.create(tmp_path, config(2))
    await run_on_sim(config(2), folder)
    await run_on_sim(config(3), folder, resume=True)
    assert [row["version"] for row in folder.metrics()] == [2, 3, 4]
    records = folder.trajectories()
    assert {token["version"] for token in records[0]["tokens"]} == {1}, "0 are weights that the learner does not know"


async def test_engines_of_a_model_of_other_shapes_are_refused_by_name_before_the_first_step(
    model: Path, tmp_path: Path
) -> None:
    train = {"model": str(model), "lora": {"rank": 2}}
    config = config_of("another", engine={"model": "another", "enable_lora": True}, train=train)
    folder = RunFolder.create(tmp_path, config)
    specs = (TensorSpec("model.embed_tokens.weight", "float32", (8, 4)),)
    with pytest.raises(StateError, match=r"the engines do not take the weights of .*model\.layers\.0.*the same model"):
        await run_on_sim(config, folder, sim=replace(SIM, tensor_specs=specs))
    assert not folder.metrics()


async def test_engines_that_take_adapters_alone_serve_them_with_a_warning(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise MissingCapabilityError("engine 0 lacks the plugin")

    monkeypatch.setattr("http_engine.HTTPEngine.update_weights", refuse)
    train = {"model": str(model), "steps": 1, "lora": {"rank": 2}}
    config = config_of("another", engine={"model": "another", "enable_lora": True}, train=train)
    await run_on_sim(config, RunFolder.create(tmp_path, config))
    assert "learner's base is unknown: engine 0 lacks the plugin" in caplog.text


# --- failures --------------------------------------------------------------------------------------------------------


async def test_a_broken_environment_ends_the_run_at_once_and_names_the_group(model: Path, tmp_path: Path) -> None:
    class Broken(Letters):
        def reward(self, task: Task, response_text: str) -> float:
            if task.id == "train/13":
                raise ZeroDivisionError("thirteen")
            return super().reward(task, response_text)

    config = config_of(model)
    folder = RunFolder.create(tmp_path, config)
    tasks_before = asyncio.all_tasks()
    with (
        folder.capture_log(),
        pytest.raises(PenstockError, match="reward of task 'train/13' failed: ZeroDivisionError: thirteen") as caught,
    ):
        await run_on_sim(config, folder, environment=Broken())
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert {t for t in asyncio.all_tasks() - tasks_before if t.get_name().startswith("rollout-")} == set()
    assert "ended after step" in (tmp_path / "run.log").read_text()
    assert not (tmp_path / "summary.json").exists()
    await run_on_sim(config, folder, resume=True)
    assert [row["step"] for row in folder.metrics()] == list(range(1, 7))


async def test_a_disk_that_is_full_at_a_checkpoint_ends_the_run_and_loses_nothing_before(
    model: Path, tmp_path: Path
) -> None:
    config = synchronous(model)
    whole, folder = (RunFolder.create(tmp_path / name, config) for name in ("whole", "cut"))
    await run_on_sim(config, whole)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Full(Recorder):
        def on_phase(self, name: str) -> None:
            super().on_phase(name)
            if self.events.count(("phase", "checkpoint")) == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))

    try:
        with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*step-00000004.*; free space"):
            await run_on_sim(config, folder, reporter=Full())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in (folder.path / "checkpoints").iterdir()] == ["step-00000002"]
    await run_on_sim(config, folder, resume=True)
    assert [{**row, "wasted_tokens": 0} for row in what_counts(folder)] == what_counts(whole)


async def test_a_dead_engine_ends_the_run(model: Path, tmp_path: Path) -> None:
    config = config_of(model)
    folder = RunFolder.create(tmp_path, config)
    sim = replace(SIM, faults=(Fault(FaultKind.EXIT, Phase.TOKENS, after_tokens=400),))
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(EngineDeadError):
            await run_on_sim(config, folder, sim=sim)
    assert not (tmp_path / "summary.json").exists()


async def test_an_engine_that_labels_tokens_wrongly_is_found_out(model: Path, tmp_path: Path) -> None:
    config = synchronous(model)
    sim = replace(SIM, faults=(Fault(FaultKind.WRONG_LABEL, Phase.LOAD),))
    with pytest.raises(PenstockError, match="tokens are 1 versions old where 0 to 0 is possible"):
        await run_on_sim(config, RunFolder.create(tmp_path, config), sim=sim)
