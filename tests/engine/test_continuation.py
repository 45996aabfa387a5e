"""Every kind of request, through every kind of pause, at many moments: the answer is that of an undisturbed one.

The simulated engine's next token depends on every token before it, its position, the weights and the seed, so a token
lost, doubled or moved shows in all that follow. `test_vllm_engine.py` has a few of these on vLLM itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import pytest
from streams import joined, whole

from http_engine import HTTPEngine
from patience import WAIT_S
from penstock.control_types import PauseMode
from penstock.errors import EngineDeadError, EngineError, EngineHTTPError, RequestError
from penstock.sim.config import Fault, FaultKind, Phase, SimConfig
from penstock.sim.server import SimServer
from penstock.types import SamplingParams

STEPS_PER_S = 4000
TOKENS = 60
PARAMS = SamplingParams(max_tokens=TOKENS, seed=5)
BODY = {"model": "sim-model", "max_tokens": TOKENS, "seed": 5, "logprobs": 1, "return_token_ids": True}
MESSAGES = [{"role": "user", "content": "say something"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
FORMS = {"string": "abc", "strings": ["abc", "d"], "ids": [5, 6, 7], "lists of ids": [[5, 6, 7], [8]]}


@asynccontextmanager
async def engine(chunk: int = 8, **config) -> AsyncIterator[tuple[SimServer, HTTPEngine]]:
    async with (
        SimServer(SimConfig(tokens_per_second=STEPS_PER_S, ignore_grammars=True, **config)) as server,
        HTTPEngine.connected(server.url, request_timeout_s=WAIT_S, stream_chunk_tokens=chunk) as one,
    ):
        yield server, one


def generation(prompts, n=1):
    async def ask(one):
        params = SamplingParams(**{**asdict(PARAMS), "n": n})
        return asdict(await one.generate(prompt_token_ids=prompts, sampling_params=params))

    return ask


async def sampling(one):
    return [asdict(sample) for sample in await one.sample([5, 6], 3, PARAMS)]


def completing(form, n, *, stream):
    body = {**BODY, "prompt": FORMS[form], "n": n, "stream_options": {"include_usage": True} if stream else None}

    async def ask(one):
        return await joined(one.completion_stream(body)) if stream else whole(await one.completion(body))

    return ask


def chatting(*, stream, **more):
    body = {**BODY, "messages": MESSAGES, "n": 2, "logprobs": True, **more}

    async def ask(one):
        return await joined(one.chat_completion_stream(body)) if stream else whole(await one.chat_completion(body))

    return ask


KINDS = {
    "generate one": generation([[5, 6]]),
    "generate batch": generation([[5, 6], [7], [8, 9]], n=2),
    "sample": sampling,
    **{
        f"completion {form} n={n}{' stream' * stream}": completing(form, n, stream=stream)
        for form in FORMS
        for n in (1, 3)
        for stream in (False, True)
        if not (stream and form in {"strings", "lists of ids"})  # a stream is of one prompt
    },
    "chat": chatting(stream=False),
    "chat stream": chatting(stream=True),
    "chat tools": chatting(stream=False, tools=TOOLS),
    "chat tools stream": chatting(stream=True, tools=TOOLS),
    "chat stop": chatting(stream=False, stop=["\u4e00"]),
}


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[tuple[SimServer, HTTPEngine]]:
    async with engine() as both:
        yield both


_answers: dict[tuple[str, int], Any] = {}


async def answer_of(one: HTTPEngine, kind: str) -> Any:
    """What an undisturbed request of that kind is answered under the present weights: always the same."""
    key = (kind, one.weight_version)
    if key not in _answers:
        _answers[key] = await KINDS[kind](one)
    return _answers[key]


async def made(server: SimServer, tokens: int, request: asyncio.Task | None = None) -> None:
    """Return when the engine has made so many tokens more, or `request` is done."""
    until = server.engine.stats.generation_tokens + tokens
    async with asyncio.timeout(WAIT_S):
        while server.engine.stats.generation_tokens < until and not (request and request.done()):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0)


async def pause(one: HTTPEngine, how: str) -> None:
    """Pause; `release`: what is in flight ends, so that its client sends it again."""
    if how == "release":
        await one.control.verbs.release()
    else:
        await one.pause_generation(PauseMode(how))


async def cut(one: HTTPEngine) -> None:
    """Let every request in flight be sent again with what it has."""
    await one.control.verbs.release()
    await one.resume_generation()


@pytest.mark.parametrize("how", [*PauseMode, "release"])
@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_of_request_survives_every_kind_of_pause(shared, kind, how):
    server, one = shared
    ask = KINDS[kind]
    undisturbed = await answer_of(one, kind)
    for moments in ((0,), (7, 1), (13, 20, 0)):
        before = one.counters.continued
        request = asyncio.create_task(ask(one))
        for moment in moments:
            await (made(server, moment, request) if moment else asyncio.sleep(0))
            await pause(one, how)
            if how != PauseMode.WAIT:
                assert not request.done(), "a request ended although generation is paused"
            await one.resume_generation()
        assert await request == undisturbed, f"paused after {moments}"
        if how != "release":
            assert one.counters.continued == before, "nothing is sent again"
    assert one.counters.wasted_tokens == 0


@pytest.mark.parametrize("how", ["abort", "release"])
async def test_a_request_that_was_cut_waits_for_the_resume_and_asks_nobody_meanwhile(shared, how):
    server, one = shared
    request = asyncio.create_task(one.sample([5, 6], 2, PARAMS))
    await made(server, 20)
    await pause(one, how)
    await asyncio.sleep(0.1)
    assert await one.get_num_unfinished_requests() == 2
    continued = one.counters.continued
    await asyncio.sleep(0.1)
    assert (one.counters.continued, request.done()) == (continued, False)
    await one.resume_generation()
    assert [len(sample.token_ids) for sample in await request] == [TOKENS] * 2


@pytest.mark.parametrize("how", ["keep", "abort", "release"])
async def test_an_abort_asked_for_while_a_cut_request_waits_ends_it_with_what_it_had(shared, how):
    server, one = shared
    request = asyncio.create_task(one.sample([5, 6], 1, PARAMS))
    await made(server, 20)
    await pause(one, how)
    await asyncio.sleep(0.05)
    await one.abort_generation()
    (sample,) = await request
    assert sample.finish_reason == "abort"
    assert 15 < len(sample.token_ids) < TOKENS
    await one.resume_generation()


@pytest.mark.parametrize(
    "kind", ["sample", "completion ids n=3", "completion string n=3 stream", "chat", "chat stream"]
)
@pytest.mark.parametrize("after", [0, 1, 9, 50])
@pytest.mark.parametrize("fault", [FaultKind.CUT, FaultKind.ERROR_EVENT])
async def test_a_broken_answer_goes_on_from_what_had_arrived(shared, kind, after, fault):
    """`[DONE]` behind an error event is no end, nor is a connection that breaks."""
    server, one = shared
    undisturbed = await answer_of(one, kind)
    deaths, tokens = one.counters.deaths, server.engine.stats.generation_tokens
    server.engine.faults.add(Fault(fault, Phase.REQUEST, after_tokens=after))
    assert await KINDS[kind](one) == undisturbed
    assert one.counters.deaths == deaths + 1
    server.engine.faults.clear()
    samples = 6 if "strings" in kind else 2 if "chat" in kind else 3
    again = server.engine.stats.generation_tokens - tokens - samples * TOKENS
    assert again <= samples * (8 + 2), "at most the last chunk of each sample is made twice"


async def test_a_request_that_ends_every_engine_is_given_up(shared, monkeypatch):
    monkeypatch.setattr("penstock.engine.client.RETRY_S", (0.0, 0.01, 0.02, 0.03))
    server, one = shared
    server.engine.faults.add(Fault(FaultKind.CUT, Phase.REQUEST, after_tokens=3, times=100))
    with pytest.raises(EngineDeadError, match="given up: 5 times an engine died under this request"):
        await one.sample([5], 1, PARAMS)
    server.engine.faults.clear()
    server.engine.faults.add(Fault(FaultKind.REFUSE, Phase.REQUEST, times=100))
    with pytest.raises(EngineHTTPError, match="a fault refuses") as caught:
        await one.sample([5], 1, PARAMS)
    assert caught.value.status == 500
    server.engine.faults.clear()
    assert await one.sample([5], 1, PARAMS)


async def test_nobody_there_is_said_at_once():
    async with engine() as (server, one):
        await server.stop()
        before = asyncio.get_running_loop().time()
        with pytest.raises(EngineDeadError):
            await one.sample([5], 1, PARAMS)
        assert asyncio.get_running_loop().time() - before < WAIT_S / 2


@pytest.mark.parametrize("chunk", [0, 1, 1000])
async def test_the_chunk_size_changes_nothing_but_what_a_death_costs(chunk):
    async with engine(chunk) as (server, one):
        undisturbed = await one.sample([5, 6], 3, PARAMS)
        request = asyncio.create_task(one.sample([5, 6], 3, PARAMS))
        await made(server, 60)
        await cut(one)
        assert await request == undisturbed
        assert one.counters.requeued_tokens >= 50, "a cut costs nothing, whatever the chunk"
        server.engine.faults.add(Fault(FaultKind.CUT, Phase.REQUEST, after_tokens=90))
        before = server.engine.stats.generation_tokens
        assert await one.sample([5, 6], 3, PARAMS) == undisturbed
        twice = server.engine.stats.generation_tokens - before - 3 * TOKENS
        assert twice >= 80 if chunk != 1 else twice <= 10


async def test_what_cannot_be_taken_up_is_made_again_and_counted(shared):
    server, one = shared
    body = {**BODY, "messages": MESSAGES, "logprobs": True, "response_format": {"type": "json_object"}}
    undisturbed = whole(await one.chat_completion(body))
    wasted = one.counters.wasted_tokens
    request = asyncio.create_task(one.chat_completion(body))
    await made(server, 20)
    await cut(one)
    assert whole(await request) == undisturbed
    assert one.counters.wasted_tokens - wasted >= 20
    stream = asyncio.create_task(joined(one.chat_completion_stream(body)))
    await made(server, 20)
    await cut(one)
    with pytest.raises(EngineError, match="cannot be resumed in the middle"):
        await stream
    one.counters.wasted_tokens = wasted


async def test_a_stream_asked_for_as_one_answer_says_where_it_is():
    async with engine() as (_, one):
        with pytest.raises(RequestError, match="iterate over completion_stream"):
            await one.completion({**BODY, "prompt": "a", "stream": True})
        with pytest.raises(RequestError, match="iterate over chat_completion_stream"):
            await one.chat_completion({**BODY, "messages": MESSAGES, "stream": True})
        with pytest.raises(RequestError, match="a stream is of one prompt, got 2; iterate over one stream for each"):
            await anext(one.completion_stream({**BODY, "prompt": ["a", "b"]}))
