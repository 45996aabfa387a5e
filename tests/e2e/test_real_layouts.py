"""Engines of several ranks, on the CPU: every rank has the new weights, and all answer as the model itself does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from hold import Hold
from http_engine import HTTPEngine, launched_engine
from nano_models import History, changed, save_moe
from penstock import Fleet
from penstock.engine.launch import EngineProcess
from penstock.settings import EngineConfig
from penstock.types import SamplingParams
from penstock.weights.checkpoint_names import checkpoint_tensors
from sim_fleets import samples_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(420)]

GREEDY = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, detokenize=False)
LONG = replace(GREEDY, max_tokens=150)


@asynccontextmanager
async def launched(logs: Path, **engines: EngineConfig) -> AsyncIterator[list[EngineProcess]]:
    """Engine processes of these names, started side by side."""
    async with AsyncExitStack() as owned:
        started = await asyncio.gather(
            *(EngineProcess.launch(config, name=name, log_dir=logs) for name, config in engines.items()),
            return_exceptions=True,
        )
        for process in started:
            if isinstance(process, EngineProcess):
                owned.push_async_callback(process.stop)
        failures = [error for error in started if isinstance(error, BaseException)]
        assert not failures, failures
        yield [process for process in started if isinstance(process, EngineProcess)]


def config(model: Path, hold: Hold, tp: int = 1, dp: int = 1) -> EngineConfig:
    return EngineConfig(
        model=str(model), profile="cpu", max_model_len=512, tensor_parallel_size=tp, data_parallel_size=dp,
        extra_args=hold.extra_args,
    )  # fmt: skip


@pytest.mark.slow
async def test_engines_of_differing_sizes_serve_the_same_experts_after_an_update_in_flight(
    hold: Hold, tmp_path: Path
) -> None:
    """TP 2 and TP 1 in one fleet, on a mixture of experts: each rank holds its share of every expert."""
    path = save_moe(tmp_path / "moe")
    history = History.of(path)
    model = changed(history.latest, 1, scale=0.1)
    async with launched(tmp_path, wide=config(path, hold, tp=2), narrow=config(path, hold)) as processes:
        urls = [process.url for process in processes]
        async with Fleet.connect(urls) as fleet:
            assert [(m.tp, m.pp, m.dp) for m in (member.info for member in fleet._roster.members)] == [
                (2, 1, 1),
                (1, 1, 1),
            ]
            prompts = [[5, 6, 7 + i] for i in range(8)]
            before = await fleet.collective_rpc("penstock_checksum")
            with hold.at(20):
                running = asyncio.create_task(fleet.generate(prompt_token_ids=prompts, sampling_params=LONG))
                await hold.reached(8)
                report = await fleet.update_weights(checkpoint_tensors(model).items())
            assert all(engine.preempted for engine in report.engines), "one of them had no KV to clear"
            history.models[report.version] = model
            assert report.failures == {}
            wide, narrow = (engine.checksum for engine in report.engines)
            assert len(wide.split("-")) == 2, "one checksum for each rank"
            assert len(narrow.split("-")) == 1
            after = await fleet.collective_rpc("penstock_checksum")
            assert not set(before) & set(after), "a rank has the weights it had before"
            assert sorted(after) == sorted([*wide.split("-"), narrow])
            out = await running
            assert [len(spans) for spans in out.response_spans] == [2] * 8
            for prompt, sample in zip(prompts, samples_of(out), strict=True):
                assert history.worst_difference(prompt, sample) < 1e-4
        for url in urls:
            async with HTTPEngine.connected(url) as engine:
                answers = [(p, (await engine.sample(p, 1, GREEDY))[0]) for p in prompts[:3]]
            for prompt, sample in answers:
                assert sample.versions() == (1,) * 60
                assert history.worst_difference(prompt, sample) < 1e-4


@pytest.mark.slow
async def test_every_data_parallel_replica_takes_an_update(
    nano_path: Path, history: History, hold: Hold, tmp_path: Path
) -> None:
    async with launched_engine(config(nano_path, hold, dp=2), "replicas", tmp_path) as (engine, _):
        assert engine.dp_size == 2
        prompts = [[5, 6, 7 + i] for i in range(8)]
        with hold.at(20):
            running = [asyncio.create_task(engine.sample(prompt, 1, LONG)) for prompt in prompts]
            await hold.reached(8)
            report = await history.update(engine, 2)
        first, second = report.engines[0].checksum.split("-")
        assert first == second, "replicas of one engine hold the same weights"
        for prompt, task in zip(prompts, running, strict=True):
            (sample,) = await task
            assert len(sample.spans) == 2
            assert history.worst_difference(prompt, sample) < 1e-4
        # More at once than one replica is given: whichever answers, it is the new model.
        later = await asyncio.gather(*(engine.sample(prompt, 1, GREEDY) for prompt in prompts))
        for prompt, (sample,) in zip(prompts, later, strict=True):
            assert sample.versions() == (1,) * 60
            assert history.worst_difference(prompt, sample) < 1e-4
