"""Updates that keep the KV cache: nothing is computed again, and every token made so says that it was."""

from __future__ import annotations

import asyncio

import pytest
import torch
from fleet_fakes import Bench
from sim_fleets import SIM, generated, in_flight

from penstock import Fleet, SamplingParams
from penstock.engine.single import HTTPEngine
from penstock.errors import RequestError, UserError
from penstock.sim.config import SimConfig
from penstock.sim.server import SimServer
from penstock.types import KV, EngineUpdate

PARAMS = SamplingParams(max_tokens=450, detokenize=False)
PROMPTS = [[1 + i, 2] for i in range(6)]
WEIGHTS = [("w", torch.ones(5))]


async def test_tokens_of_a_version_that_kept_the_cache_say_so():
    slow = {**SIM, "extra_args": {"tokens-per-second": 150}}
    async with Fleet.launch("sim-model", engines=2, **slow) as fleet:
        running = asyncio.create_task(fleet.generate(prompt_token_ids=PROMPTS, sampling_params=PARAMS))
        await in_flight(fleet, lambda requests: requests == len(PROMPTS))
        await generated(fleet, 30)
        kept = await fleet.update_weights(WEIGHTS, kv="keep")
        assert sum(engine.preempted for engine in kept.engines) == 0, "nothing is computed again"
        await generated(fleet, 30)
        async with Fleet.connect(fleet.url) as other:  # in the place of another process
            again = await other.update_weights(WEIGHTS, kv="keep")
            await generated(fleet, 30)
            assert sum(engine.preempted for engine in again.engines) == 0
            recomputed = await other.update_weights(WEIGHTS)
            assert sum(engine.preempted for engine in recomputed.engines) == len(PROMPTS)
            late = await other.sample([5], 1, SamplingParams(max_tokens=9))
        out = await running
        assert [len(ids) for ids in out.response_ids] == [PARAMS.max_tokens] * len(PROMPTS)
    labels = {span.version: span.kv_kept for spans in out.response_spans for span in spans}
    assert labels == {0: False, 1: True, 2: True, 3: False}
    assert [span.kv_kept for span in late[0].spans] == [False]


async def test_one_engine_has_it_too():
    async with SimServer(SimConfig(tokens_per_second=500)) as server:
        engine = await HTTPEngine.connect(server.url)
        report = await engine.update_weights(WEIGHTS, kv="keep")
        (sample,) = await engine.sample([5], 1, SamplingParams(max_tokens=9))
        assert [(span.version, span.kv_kept) for span in sample.spans] == [(report.version, True)]
        with pytest.raises(RequestError, match="kv must be one of recompute, keep, keep_in_flight, got 'lose'"):
            await engine.update_weights(WEIGHTS, kv="lose")  # type: ignore[arg-type]
        await engine.teardown()


async def test_who_takes_an_engine_over_has_it_until_an_update_recomputes() -> None:
    async with SimServer(SimConfig(tokens_per_second=500)) as server:
        before = await HTTPEngine.connect(server.url)
        await before.update_weights(WEIGHTS, kv="keep")
        await before.teardown()
        engine = await HTTPEngine.connect(server.url)
        (sample,) = await engine.sample([5], 1, SamplingParams(max_tokens=9))
        assert [(span.version, span.kv_kept) for span in sample.spans] == [(1, True)]
        await engine.teardown()
        async with Fleet.connect([server.url]) as fleet:
            (sample,) = await fleet.sample([5], 1, SamplingParams(max_tokens=9))
            assert [(span.version, span.kv_kept) for span in sample.spans] == [(1, True)]
            await fleet.update_weights(WEIGHTS)
        async with Fleet.connect([server.url]) as fleet:
            (sample,) = await fleet.sample([5], 1, SamplingParams(max_tokens=9))
            assert [(span.version, span.kv_kept) for span in sample.spans] == [(2, False)]


async def test_what_else_is_refused_before_anything_is_done():
    async with Fleet.launch("sim-model", engines=1, **SIM) as fleet:
        with pytest.raises(UserError, match="kv must be one of recompute, keep, keep_in_flight"):
            await fleet.update_weights(WEIGHTS, kv="lose")  # type: ignore[arg-type]
        assert fleet.weight_version == 0


async def test_who_follows_the_fleet_is_told_before_any_engine_makes_such_tokens() -> None:
    bench = await Bench().started()
    told = asyncio.create_task(bench.roster.until(lambda: bench.roster.kv_kept_versions == {1}))
    apply, heard = bench.engine["a"].apply_weights, list[bool]()

    async def apply_weights(version: int, *, kv: KV = "recompute") -> EngineUpdate:
        await asyncio.sleep(0)
        heard.append(told.done())
        return await apply(version, kv=kv)

    bench.engine["a"].apply_weights = apply_weights  # type: ignore[method-assign]
    await bench.operations.update([], None, kv="keep")
    assert heard == [True]
    assert await told
