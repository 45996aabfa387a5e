"""One engine without our plugin over HTTP: nothing is lost in its pauses and updates, and nothing mislabelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from http_engine import HTTPEngine
from patience import WAIT_S, asked
from penstock import Fleet
from penstock.control_types import PauseMode
from penstock.errors import EngineError, MissingCapabilityError
from penstock.sim.config import Fault, FaultKind, Phase, SimConfig
from penstock.sim.server import SimServer
from penstock.types import SamplingParams
from sim_verify import verify

LONG = SamplingParams(max_tokens=120, detokenize=False)
PROMPT = [5, 6, 7]


@asynccontextmanager
async def plain(**config: Any) -> AsyncIterator[tuple[HTTPEngine, SimServer]]:
    """One whose requests of `LONG` take 0.25 s."""
    options: dict[str, Any] = {"plain": True, "tokens_per_second": 500, "max_model_len": 512, **config}
    async with (
        SimServer(SimConfig(**options)) as server,
        HTTPEngine.connected(server.url, name="e0", control_timeout_s=WAIT_S, request_timeout_s=WAIT_S) as one,
    ):
        yield one, server


async def running(one: HTTPEngine, tokens: int = 10) -> None:
    """Some requests are, and have so many tokens together."""
    before = (await one.control.verbs.stats()).generation_tokens
    await asked(one.control.verbs.stats, lambda now: now.generation_tokens >= before + tokens)


async def updated(one: HTTPEngine, version: int) -> None:
    """A native round, on an engine that is paused."""
    await one.update_named_weights({"names": []}, version=version)


async def test_what_it_answers_is_labelled_as_any_other() -> None:
    async with plain() as (one, _):
        params = SamplingParams(max_tokens=20, n=2, seed=3)
        out = await one.generate(["ab", "cd"], params)
        assert [len(ids) for ids in out.response_ids] == [20] * 4
        assert {span.version for spans in out.response_spans for span in spans} == {0}
        assert all(out.responses)
        chat = await one.chat_completion({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5})
        assert chat["choices"][0]["weight_versions"] is None
        several = await one.completion({"prompt": "ab", "n": 2, "max_tokens": 5})
        assert [choice["weight_versions"] for choice in several["choices"]] == [None, None]


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_samples_go_on_through_updates(mode: PauseMode) -> None:
    async with plain() as (one, _):
        await one.init_weight_update_communicator({"master_address": "127.0.0.1"})
        params = SamplingParams(max_tokens=120, min_tokens=100, n=3, seed=11, detokenize=False)
        request = asyncio.create_task(one.sample(PROMPT, 3, params))
        for version in (1, 2):
            if not request.done():
                await running(one)
            await one.pause_generation(mode)
            await updated(one, version)
            await one.resume_generation()
        samples = await request
        assert [len(sample.token_ids) for sample in samples] == [120] * 3
        for i, sample in enumerate(samples):
            assert verify(PROMPT, sample, params=params, seeds=[11 + i], context=512) == []
        crossed = mode is not PauseMode.WAIT
        expected = {0, 1, 2} if crossed else {0}
        assert one.counters.wasted_tokens == 0
        assert {span.version for sample in samples for span in sample.spans} == expected
        if mode is PauseMode.ABORT:
            assert one.counters.continued >= 2
            assert one.counters.requeued_tokens > 0


async def test_stop_strings_and_text_are_made_again_rather_than_missed() -> None:
    async with plain() as (one, _):
        wanted = await one.generate(["abc"], {"max_tokens": 100, "stop": ["zzzz"], "seed": 1})
        request = asyncio.create_task(one.generate(["abc"], {"max_tokens": 100, "stop": ["zzzz"], "seed": 1}))
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100, "seed": 2}
        whole = await one.chat_completion(chat)
        talk = asyncio.create_task(one.chat_completion(chat))
        await running(one)
        await one.pause_generation(PauseMode.ABORT)
        await one.resume_generation()
        assert (await request) == wanted
        again = await talk
        assert again["choices"][0]["message"] == whole["choices"][0]["message"]
        assert again["usage"] == whole["usage"]
        assert one.counters.wasted_tokens > 0


async def test_a_stop_string_is_no_part_of_the_text() -> None:
    async with plain() as (one, _):
        whole = (await one.generate(["abc"], {"max_tokens": 30, "seed": 1})).responses[0]
        out = await one.generate(["abc"], {"max_tokens": 30, "seed": 1, "stop": [whole[10:12]]})
        assert out.stop_reasons == ["stop"]
        assert out.responses[0] == whole[: whole.index(whole[10:12])]


async def test_a_stream_that_is_cut_says_so() -> None:
    async with plain() as (one, _):
        stream = one.completion_stream({"prompt": "ab", "max_tokens": 100})
        first = await anext(stream)
        assert first["choices"][0]["text"]
        await one.pause_generation(PauseMode.KEEP)
        await one.resume_generation()
        rest = [chunk async for chunk in stream]
        assert rest[-1]["choices"][0]["weight_versions"] is None
        stream = one.completion_stream({"prompt": "ab", "max_tokens": 100})
        await anext(stream)
        await one.pause_generation(PauseMode.ABORT)
        await one.resume_generation()
        with pytest.raises(EngineError, match="a stream was cut that cannot be resumed: there are engines without"):
            async for _ in stream:
                pass


async def test_who_ends_requests_gets_what_they_have() -> None:
    async with plain() as (one, _):
        request = asyncio.create_task(one.sample(PROMPT, 2, LONG))
        stream = one.completion_stream({"prompt": "ab", "max_tokens": 100})
        await anext(stream)
        await running(one)
        await one.abort_generation()
        samples = await request
        assert [sample.finish_reason for sample in samples] == ["abort"] * 2
        assert all(0 < len(sample.token_ids) < 120 for sample in samples)
        assert [chunk async for chunk in stream][-1]["choices"][0]["finish_reason"] == "abort"
        ((whole,), _) = await asyncio.gather(one.sample(PROMPT, 1, LONG), asyncio.sleep(0))
        assert whole.finish_reason == "length"


async def test_an_answer_that_breaks_off_is_made_again() -> None:
    async with plain() as (one, server):
        server.engine.faults.add(Fault(FaultKind.CUT, Phase.REQUEST, after_tokens=40))
        (sample,) = await one.sample(PROMPT, 1, LONG)
        assert verify(PROMPT, sample, params=LONG, context=512) == []
        assert one.counters.deaths == 1


async def test_what_it_lacks_is_said_before_anything_is_sent() -> None:
    async with plain(dev_mode=False, scale_out=False) as (one, server):
        with pytest.raises(MissingCapabilityError, match=r"^generate: engine e0 lacks .*; start it"):
            await one.generate(["a"])
        assert server.engine.stats.prompt_tokens == 0
        assert (await one.completion({"prompt": "ab", "max_tokens": 3}))["usage"]["completion_tokens"] == 3


async def test_one_started_without_statistics_serves_and_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--disable-log-stats`: what is left of /metrics is of its Python process."""
    left = 'python_info{version="3.11"} 1.0\nvllm:request_success_total{engine="0"} 1.0\n'
    monkeypatch.setattr("penstock.sim.control.metrics_text", lambda _: left)
    lacks = r"engine e0 does not say how busy it is: its /metrics lacks vllm:num_requests_running, .*; start it without"
    async with plain() as (one, server):
        for ask in (one.get_num_unfinished_requests, one.get_cache_usage):
            with pytest.raises(MissingCapabilityError, match=lacks):
                await ask()
        async with Fleet.connect([server.url]) as fleet:
            assert [(engine.state, engine.stats) for engine in await fleet.engines()] == [("serving", None)]
            with pytest.raises(MissingCapabilityError, match=lacks):
                await fleet.get_num_unfinished_requests()
            assert len((await fleet.sample(PROMPT, 2, LONG))[1].token_ids) == LONG.max_tokens
