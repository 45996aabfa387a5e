"""The engine without HTTP, in virtual time: pauses, versions, batching, preemption, the prefix cache."""

from __future__ import annotations

import asyncio

import pytest
from sim_http import now

from penstock.control_types import KV, PauseMode
from penstock.errors import EngineDeadError
from penstock.sim import SimConfig, SimEngine
from penstock.types import SamplingParams
from penstock.weights.manifest import TensorEntry, WeightManifest
from sim_verify import generate, verify
from virtual_time import virtual

PROMPT = list(range(1, 33))
STEP = 0.001
"""Seconds of a step at the default rate."""


def manifest(version: int) -> WeightManifest:
    return WeightManifest(version, "shared_memory", {}, (TensorEntry("w", "float32", (2,), 0, version),))


async def update(engine: SimEngine, version: int, *, kv: KV = "recompute") -> dict:
    await engine.prepare(manifest(version))
    return await engine.apply(version, kv=kv)


def in_flight(engine: SimEngine, params: SamplingParams) -> asyncio.Task:
    return asyncio.create_task(generate(engine, PROMPT, params))


@virtual
async def test_stale_kv_shows():
    engine = SimEngine()
    task = in_flight(engine, SamplingParams(max_tokens=60))
    await asyncio.sleep(30 * STEP)
    assert (await update(engine, 1, kv="keep"))["preempted"] == 0
    sample = (await task)[0]
    cut = sample.spans[0].end
    wrong = verify(PROMPT, sample, params=SamplingParams(max_tokens=60))
    assert {m.position for m in wrong} == set(range(cut, 60))
    stale_hit = (await generate(engine, PROMPT, {"max_tokens": 20}))[0]
    assert verify(PROMPT, stale_hit, params=SamplingParams(max_tokens=20))
    assert engine.reset_prefix_cache()
    clean = (await generate(engine, PROMPT, {"max_tokens": 20}))[0]
    assert verify(PROMPT, clean, params=SamplingParams(max_tokens=20)) == []


@virtual
async def test_only_a_resume_ends_a_pause_and_nothing_runs_before_its_memory_is_back():
    engine = SimEngine()
    task = in_flight(engine, SamplingParams(max_tokens=60))
    await asyncio.sleep(10 * STEP)
    await engine.pause(PauseMode.ABORT)
    await engine.sleep(1)
    await engine.wake_up()
    assert engine.paused
    await engine.sleep(1)
    await engine.resume()
    for tag in ("weights", "kv_cache"):
        assert engine.paused
        await engine.wake_up([tag])
    assert (await task)[0].finish_reason == "length"


@virtual
async def test_native_start_while_requests_run_kills():
    engine = SimEngine()
    engine.weights.initialised = True
    task = in_flight(engine, SamplingParams(max_tokens=100))
    await asyncio.sleep(10 * STEP)
    with pytest.raises(EngineDeadError):
        engine.start_update()
    with pytest.raises(EngineDeadError):
        await task
    with pytest.raises(EngineDeadError):
        await generate(engine, PROMPT)


@virtual
async def test_batching_shares_a_step_and_max_num_seqs_queues():
    async def seconds(config, count):
        engine, begin = SimEngine(config), now()
        await asyncio.gather(*(generate(engine, PROMPT, {"max_tokens": 100}) for _ in range(count)))
        return now() - begin

    alone, together = await seconds(SimConfig(), 1), await seconds(SimConfig(), 64)
    assert alone == pytest.approx(0.1, rel=0.01)
    assert together < 1.5 * alone
    assert await seconds(SimConfig(max_num_seqs=16), 64) > 3.5 * alone


@virtual
async def test_prefill_takes_time_and_the_prefix_cache_saves_it():
    engine = SimEngine(SimConfig(prefill_tokens_per_second=1000))
    prompt, times = list(range(1, 1001)), []
    for _ in range(2):
        begin = now()
        await generate(engine, prompt, {"max_tokens": 1})
        times.append(now() - begin)
    assert times[0] == pytest.approx(1.0 + STEP)
    # 62 of 62.5 blocks of 16 are found again.
    assert times[1] == pytest.approx((1000 - 62 * 16) / 1000 + STEP)
    assert (engine.scheduler.stats.queries, engine.scheduler.stats.hits) == (2000, 992)
    await engine.pause(PauseMode.KEEP)
    await engine.resume()
    begin = now()
    await generate(engine, prompt, {"max_tokens": 1})
    assert now() - begin == pytest.approx(times[0]), "a pause that clears the cache clears it"


@virtual
async def test_kv_pressure_preempts_and_loses_nothing():
    config = SimConfig(kv_blocks=40, block_size=16, max_model_len=640)
    engine = SimEngine(config)
    params = SamplingParams(max_tokens=300)
    prompts = [[i, *PROMPT] for i in range(1, 9)]
    answers = await asyncio.gather(*(generate(engine, p, params) for p in prompts))
    assert engine.scheduler.stats.preemptions > 0
    assert engine.scheduler.pool.usage == 0
    for prompt, (sample,) in zip(prompts, answers, strict=True):
        assert verify(prompt, sample, params=params) == []
    assert engine.stats.generation_tokens == 8 * 300


@virtual
async def test_lora_switches_in_mid_sequence_without_a_marker():
    engine = SimEngine()
    engine.adapters.load("style", "a1")
    task = asyncio.create_task(generate(engine, PROMPT, SamplingParams(max_tokens=40), lora="style"))
    await asyncio.sleep(20 * STEP)
    engine.adapters.load("style", "a2")
    sample = (await task)[0]
    assert len(sample.spans) == 1
    params = SamplingParams(max_tokens=40)
    made_by_first = {m.position for m in verify(PROMPT, sample, params=params, adapter="a2")}
    made_by_second = {m.position for m in verify(PROMPT, sample, params=params, adapter="a1")}
    assert made_by_first | made_by_second == set(range(40))
    assert made_by_first.isdisjoint(made_by_second)
