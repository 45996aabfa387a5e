"""Engines of several ranks, on the CPU: every rank has the new weights, and all answer as the model itself does."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from hold import Hold
from http_engine import launched_engine
from nano_models import History, changed, save_moe
from penstock import Fleet
from penstock.settings import EngineConfig
from penstock.types import SamplingParams
from penstock.weights.checkpoint_names import checkpoint_tensors
from sim_fleets import samples_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(420)]

GREEDY = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, detokenize=False)
LONG = replace(GREEDY, max_tokens=150)


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
    async with (
        launched_engine(config(path, hold, tp=2), "wide", tmp_path) as (wide_engine, one),
        launched_engine(config(path, hold), "narrow", tmp_path) as (narrow_engine, other),
    ):
        async with Fleet.connect([one.url, other.url]) as fleet:
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
        for engine in (wide_engine, narrow_engine):
            for prompt in prompts[:3]:
                (sample,) = await engine.sample(prompt, 1, GREEDY)
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
