"""The learner process: each operation once, and those of a model in order."""

from __future__ import annotations

import asyncio
import errno
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import torch
from starlette.responses import Response

from penstock.errors import CheckpointError
from penstock.tinker import models
from penstock.tinker.learner_process import LearnerQueue, build_app
from penstock.tinker.models import Models
from penstock.tinker.training_data import Sizes
from penstock.train.interface import LoraSpec, Outputs


class Learner:
    """Takes steps of adapters, and notes the order; each waits for `go`."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.go = threading.Event()
        self.error: Exception | None = None

    def create_adapter(self, name: str, _spec: Any) -> None:
        self.done.append(name)

    def forward(self, name: str, _loss: Any, data: Any) -> Outputs:
        self.done.append(name)
        return Outputs([torch.zeros(len(datum.target_ids)) for datum in data], {}, {}, {})

    def drop_adapter(self, name: str) -> None:
        self.done.remove(name)

    def weights(self, _: str) -> Any:
        return [("lora_A", torch.ones(2))]

    def adapter_config(self, _: str) -> dict[str, Any]:
        return {}

    def save(self, _name: str, _folder: Path) -> dict[str, Any]:
        return {}

    def optim_step(self, name: str, adam: Any, *, scale: float) -> float:
        self.go.wait(60)
        self.done.append(f"{name}@{adam.learning_rate:g}")
        if self.error is not None:
            raise self.error
        return 1.0 * scale


@pytest.fixture
def learner() -> Learner:
    return Learner()


@pytest.fixture
def operations(learner: Learner, tmp_path: Path) -> Iterator[LearnerQueue]:
    models, no_fleet = Models(cast("Any", learner), tmp_path / "models", "base", max_rank=8), cast("Any", None)
    with ThreadPoolExecutor(1) as thread:
        yield LearnerQueue(models, no_fleet, Sizes(24, 64), thread)
        learner.go.set()


async def create(operations: LearnerQueue, model: str) -> Response:
    return await operations.run(f"{model}:0", "create_model", model, b'{"lora_config": {"rank": 2}}')


def step(operations: LearnerQueue, model: str, seq: int) -> asyncio.Task[Response]:
    body = json.dumps({"adam_params": {"learning_rate": seq}}).encode()
    return asyncio.create_task(operations.run(f"{model}:{seq}", "optim_step", model, body))


async def test_models_take_turns_and_each_keeps_its_order(operations: LearnerQueue, learner: Learner):
    await create(operations, "a")
    await create(operations, "b")
    steps = [step(operations, model, seq) for model, seq in (("a", 1), ("a", 2), ("a", 3), ("b", 1), ("b", 2))]
    await asyncio.sleep(0)
    learner.go.set()
    assert [answer.status_code for answer in await asyncio.gather(*steps)] == [200] * 5
    assert [name for name in learner.done if name[0] == "a"] == ["a", "a@1", "a@2", "a@3"]
    assert learner.done.index("b@1") < learner.done.index("a@2"), "a queue of one model holds up no other"


async def test_a_repeated_request_runs_once_also_after_a_restart(operations: LearnerQueue, learner: Learner):
    await create(operations, "a")
    twice = [step(operations, "a", 1), step(operations, "a", 1)]
    await asyncio.sleep(0)
    twice[0].cancel()  # its caller is gone; the operation is not
    learner.go.set()
    answer = await twice[1]
    assert json.loads(answer.body) == {"metrics": {"grad_norm:mean": 1.0}}
    assert await step(operations, "a", 1) == answer
    assert learner.done == ["a", "a@1"]
    operations._last.clear()  # as in the next process
    assert (await create(operations, "a")).status_code == 200, "a model that is there stays"
    await step(operations, "a", 1)
    assert learner.done == ["a", "a@1", "a@1"], "a step that died with its process is made again"


async def test_an_answer_that_is_stored_elsewhere_can_be_dropped(operations: LearnerQueue, learner: Learner):
    await create(operations, "a")
    learner.go.set()
    await step(operations, "a", 1)
    transport = httpx.ASGITransport(build_app(operations))
    async with httpx.AsyncClient(transport=transport, base_url="http://learner", headers={"X-Model": "a"}) as client:
        assert (await client.delete("/operations/a:0")).status_code == 200
        assert list(operations._last) == ["a"], "that was not its last one"
        assert (await client.delete("/operations/a:1")).status_code == 200
    assert not operations._last


async def test_a_failure_is_an_answer_with_its_category(operations: LearnerQueue, learner: Learner):
    learner.go.set()
    refused = await operations.run("x", "optim_step", "nobody", b'{"adam_params": {}}')
    assert refused.status_code == 400
    assert "no model 'nobody'" in json.loads(refused.body)["error"]
    await create(operations, "a")
    learner.error = RuntimeError("no memory\nand a long trace")
    failed = await step(operations, "a", 1)
    assert failed.status_code == 409
    assert json.loads(failed.body) == {"error": "optim_step failed in the learner: RuntimeError: no memory"}
    for kind, body, message in (
        ("optim_step", b'{"adam_params": {"momentum": 1}}', "malformed adam_params"),
        ("create_model", b'{"lora_config": {"rank": 64}}', "rank 64 is more than the engines of this service take"),
    ):
        answer = await operations.run(body.decode() + kind, kind, "a", body)
        assert answer.status_code == 400
        assert message in json.loads(answer.body)["error"]


async def test_the_process_says_what_it_holds(operations: LearnerQueue, learner: Learner):
    learner.go.set()
    transport = httpx.ASGITransport(build_app(operations))
    async with httpx.AsyncClient(transport=transport, base_url="http://learner") as http:
        headers = {"X-Operation": "create_model", "X-Model": "s:train:0"}
        made = await http.post("/operations/s:train:0:0", content=b'{"lora_config": {"rank": 2}}', headers=headers)
        assert made.status_code == 200
        await step(operations, "s:train:0", 1)
        held = (await http.get("/models")).json()
        assert held.keys() == {"incarnation", "models"}
        assert held["models"] == {"s:train:0": {"steps": 1, "saved": None, "saved_steps": 0}}
        headers |= {"X-Operation": "optim_step", "X-Incarnation": "of a process before"}
        refused = await http.post("/operations/s:train:0:2", content=b'{"adam_params": {}}', headers=headers)
        assert refused.status_code == 412
        assert (await http.get("/models")).json()["models"]["s:train:0"]["steps"] == 1


def test_a_model_that_the_disk_could_not_keep_stays_dropped_after_a_restart(
    learner: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    kept = Models(cast("Any", learner), tmp_path / "models", "base", max_rank=8)
    kept.create("m", LoraSpec(rank=4))
    with monkeypatch.context() as patched:
        patched.setattr(models, "_link", full)
        with pytest.raises(CheckpointError, match="No space left"):
            kept.save("m", tmp_path / "saved")
    kept.drop("m")
    again = Models(cast("Any", learner), tmp_path / "models", "base", max_rank=8)
    again.restore()
    assert not again.live
