"""Eight adapters that are updated in turn under 512 samples at once, while engines die: nothing fails, none is cut."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from sdk_rig import ANSWER, BASE, PROMPT, call, client_of, service_of

import tinker
from penstock.fleet.member import State
from penstock.tinker.service import Service
from tinker import types

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

ADAPTERS, SAMPLES, TOKENS = 8, 512, 16
ROUND_S, WARM_S, UPDATE_S = 120.0, 30.0, 1.0
GROWTH = 1.25
logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)  # `--log-cli-level=INFO` shows the figures


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with service_of(tmp_path, "cpu", engines=2) as running:
        yield running


def trained_once(client: tinker.TrainingClient) -> tinker.SamplingClient:
    """Take a step, and put the adapter on the engines in place."""
    ids = client.get_tokenizer().encode(PROMPT + ANSWER)
    datum = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": ids[1:]})
    client.forward_backward([datum], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-3))
    return client.save_weights_and_get_sampling_client(kind="inflight").result()


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def kill_one(service: Service) -> None:
    """Kill an engine when all of them serve."""
    roster = service.fleet._roster
    async with asyncio.timeout(240.0):
        await roster.until(lambda: all(member.state is State.SERVING for member in roster.members))
    os.killpg(roster.members[0].process.pid, signal.SIGKILL)  # type: ignore[union-attr]
    async with asyncio.timeout(60.0):
        await roster.until(lambda: roster.members[0].state is not State.SERVING)


async def test_samples_outlive_updates_of_every_adapter_and_deaths_of_engines(service: Service) -> None:
    at = client_of(service.url)
    clients = [await call(at.create_lora_training_client(BASE, rank=8, seed=seed).result) for seed in range(ADAPTERS)]
    samplers = [await call(partial(trained_once, client)) for client in clients]
    prompt = types.ModelInput.from_ints(await call(lambda: clients[0].get_tokenizer().encode(PROMPT)))
    params = types.SamplingParams(max_tokens=TOKENS, stop=[])
    over, drawn, updates = asyncio.Event(), 0, 0

    async def sampling(sampler: tinker.SamplingClient) -> None:
        nonlocal drawn
        while not over.is_set():
            (found,) = (await sampler.sample(prompt, 1, params)).sequences
            assert len(found.tokens) == len(found.logprobs or ()) == TOKENS
            drawn += 1

    async def updating() -> None:
        nonlocal updates
        loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        while not over.is_set():
            await call(partial(trained_once, clients[updates % ADAPTERS]))
            updates += 1
            await asyncio.sleep(max(0.0, began + updates * UPDATE_S - loop.time()))

    async def dying() -> None:
        pids = [service.api.pid, service.learner.pid, os.getpid()]
        await asyncio.sleep(WARM_S)
        before = [resident(pid) for pid in pids]
        for _ in range(2):
            await kill_one(service)
            await asyncio.sleep((ROUND_S - WARM_S) / 2)
        over.set()
        after = [resident(pid) for pid in pids]
        logger.info("bytes of API process, learner and owner: %s, then %s", before, after)
        assert all(now < GROWTH * then for now, then in zip(after, before, strict=True)), (before, after)

    async with asyncio.TaskGroup() as group:
        for number in range(SAMPLES):
            group.create_task(sampling(samplers[number % ADAPTERS]))
        group.create_task(updating())
        group.create_task(dying())
    logger.info("%d samples and %d updates in %g s", drawn, updates, ROUND_S)
    assert drawn > 2 * SAMPLES
    assert updates >= ADAPTERS
