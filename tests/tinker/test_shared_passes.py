"""Tenants that train at the same time share passes over the base, and one that fails does so alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import pytest_asyncio
import torch
from starlette.responses import Response
from test_training_data import SIZES, base, data_of, models_of, request  # noqa: F401 - a fixture
from tinker.proto.response_conv import deserialize_forward_backward_output

from penstock.tinker.learner_process import LearnerQueue
from penstock.train.interface import AdamSpec
from penstock.train.learner import LocalLearner

TENANTS = {"a": 4, "b": 2, "c": 3}
"""Ranks of their adapters."""


@pytest_asyncio.fixture
async def operations(base: str, tmp_path: Path) -> AsyncGenerator[LearnerQueue]:  # noqa: F811
    models, no_fleet = models_of(base, tmp_path), cast("Any", None)
    with ThreadPoolExecutor(1) as thread:
        operations = LearnerQueue(models, no_fleet, SIZES, thread, turn_tokens=400)
        for number, (name, rank) in enumerate(TENANTS.items()):
            lora = {"lora_config": {"rank": rank, "seed": number, "train_unembed": name != "b"}}
            made = await operations.run(f"{name}:0", "create_model", name, json.dumps(lora).encode())
            assert made.status_code == 200
            await evaluated(operations, name, number, f"{name}:1")
            models.step(name, AdamSpec(learning_rate=3e-2))
        yield operations


@pytest.fixture
def rows(operations: LearnerQueue, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each pass over the base."""
    policy, found = learner_of(operations).policy, list[int]()
    hidden = policy.hidden

    def counted(batch: Any) -> torch.Tensor:
        found.append(batch.input_ids_1_L.shape[1])
        return hidden(batch)

    monkeypatch.setattr(policy, "hidden", counted)
    return found


def learner_of(operations: LearnerQueue) -> LocalLearner:
    return cast("LocalLearner", operations.models.learner)


def evaluated(operations: LearnerQueue, name: str, seed: int, request_id: str) -> asyncio.Task[Response]:
    body = request("cross_entropy", data_of(seed, 2))
    return asyncio.create_task(operations.run(request_id, "forward_backward", name, body))


def gradients(operations: LearnerQueue) -> dict[str, torch.Tensor]:
    named = {f"{n}/{k}": p for n in TENANTS for k, p in learner_of(operations)._parameters(n).items()}
    return {key: p.grad.clone() for key, p in named.items() if p.grad is not None}


def forget(operations: LearnerQueue) -> None:
    for name in TENANTS:
        learner_of(operations)._optimizer(name).zero_grad()


def logprobs_of(answer: Response) -> list[Any]:
    assert answer.status_code == 200, answer.body
    return [each["logprobs"].to_numpy() for each in deserialize_forward_backward_output(answer.body).loss_fn_outputs]


async def test_tenants_that_come_at_once_share_passes_and_get_their_own(operations: LearnerQueue, rows: list[int]):
    alone = [await evaluated(operations, name, 7 + i, f"{name}:2") for i, name in enumerate(TENANTS)]
    wanted, passes = gradients(operations), len(rows)
    forget(operations)
    rows.clear()
    together = await asyncio.gather(*(evaluated(operations, n, 7 + i, f"{n}:3") for i, n in enumerate(TENANTS)))
    assert len(rows) < passes
    found = gradients(operations)
    assert found.keys() == wanted.keys()
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[key], rtol=1e-3, atol=1e-4)
    for one, other in zip(alone, together, strict=True):
        for ours, theirs in zip(logprobs_of(other), logprobs_of(one), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


async def test_a_tenant_with_a_broken_adapter_fails_alone(operations: LearnerQueue):
    good = [name for name in TENANTS if name != "b"]
    for i, name in enumerate(good):
        await evaluated(operations, name, 7 + i, f"{name}:2")
    wanted = gradients(operations)
    forget(operations)
    with torch.no_grad():
        next(iter(learner_of(operations)._parameters("b").values()))[0, 0] = float("nan")
    answers = await asyncio.gather(
        *(evaluated(operations, name, 7 + i, f"{name}:3") for i, name in enumerate([*good, "b"]))
    )
    for answer in answers[:2]:
        assert all(np.isfinite(row).all() for row in logprobs_of(answer))
    found = {key: value for key, value in gradients(operations).items() if not key.startswith("b/")}
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[key], rtol=1e-3, atol=1e-4)
    step = json.dumps({"adam_params": {"learning_rate": 0.1}}).encode()
    assert (await operations.run("b:4", "optim_step", "b", step)).status_code != 200
    assert (await operations.run("a:4", "optim_step", "a", step)).status_code == 200


async def test_a_step_takes_nothing_of_a_batch_that_failed_in_part(operations: LearnerQueue):
    step = json.dumps({"adam_params": {"learning_rate": 0.1}}).encode()
    await evaluated(operations, "a", 7, "a:2")
    bad = await operations.run("a:3", "forward_backward", "a", request("importance_sampling", data_of(3)))
    assert bad.status_code == 400
    assert (await evaluated(operations, "a", 8, "a:4")).status_code == 200
    refused = await operations.run("a:5", "optim_step", "a", step)
    assert refused.status_code == 409
    assert "no step was taken: a forward_backward before it failed (datum 0" in json.loads(refused.body)["error"]
    assert not gradients(operations)
    await evaluated(operations, "a", 7, "a:6")
    assert (await operations.run("a:7", "optim_step", "a", step)).status_code == 200


async def test_what_is_more_than_a_turn_waits_for_the_next(operations: LearnerQueue, rows: list[int]):
    operations.turn_tokens = 1
    await asyncio.gather(*(evaluated(operations, name, 5, f"{name}:2") for name in TENANTS))
    assert max(rows) <= 40
    assert len(rows) >= 6
