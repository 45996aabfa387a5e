"""The schedule alone: random delays never make a token too old, waste one, or change the order of training."""

from __future__ import annotations

import asyncio
import random
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process_engine import InProcessEngine, Student
from training_setup import config_of, run_with

from penstock.config import RunConfig
from penstock.control_types import UpdateReport
from penstock.engine.interface import Engine
from penstock.errors import StateError
from penstock.observe.run_folder import RunFolder
from penstock.observe.summary import Reporter, Summary
from penstock.rollout.episodes import SingleTurnGenerator
from penstock.rollout.generator import GeneratorInput, GeneratorOutput, Trajectory
from penstock.types import Sample


class CountingLearner(Student):
    """Remembers what it was given at which version."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[tuple[int, list[Trajectory]]] = []

    def step(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        self.batches.append((self.version, list(trajectories)))
        return super().step(trajectories)


async def run(config: RunConfig, engine: InProcessEngine, learner: Student, path: Path, **options: Any) -> Summary:
    folder = RunFolder.open(path) if options.get("resume") else RunFolder.create(path, config)
    return await run_with(config, engine, learner, folder, **options)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    groups=st.integers(1, 4),
    size=st.integers(2, 3),
    staleness=st.integers(0, 3),
    steps=st.integers(1, 6),
    concurrency=st.integers(1, 20),
    longest=st.integers(0, 12),
)
def test_no_delay_makes_a_token_too_old_or_wastes_one(
    seed: int, groups: int, size: int, staleness: int, steps: int, concurrency: int, longest: int
) -> None:
    delays = random.Random(seed)

    async def pause() -> None:
        for _ in range(delays.randint(0, longest)):
            await asyncio.sleep(0)

    config = config_of(
        "none",
        rollout={"groups_per_batch": groups, "group_size": size, "max_tokens": 3, "concurrency": concurrency},
        train={"steps": steps, "max_staleness": staleness, "checkpoint_every": 100},
        eval={"size": 2},
    )
    engine = InProcessEngine(pause=pause)
    learner = CountingLearner()
    with tempfile.TemporaryDirectory() as folder:
        summary = asyncio.run(run(config, engine, learner, Path(folder) / "run"))

    assert [version for version, _ in learner.batches] == list(range(steps))
    trained = [t.group_id for _, batch in learner.batches for t in batch]
    assert sorted(trained) == sorted(str(g) for g in range(steps * groups) for _ in range(size))
    if staleness == 0:
        assert trained == [str(g) for g in range(steps * groups) for _ in range(size)], "in order"
    for version, batch in learner.batches:
        assert len(batch) == groups * size
        assert all(0 <= version - made <= staleness for t in batch for made in t.versions)
    assert len(engine.requests) == steps * groups + 2 * 2  # every group once, and two evaluations of two tasks
    assert summary.wasted_tokens == summary.unconsumed_tokens == 0
    assert summary.tokens == steps * groups * size * 3


class Aborting(InProcessEngine):
    """Ends samples with the finish reason `abort`: by the number of the request, so many of its samples."""

    def __init__(self, aborts: Callable[[int, int], int]) -> None:
        super().__init__()
        self.aborts = aborts
        self.seeds: list[int | None] = []

    async def sample(self, prompt_token_ids, num_samples, sampling_params=None, session_id=None, **_) -> list[Sample]:  # type: ignore[no-untyped-def]
        cut = self.aborts(len(self.requests) + 1, num_samples)
        self.seeds.append(sampling_params.seed)
        samples = await super().sample(prompt_token_ids, num_samples, sampling_params, session_id)
        return [replace(s, finish_reason="abort") if i < cut else s for i, s in enumerate(samples)]


@pytest.mark.parametrize("staleness", [0, 2])
async def test_aborted_samples_are_asked_for_again_and_never_trained_on(tmp_path: Path, staleness: int) -> None:
    config = config_of(
        "none", train={"steps": 2, "max_staleness": staleness}, rollout={"max_tokens": 3}, eval={"size": 1}
    )
    engine = Aborting(lambda request, samples: samples // 2 if request == 2 else 0)  # the first is the evaluation's
    learner = CountingLearner()
    summary = await run(config, engine, learner, tmp_path)
    assert [len(batch) for _, batch in learner.batches] == [16, 16]
    assert {t.stop_reason for _, batch in learner.batches for t in batch} == {"length"}
    rows = RunFolder.open(tmp_path).metrics()
    assert [row["aborted_samples"] for row in rows] == [2, 2]
    for row in rows:
        assert row["idle/learner"] == row["seconds/waiting"] / row["seconds/step"] > 0
    assert summary.wasted_tokens == rows[-1]["wasted_tokens"] == 2 * 3
    assert summary.unconsumed_tokens == 0
    seeds = [seed for seed in engine.seeds if seed is not None]
    assert len(seeds) == len(set(seeds)) == (8 if staleness == 0 else 0), "no sample is drawn twice"


class Killed(Exception):  # noqa: N818 - ends a run
    pass


class Telling(CountingLearner):
    def __init__(self) -> None:
        super().__init__()
        self.trained_twice = asyncio.Event()

    async def put_in_force(self, engine: Engine) -> UpdateReport:
        if self.version == 2:
            self.trained_twice.set()
        return await super().put_in_force(engine)


class EndsAt(Reporter):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, metrics: Mapping[str, float]) -> None:
        if metrics["step"] == self.step:
            raise Killed


async def test_a_resumed_run_trains_on_carried_groups_once_and_on_no_other_twice(tmp_path: Path) -> None:
    """The first group is long, so the checkpoint of step 1 knows a hole behind the groups that were trained on."""
    learner = Telling()

    class Long(SingleTurnGenerator):
        async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
            if input_batch.group_ids == ("0",):
                await learner.trained_twice.wait()
            return await super().generate(input_batch)

    rollout = {"groups_per_batch": 2, "group_size": 2, "max_tokens": 3}
    train_keys = {"steps": 4, "max_staleness": 2, "checkpoint_every": 1}
    config = config_of("none", rollout=rollout, train=train_keys, eval={"size": 1})
    path = tmp_path / "run"
    with pytest.raises(Killed):
        await run(config, InProcessEngine(), learner, path, generator=Long, reporter=EndsAt(2))
    kept = [t.group_id for version, batch in learner.batches for t in batch if version == 0]
    assert "0" not in kept
    again = CountingLearner()
    await run(config, InProcessEngine(), again, path, resume=True)
    assert [version for version, _ in again.batches] == [1, 2, 3]
    trained = kept + [t.group_id for _, batch in again.batches for t in batch]
    assert sorted(trained) == sorted(str(group) for group in range(8) for _ in range(2))


async def test_a_second_kill_before_the_next_checkpoint_keeps_the_account_of_the_first(tmp_path: Path) -> None:
    rollout = {"groups_per_batch": 2, "group_size": 2, "max_tokens": 3}
    train_keys = {"steps": 4, "max_staleness": 0, "checkpoint_every": 1}
    config = config_of("none", rollout=rollout, train=train_keys, eval={"size": 1})
    for kill in range(2):
        with pytest.raises(Killed):
            await run(config, InProcessEngine(), Student(), tmp_path, reporter=EndsAt(2), resume=bool(kill))
    summary = await run(config, InProcessEngine(), Student(), tmp_path, resume=True)
    assert summary.resumed_at == (1, 1)
    assert summary.wasted_tokens == 2 * (2 * 2 * 3), "of step 2, twice"


class Branching(SingleTurnGenerator):
    """Episodes of two leaves, of which the second holds a turn of the first; the first leaf of one is aborted."""

    asked: ClassVar[list[int]] = []

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        made = await super().generate(input_batch)
        if input_batch.sampling_params is not None:
            return made
        self.asked.append(input_batch.num_samples)
        rows: list[Trajectory] = []
        for i, t in enumerate(made.trajectories):
            cut = "abort" if len(self.asked) == 1 and i == 0 else t.stop_reason
            episode = f"{len(self.asked)}/{i}"
            rows.append(replace(t, episode_id=episode, stop_reason=cut))
            rows.append(replace(t, episode_id=episode, loss_mask=(0,) * len(t.loss_mask)))
        return GeneratorOutput.of(rows)


async def test_an_episode_with_an_aborted_leaf_is_made_again_as_a_whole(tmp_path: Path) -> None:
    """Its other leaf stayed, without the turn that trained in the aborted one, beside a whole episode more."""
    config = config_of(
        "none",
        train={"steps": 1},
        rollout={"groups_per_batch": 1, "group_size": 2, "max_tokens": 3},
        eval={"size": 1},
    )
    learner = CountingLearner()
    summary = await run(config, Aborting(lambda *_: 0), learner, tmp_path, generator=Branching)
    assert Branching.asked == [2, 1]
    (_, batch) = learner.batches[0]
    episodes = [t.episode_id for t in batch]
    assert episodes == ["1/1", "1/1", "2/0", "2/0"]
    assert [sum(t.loss_mask) for t in batch] == [3, 0, 3, 0]
    assert summary.wasted_tokens == 3
    assert RunFolder.open(tmp_path).metrics()[-1]["aborted_samples"] == 2


async def test_samples_that_are_aborted_time_and_again_are_left_out(tmp_path: Path) -> None:
    config = config_of("none", train={"steps": 1}, rollout={"max_tokens": 3}, eval={"size": 1})
    learner = CountingLearner()
    await run(config, Aborting(lambda request, _: 1 < request <= 13), learner, tmp_path / "one")
    assert [len(batch) for _, batch in learner.batches] == [12], "of each group of four one, three times"
    with pytest.raises(StateError, match=r"every sample of step 1 was aborted 3 times; .* abort_generation"):
        await run(config, Aborting(lambda request, n: n if request > 1 else 0), CountingLearner(), tmp_path / "all")


async def test_an_aborted_evaluation_is_made_again(tmp_path: Path) -> None:
    """A sample that was cut counted as not solved."""
    config = config_of("none", train={"steps": 1}, rollout={"max_tokens": 3}, eval={"size": 8})

    def aborting(first: int) -> Aborting:
        engine = Aborting(lambda request, samples: samples if 2 <= request < first else 0)
        engine._next_token = lambda *_: (33, -1.0)  # solved: a character of even code
        return engine

    await run(config, aborting(5), CountingLearner(), tmp_path / "some")
    assert RunFolder.open(tmp_path / "some").evaluations() == {0: 1.0, 1: 1.0}
    with pytest.raises(StateError, match=r"7 of 8 evaluation samples were aborted 3 times; .* abort_generation"):
        await run(config, aborting(1000), CountingLearner(), tmp_path / "all")


async def test_cancelling_lets_the_step_under_way_end_and_leaves_no_rollout(tmp_path: Path) -> None:
    config = config_of("none", train={"steps": 50, "max_staleness": 2})

    loop = asyncio.get_running_loop()
    ended: list[int] = []

    class Interrupted(CountingLearner):
        def step(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
            if self.version == 3:
                loop.call_soon_threadsafe(work.cancel)
                done.wait(0.2)  # the cancellation is well under way before the step ends
            result = super().step(trajectories)
            ended.append(self.version)
            return result

    done = threading.Event()
    learner = Interrupted()
    work = asyncio.create_task(run(config, InProcessEngine(), learner, tmp_path / "run"))
    (result,) = await asyncio.gather(work, return_exceptions=True)
    assert isinstance(result, asyncio.CancelledError)
    assert ended == [1, 2, 3, 4]
    assert not [t for t in asyncio.all_tasks() if t.get_name().startswith("rollout-")]
    assert [row["step"] for row in RunFolder.open(tmp_path / "run").metrics()] == [1, 2, 3]
