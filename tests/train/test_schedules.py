"""What each schedule does in which order, that its runs can be resumed, and what it refuses before anything starts."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process_engine import InProcessEngine, Student
from training_setup import config_of, cut_off_after, run_on_sim, run_with, what_counts

from penstock.config import RunConfig, load_config
from penstock.control_types import UpdateReport
from penstock.errors import ConfigError, StateError
from penstock.observe.run_folder import RunFolder
from penstock.rollout.generator import Trajectory
from penstock.train.schedules import check_schedule, to_the_end

DEMO = Path(__file__).parents[2] / "examples" / "DEMO.yaml"


def config_under(schedule: str, model: Path | str = "none", **train: Any) -> RunConfig:
    engine = {"model": str(model), "enable_sleep_mode": schedule == "colocated"}
    return config_of(model, engine=engine, train={"steps": 4, "max_staleness": 2, "schedule": schedule, **train})


class Told(InProcessEngine):
    """Notes what is asked of it; samples take a few turns of the loop."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events
        self.running = 0

    async def sample(self, *args: Any, **kwargs: Any) -> Any:
        self.running += 1
        try:
            return await super().sample(*args, **kwargs)
        finally:
            self.running -= 1

    async def update_weights(self, *args: Any, **kwargs: Any) -> UpdateReport:
        self.events.append(f"update, {'some' if self.running else 'none'} in flight")
        return await super().update_weights(*args, **kwargs)

    async def sleep(self, level: int = 1) -> None:
        self.events.append(f"sleep {level}")

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        self.events.append(f"wake {tags}")


class Pupil(Student):
    """Says when it trains, and of which versions the batch is."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def step(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        ages = {self.version - version for t in trajectories for version in t.versions}
        self.events.append(f"train, ages {sorted(ages)}")
        return super().step(trajectories)

    def release_memory(self) -> None:
        self.events.append("release")


async def events_of(
    schedule: str,
    path: Path,
    adapter: str | None = None,
    engine: type[Told] = Told,
    student: Pupil | None = None,
    attach: Sequence[str] = (),
) -> list[str]:
    student = student or Pupil([])
    student.served_adapter = adapter
    config = config_under(schedule)
    if attach:
        config = RunConfig.model_validate({**config.model_dump(), "fleet": {"engines": 0, "attach": attach}})
    await run_with(config, engine(student.events), student, RunFolder.create(path, config))
    return student.events


async def test_synchronous_apart_trains_and_updates_between_two_batches(tmp_path: Path) -> None:
    assert await events_of("sync", tmp_path) == ["train, ages [0]", "update, none in flight"] * 4


async def test_one_step_off_updates_when_the_next_batch_is_made_and_training_is_done(tmp_path: Path) -> None:
    events = await events_of("one_step_off", tmp_path)
    assert events[0] == "train, ages [0]"
    assert events[1::2] == ["update, none in flight"] * 4
    assert events[2::2] == ["train, ages [1]"] * 3


async def test_colocated_engines_sleep_while_the_learner_trains(tmp_path: Path) -> None:
    step = ["train, ages [0]", "release", "wake ['weights']", "update, none in flight", "wake ['kv_cache']"]
    assert await events_of("colocated", tmp_path / "weights") == ["sleep 2", *step] * 4
    adapter = await events_of("colocated", tmp_path / "adapter", adapter="policy")
    assert adapter == ["sleep 1", *step] * 4, "an adapter's update does not bring the base's weights back"


async def test_attached_servers_are_awake_after_a_colocated_run_that_fails(tmp_path: Path) -> None:
    """They outlive the run, and answered no request any more."""

    class Failing(Pupil):
        adapter = "merged into the base's weights"

        def step(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
            if self.version == 1:
                raise StateError("a gradient of norm nan")
            return super().step(trajectories)

    student = Failing([])
    with pytest.raises(StateError, match="norm nan"):
        await events_of("colocated", tmp_path, student=student, attach=["http://127.0.0.1:9"])
    assert student.events[:2] == ["sleep 1", "train, ages [0]"], "with their weights, which nobody else has"
    assert student.events[-3:] == ["sleep 1", "release", "wake None"]


class Slow(Told):
    """Of the groups submitted at the start, only those of the first batch are done before the first update."""

    async def sample(self, *args: Any, **kwargs: Any) -> Any:
        if len(self.requests) >= 16 + 4:  # the evaluation, and one batch
            self.running += 1
            while self.weight_version == 0:  # noqa: ASYNC110 - the fake has no event
                await asyncio.sleep(0)
            self.running -= 1
        return await super().sample(*args, **kwargs)


async def test_fully_async_updates_in_flight(tmp_path: Path) -> None:
    events = await events_of("async", tmp_path, engine=Slow)
    assert events[:2] == ["train, ages [0]", "update, some in flight"]
    assert max(int(age) for event in events if event.startswith("train") for age in event if age.isdigit()) <= 2


async def test_colocated_gives_what_synchronous_apart_gives(model: Path, tmp_path: Path) -> None:
    """Seeds, order and weights are the same, so every reward, loss and version is."""
    rows: list[list[dict[str, float]]] = []
    for schedule in ("sync", "colocated"):
        config = config_under(schedule, model)
        folder = RunFolder.create(tmp_path / schedule, config)
        summary = await run_on_sim(config, folder)
        assert ("sleep" in summary.seconds) == (schedule == "colocated")
        rows.append(what_counts(folder))
    assert rows[0] == rows[1]
    assert len(rows[0]) == 4


@pytest.mark.parametrize("schedule", ["one_step_off", "colocated"])
async def test_a_run_is_resumed_under_its_schedule(model: Path, tmp_path: Path, schedule: str) -> None:
    config = config_under(schedule, model, steps=5, checkpoint_every=2)
    folder = RunFolder.create(tmp_path, config)
    await cut_off_after(3, config, folder)
    summary = await run_on_sim(config, folder, resume=True)
    rows = folder.metrics()
    assert summary.resumed_at == (2,)
    assert [row["step"] for row in rows] == [row["version"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(row["samples"] == 16 for row in rows)
    assert max(row["staleness_max"] for row in rows) <= config.train.staleness
    assert summary.unconsumed_tokens == 0


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.schedule=colocated"], r"colocated has the engines sleep .* set engine\.enable_sleep_mode: true"),
        (["train.schedule=one_step_off", "train.max_staleness=0"], r"max_staleness is 0; choose 1 or more"),
        (["train.schedule=one_step_off", "train.correction=none"], r"none trains on older tokens as if"),
        (["train.schedule=synchronous"], r"train\.schedule"),
    ],
)
def test_a_schedule_that_contradicts_other_keys_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_schedule(load_config(DEMO, overrides))


@pytest.mark.parametrize(
    ("schedule", "gpus", "engines", "refused"),
    [
        ("colocated", 0, 1, "needs engines that sleep, which vLLM can on GPUs only"),
        ("colocated", 1, 1, ""),
        ("one_step_off", 1, 1, "1 GPUs of engines and 1 of the learner are more than the 1 there are; ask for fewer"),
        ("one_step_off", 2, 1, ""),
        ("sync", 2, 2, "2 GPUs of engines and 1 of the learner are more than the 2"),
        ("async", 1, 1, ""),
        ("one_step_off", 0, 1, ""),
    ],
)
def test_a_layout_that_cannot_run_the_schedule_is_refused(
    schedule: str, gpus: int, engines: int, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    config = config_under(schedule)
    config = config.model_copy(update={"fleet": config.fleet.model_copy(update={"engines": engines})})
    if refused:
        with pytest.raises(ConfigError, match=refused):
            check_schedule(config)
    else:
        check_schedule(config)


async def test_an_error_of_work_that_a_second_cancellation_leaves_is_read() -> None:
    complaints: list[Any] = []
    loop, go = asyncio.get_running_loop(), asyncio.Event()

    async def work() -> None:
        await go.wait()
        raise StateError("nobody waits for this")

    loop.set_exception_handler(lambda _, context: complaints.append(context.get("exception")))
    try:
        caller = asyncio.create_task(to_the_end(work()))
        for _ in range(2):
            await asyncio.sleep(0.01)
            caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        del caller
        go.set()
        await asyncio.sleep(0.01)  # turns of the loop, in which the work ends
        gc.collect()
    finally:
        loop.set_exception_handler(None)
    assert not [error for error in complaints if isinstance(error, StateError)], "garbage of other tests is theirs"
