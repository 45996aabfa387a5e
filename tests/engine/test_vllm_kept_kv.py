"""Updates of one real vLLM CPU engine after which requests in flight keep their KV, and new ones reuse nothing old."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from nano_models import changed
from patience import asked
from penstock.control_types import PauseMode
from penstock.types import SamplingParams

pytestmark = pytest.mark.vllm

LONG = SamplingParams(max_tokens=320, ignore_eos=True, detokenize=False, seed=7)
ONE = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
PREFIX = [3 + i % 90 for i in range(160)]
"""Five whole blocks of KV."""


async def waiting_in_core(live) -> int:
    """Requests that wait in the scheduler; a paused engine's metrics stand still."""
    return (await live.engine.control.at_core("/penstock/core", {}, 60.0))["waiting"]


async def kept_update(live, seed):
    return await live.update(changed(live.history.latest, seed), "keep_in_flight")


def worst(live, prompt, samples):
    return max(live.history.worst_difference(prompt, sample) for sample in samples)


async def test_requests_in_flight_keep_their_kv_and_a_replay_of_the_updates_gives_their_logprobs(live):
    start = live.engine.weight_version
    prompts = [[5, 6, 7 + i] for i in range(12)]
    with live.hold.at(60):
        tasks = [asyncio.create_task(live.engine.sample(p, 2, LONG)) for p in prompts]
        for seed, tokens in ((61, 120), (62, 180)):
            await live.hold.reached(24)
            report = await kept_update(live, seed)
            assert (report.engines[0].kept, report.engines[0].preempted) == (24, 0)
            live.hold.move(tokens)
    for prompt, task in zip(prompts, tasks, strict=True):
        for sample in await task:
            made_by = [(span.version - start, span.kv_kept) for span in sample.spans]
            assert made_by == [(0, False), (1, True), (2, True)]
            assert live.history.worst_difference(prompt, sample) < 1e-4
            by_weights_alone = replace(sample, spans=tuple(replace(s, kv_kept=False) for s in sample.spans))
            assert live.history.worst_difference(prompt, by_weights_alone) > 1e-3, "the label says nothing"


async def test_new_requests_reuse_kv_of_their_weights_and_none_of_older_ones(live):
    """Neither what was cached before the update, nor what an older request computes after it."""
    await live.engine.sample(PREFIX, 1, ONE)
    with live.hold.at(20):
        older = asyncio.create_task(live.engine.sample(PREFIX, 1, LONG))
        await live.hold.reached(1)
        await kept_update(live, 63)
        before = await live.engine.prefix_hits()
        (first,) = await live.engine.sample(PREFIX, 1, ONE)
        assert await live.engine.prefix_hits() == before
        (again,) = await live.engine.sample(PREFIX, 1, ONE)
        assert await live.engine.prefix_hits() > before, "requests of one version share their prefixes"
    assert first.token_ids == again.token_ids
    assert first.logprobs == pytest.approx(again.logprobs, abs=1e-5)  # on GPUs the last bits depend on what is cached
    (whole,) = await older  # its blocks are filled by now, with new weights, over old KV
    assert whole.spans[1].kv_kept
    through = [*PREFIX, *whole.token_ids]
    samples = [await live.engine.sample(through[:end], 1, ONE) for end in (200, 300, 460)]
    assert worst(live, PREFIX, (first,)) < 1e-4
    for end, (sample,) in zip((200, 300, 460), samples, strict=True):
        assert not sample.spans[0].kv_kept
        assert live.history.worst_difference(through[:end], sample) < 1e-4


async def test_what_waits_when_the_update_comes_is_computed_under_the_new_weights_alone(live):
    await live.engine.sample(PREFIX, 1, ONE)
    with live.hold.at(20):
        running = asyncio.create_task(live.engine.sample([5, 6, 7], 2, LONG))
        await live.hold.reached(2)
        await live.engine.pause_generation(PauseMode.KEEP, clear_cache=False)
    try:
        waiting = asyncio.create_task(live.engine.sample(PREFIX, 3, LONG))
        await asked(lambda: waiting_in_core(live), lambda waiting: waiting >= 3)
        report = await kept_update(live, 64)
        assert (report.engines[0].kept, report.engines[0].preempted) == (2, 3)
        assert (await live.engine.recovered(report)).tokens_lost is None, "it is paused"
    finally:
        await live.engine.resume_generation()
    for sample in await waiting:
        assert [(span.version, span.kv_kept) for span in sample.spans] == [(report.version, False)]
    assert worst(live, PREFIX, await waiting) < 1e-4
    assert worst(live, [5, 6, 7], await running) < 1e-4
    assert all(sample.spans[-1].kv_kept for sample in await running)


@pytest.mark.parametrize("why", ["preempted", "update"])
async def test_a_request_that_is_computed_anew_says_so_from_that_token_on(live, why):
    prompt = PREFIX[:60]
    with live.hold.at(60):
        running = asyncio.create_task(live.engine.sample(prompt, 8, LONG))
        await live.hold.reached(8)
        kept = await kept_update(live, 65)
        live.hold.move(120)
        await live.hold.reached(8)
        if why == "preempted":
            await live.engine.reset_prefix_cache()  # preempts all that run
        else:
            await live.update(changed(live.history.latest, 66))
    for sample in await running:
        assert [(span.version, span.kv_kept) for span in sample.spans] == [
            (kept.version - 1, False),
            (kept.version, True),
            (live.engine.weight_version, False),
        ]
        assert live.history.worst_difference(prompt, sample) < 1e-4


async def test_salts_of_callers_still_separate_them(live):
    """On every path that generates, before such an update and after it."""
    model, http = str(live.model_path), live.engine.control.http
    text = "3 1 2 " * 20
    paths = {
        "/v1/completions": {"model": model, "prompt": PREFIX, "max_tokens": 1},
        "/v1/chat/completions": {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1},
        "/inference/v1/generate": {"token_ids": PREFIX, "sampling_params": {"max_tokens": 1}},
    }
    for path, body in paths.items():
        await kept_update(live, 68)
        for salt in ("a", "b", None):
            salted = body if salt is None else {**body, "cache_salt": salt}
            found = [await live.engine.prefix_hits()]
            for _ in range(2):
                await http.post(path, salted, timeout_s=60)
                found.append(await live.engine.prefix_hits())
            assert found[0] == found[1] < found[2], (path, salt)


async def test_the_loss_of_an_update_is_known_when_tokens_come_as_before(live):
    endless = replace(LONG, max_tokens=1000)  # far longer than the proof takes: they are ended after it
    with live.hold.at(10):
        tasks = [asyncio.create_task(live.engine.sample([5, 6, 7 + i], 4, endless)) for i in range(32)]
        await live.hold.reached(128)
    report = await kept_update(live, 69)
    assert report.tokens_lost is None
    done = await live.engine.recovered(report)
    (loss,) = (engine.loss for engine in done.engines)
    assert loss is not None
    assert done.tokens_lost == loss.tokens
    assert loss.rate > 0
    assert 0 <= loss.tokens <= loss.rate * loss.seconds + 1e-6
    assert loss.seconds >= 0.9 * report.bubble or not loss.back  # two clocks: the core's, and the step after
    assert replace(done, engines=()) == replace(report, engines=())
    await live.engine.abort_generation()
    await asyncio.gather(*tasks)
