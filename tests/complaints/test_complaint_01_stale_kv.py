"""Complaint 1: KV cache of old weights is used after an update.

SkyRL #2246 and #1798, NeMo RL #4018 and #3152, miles #2782, pytorch/rl #4016.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from nano_models import changed
from penstock import Fleet, SamplingParams
from penstock.control_types import KV
from sim_fleets import LONG, SHORT, begun, check, slowed, stepped, whole

PREFIX = [3 + i % 90 for i in range(160)]
"""Ten whole blocks of KV, and as many in the simulated engine."""


@pytest.mark.parametrize("kv", ["recompute", "keep_in_flight"])
async def test_a_prefix_cached_before_an_update_is_computed_again_after_it(fleet: Fleet, kv: KV) -> None:
    """A simulated token that attends to KV of other weights is the token of no version, so `check` sees it.

    Also where requests in flight keep their KV (miles #2782): then they say so, and no new request finds it.
    """
    prompts = [[*PREFIX, i] for i in range(1, 9)]
    for version in range(1, 4):
        async with slowed(fleet):
            running = await begun(fleet, prompts, LONG)
            await stepped(fleet, len(prompts))  # so that none waits in an engine's queue
            report = await fleet.update_weights([("w", torch.full((64,), float(version)))], kv=kv)
        assert (sum(engine.preempted for engine in report.engines) == 0) == (kv == "keep_in_flight")
        after = await fleet.generate(prompt_token_ids=prompts, sampling_params=SHORT)
        check(prompts, after, SHORT)
        assert {(s.version, s.kv_kept) for spans in after.response_spans for s in spans} == {(report.version, False)}
        out = await whole(running, prompts, LONG)  # also the requests that the update interrupted
        labels = {s.kv_kept for spans in out.response_spans for s in spans if s.version == report.version}
        assert labels == {kv == "keep_in_flight"}


@pytest.mark.vllm
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kv", ["recompute", "keep_in_flight"])
async def test_real_vllm_computes_a_cached_prefix_again_after_an_update(live, kv: KV) -> None:
    """Logprobs equal those of the model under the version that each token claims, and not those before."""
    one, long = SamplingParams(max_tokens=1, temperature=0, detokenize=False), replace(LONG, ignore_eos=True)
    before = (await live.engine.sample(PREFIX, 1, one))[0]
    with live.hold.at(20):
        running = asyncio.create_task(live.engine.sample(PREFIX, 2, long))
        await live.hold.reached(2)
        await live.update(changed(live.history.latest, 31), kv)
        after = (await live.engine.sample(PREFIX, 1, one))[0]
    assert after.logprobs != before.logprobs
    crossed = await running
    assert [len(sample.spans) for sample in crossed] == [2, 2]
    for sample in (after, *crossed):
        assert live.history.worst_difference(PREFIX, sample) < 1e-4
