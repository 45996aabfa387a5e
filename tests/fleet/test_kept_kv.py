"""Updates that keep the KV cache: nothing is computed again, and every token made so says that it was."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from fleet_fakes import Bench, on_bench

from http_engine import HTTPEngine
from patience import WAIT_S
from penstock import Fleet, SamplingParams
from penstock.control_types import KV, EngineUpdate
from penstock.errors import MissingCapabilityError, UserError
from penstock.sim.config import SimConfig
from penstock.sim.server import SimServer
from sim_fleets import SIM, begun, generated, slowed, stepped, whole

PARAMS = SamplingParams(max_tokens=450, detokenize=False)
PROMPTS = [[1 + i, 2] for i in range(6)]
WEIGHTS = [("w", torch.ones(5))]
SLOW = {**SIM, "extra_args": {"tokens-per-second": 150}}


async def test_tokens_of_a_version_that_kept_the_cache_say_so():
    async with Fleet.launch("sim-model", engines=2, **SLOW) as fleet:
        async with slowed(fleet, 10.0):
            running = await begun(fleet, PROMPTS, PARAMS)
            await stepped(fleet, 15)
            kept = await fleet.update_weights(WEIGHTS, kv="keep")
            assert sum(engine.preempted for engine in kept.engines) == 0, "nothing is computed again"
            await stepped(fleet, 15)
            async with Fleet.connect(fleet.url) as other:  # in the place of another process
                again = await other.update_weights(WEIGHTS, kv="keep")
                await stepped(fleet, 15)
                assert sum(engine.preempted for engine in again.engines) == 0
                recomputed = await other.update_weights(WEIGHTS)
                assert sum(engine.preempted for engine in recomputed.engines) == len(PROMPTS)
                late = await other.sample([5], 1, SamplingParams(max_tokens=9))
        out = await running
        assert [len(ids) for ids in out.response_ids] == [PARAMS.max_tokens] * len(PROMPTS)
    labels = {span.version: span.kv_kept for spans in out.response_spans for span in spans}
    assert labels == {0: False, 1: True, 2: True, 3: False}
    assert [span.kv_kept for span in late[0].spans] == [False]


async def test_a_request_that_continues_on_another_engine_has_no_kept_kv_any_more():
    async with Fleet.launch("sim-model", engines=2, **SLOW) as fleet:
        async with slowed(fleet, 5.0):
            running = await begun(fleet, PROMPTS, PARAMS)
            await stepped(fleet, 30)
            await fleet.update_weights(WEIGHTS, kv="keep_in_flight")
            await generated(fleet, 900)
            await fleet.remove("e1", timeout_s=0.1)
        out = await whole(running, PROMPTS, PARAMS)
    ends = {tuple(span.kv_kept for span in spans) for spans in out.response_spans}
    assert ends == {(False, True), (False, True, False)}


async def test_every_process_can_ask_what_an_update_cost():
    async with Fleet.launch("sim-model", engines=2, **SIM) as fleet:
        async with Fleet.connect(fleet.url) as other, slowed(fleet, 20.0):
            running = await begun(fleet, PROMPTS * 4, PARAMS)
            with pytest.raises(UserError, match="kv must be one of recompute, keep, keep_in_flight"):
                await other.update_weights(WEIGHTS, kv="lose")  # type: ignore[arg-type]
            assert other.weight_version == 0
            await generated(fleet, 1000)
            report = await other.update_weights(WEIGHTS, kv="keep_in_flight")
            assert report.tokens_lost is None
            done = await other.recovered(report, timeout_s=WAIT_S)
        losses = [engine.loss for engine in done.engines]
        assert done.tokens_lost == sum(loss.tokens for loss in losses if loss is not None)
        assert all(loss is not None and loss.rate > 0 for loss in losses)
        assert await fleet.recovered(report) == done, "it is remembered"
        await running


@on_bench("ab")
async def test_engines_that_share_kv_are_named_before_anything_is_done(bench: Bench) -> None:
    member = bench.roster.members[1]
    capabilities = replace(member.info.capabilities, kv_in_flight=False)
    member.info = replace(member.info, capabilities=capabilities)
    with pytest.raises(MissingCapabilityError, match="engine b lacks KV that stays inside of it"):
        await bench.operations.update([], None, kv="keep_in_flight")
    assert bench.roster.version == 0
    await bench.operations.update([], None)


async def test_the_next_owner_of_an_engine_has_its_kept_kv_until_an_update_recomputes() -> None:
    async with SimServer(SimConfig(tokens_per_second=500)) as server:
        async with HTTPEngine.connected(server.url) as before:
            await before.update_weights(WEIGHTS, kv="keep")
        async with Fleet.connect([server.url]) as fleet:
            (sample,) = await fleet.sample([5], 1, SamplingParams(max_tokens=9))
            assert [(span.version, span.kv_kept) for span in sample.spans] == [(1, True)]
            await fleet.update_weights(WEIGHTS)
        async with Fleet.connect([server.url]) as fleet:
            (sample,) = await fleet.sample([5], 1, SamplingParams(max_tokens=9))
            assert [(span.version, span.kv_kept) for span in sample.spans] == [(2, False)]


@on_bench()
async def test_followers_of_a_fleet_know_of_kept_kv_before_an_engine_makes_such_tokens(bench: Bench) -> None:
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
