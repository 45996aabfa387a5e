"""Pauses with abort, sleeps and wake-ups of one real vLLM CPU engine, and clients that know nothing of us.

A CPU engine that sleeps frees nothing; what is asked of its scheduler is the same as on a GPU.
"""

from __future__ import annotations

import asyncio
import json
import os

import aiohttp
import openai
import pytest

from nano_models import changed
from patience import asked
from penstock.control_types import PauseMode
from penstock.types import Sample, SamplingParams, VersionSpan

pytestmark = pytest.mark.vllm

TOKENS = 300
PROMPT = [5, 6, 7]
MESSAGES = [{"role": "user", "content": "hi"}]
SEEDED = {"max_tokens": TOKENS, "seed": 4}
EXTRA = {"extra_body": {"ignore_eos": True}}
exact = pytest.mark.skipif("PENSTOCK_TEST_ENGINE" in os.environ, reason="on GPUs sums depend on the batch in last bits")


@pytest.fixture
async def client(live):
    url = f"{live.engine.control.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=live.key, max_retries=0, timeout=60) as client:
        yield client


async def text_of(stream):
    """The text of a stream, and how it ended."""
    text, ends = "", []
    async for chunk in await stream:
        for choice in chunk.choices:
            delta = getattr(choice, "delta", None)
            text += (delta.content or "") if delta is not None else choice.text
            ends += [choice.finish_reason] if choice.finish_reason else []
    return text, ends


async def told(answer):
    """What an answer says, without its name and time."""
    return [choice.model_dump() for choice in (await answer).choices]


async def tokens(live, **sampling):
    """The token endpoint, by hand."""
    params = {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0, **sampling}
    url = f"{live.engine.control.url}/inference/v1/generate"
    body = {"token_ids": PROMPT, "sampling_params": params}
    key = {"Authorization": f"Bearer {live.key}"}
    async with aiohttp.ClientSession(headers=key) as session, session.post(url, json=body) as answer:
        return (await answer.json())["choices"], json.loads(answer.headers.get("X-Penstock-Weight-Versions", "null"))


def completing(live, client, **more):
    return client.completions.create(model=str(live.model_path), prompt=PROMPT, logprobs=1, **SEEDED, **EXTRA, **more)


def chatting(live, client, **more):
    return client.chat.completions.create(model=str(live.model_path), messages=MESSAGES, **SEEDED, **EXTRA, **more)


KINDS = {
    "tokens": (3, lambda live, _: tokens(live, n=3, seed=4)),
    "completion": (3, lambda live, client: told(completing(live, client, n=3))),
    "completion stream": (1, lambda live, client: text_of(completing(live, client, stream=True))),
    "chat": (2, lambda live, client: told(chatting(live, client, n=2))),
    "chat stream": (1, lambda live, client: text_of(chatting(live, client, stream=True))),
}
"""How many samples are asked for, and how."""


async def count(live):
    """Tokens that the engine has made."""
    return (await live.engine.control.verbs.stats()).generation_tokens


async def in_core(live):
    """Requests that the core knows; a paused engine's metrics stand still."""
    state = await live.engine.control.at_core("/penstock/core", {}, 60.0)
    return state["running"] + state["waiting"]


async def still(live, request):
    """No token is made in 0.2 s, in which hundreds could be, and the request has not ended.

    Those that were made before are counted first, however late.
    """
    before = -1
    async with asyncio.timeout(60):
        while before != (before := await count(live)):  # noqa: ASYNC110 - engines send no event
            await asyncio.sleep(0.2)
    return not request.done()


@exact
@pytest.mark.parametrize("how", ["/pause?mode=abort", "/sleep?level=1"])
@pytest.mark.parametrize("kind", KINDS)
async def test_it_sees_nothing_but_a_delay(live, client, kind, how):
    samples, ask = KINDS[kind]
    undisturbed = await ask(live, client)
    control = live.engine.control.http
    with live.hold.at(40):
        request = asyncio.create_task(ask(live, client))
        await live.hold.reached(samples)
        await control.post(how, timeout_s=60)
    assert await still(live, request)
    await control.post("/resume" if "pause" in how else "/wake_up", timeout_s=60)
    assert await request == undisturbed


@pytest.mark.parametrize("level", [0, 1, 2])
async def test_versions_are_exact_through_a_pause_or_a_sleep_with_an_update(live, level):
    """Level 0: a pause. After level 2 nothing is computed before the update, though the memory is back."""
    start, engine = live.engine.weight_version, live.engine
    with live.hold.at(40):
        request = asyncio.create_task(tokens(live, n=8))
        await live.hold.reached(8)
        await (engine.control.verbs.sleep(level) if level else engine.pause_generation(PauseMode.ABORT))
    if level:
        await engine.control.verbs.wake_up(["weights"])
        assert await still(live, request)
    if level == 2:
        await engine.control.verbs.wake_up(None)
        assert await still(live, request), "there are no weights"
        assert await engine.control.is_paused()
    await live.update(changed(live.history.latest, 70 + level))
    if level == 1:
        assert await still(live, request), "there is no KV"
        await engine.control.verbs.wake_up(["kv_cache"])
    if level == 0:
        await engine.resume_generation()
    choices, spans = await asyncio.wait_for(request, 60)
    assert [choice["finish_reason"] for choice in choices] == ["length"] * 8
    unseen = 0
    for choice, parts in zip(choices, spans, strict=True):
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        versions = tuple(VersionSpan(*part) for part in parts)
        assert [span.version for span in versions] == [start, start + 1]
        sample = Sample(tuple(choice["token_ids"]), "length", tuple(logprobs), versions)
        assert live.history.worst_difference(PROMPT, sample) < 1e-4
        unseen += live.history.unseen(PROMPT, sample)
    assert unseen <= 2, "of 16 spans moved by a token one goes unseen only where chance has it"


async def test_who_paused_resumes_and_no_wake_up_or_update_does(live):
    with live.hold.at(40):
        request = asyncio.create_task(tokens(live))
        await live.hold.reached(1)
        await live.engine.pause_generation(PauseMode.ABORT)
    await live.engine.control.verbs.sleep(1)
    await live.engine.control.verbs.wake_up(None)
    assert await still(live, request)
    await live.update(changed(live.history.latest, 81))
    assert await still(live, request)
    await live.engine.control.verbs.sleep(1)
    await live.engine.resume_generation()
    assert await still(live, request), "a resume while the memory is away waits for it"
    await live.engine.control.verbs.wake_up(None)
    ((choice,), _) = await asyncio.wait_for(request, 60)
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", TOKENS)


async def test_dropped_weights_that_come_natively_count(live):
    engine, model = live.engine, changed(live.history.latest, 82)
    await engine.init_weight_update_communicator({})
    manifest = engine._store.publish(engine.weight_version + 1, model.named_parameters())
    with live.hold.at(40):
        request = asyncio.create_task(tokens(live))
        await live.hold.reached(1)
        await engine.control.verbs.sleep(2)
    await engine.control.verbs.wake_up(None)
    assert await still(live, request)
    await engine.update_named_weights({"manifest": manifest.to_json()}, version=manifest.version)
    live.took(manifest, model)
    ((choice,), (spans,)) = await asyncio.wait_for(request, 60)
    assert choice["finish_reason"] == "length"
    assert [version for version, _, _ in spans] == [manifest.version - 1, manifest.version]


@pytest.mark.parametrize("ending", ["abort", "release"])
async def test_it_ends_early_where_that_was_asked_for(live, ending):
    with live.hold.at(20):
        request = asyncio.create_task(tokens(live, n=12))
        await live.hold.reached(12)
        await live.engine.pause_generation(PauseMode.ABORT)
        try:
            await getattr(live.engine.control.verbs, ending)()
            choices, _ = await asyncio.wait_for(request, 60)
        finally:
            await live.engine.resume_generation()
    for choice in choices:  # the core stands at 20; the API server may have seen fewer
        assert choice["finish_reason"] == "abort"
        assert 0 < len(choice["token_ids"]) <= 20
    assert await live.engine.sample([5], 1, SamplingParams(max_tokens=2))


async def test_a_client_that_hangs_up_during_a_sleep_leaves_nothing_behind(live):
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    with live.hold.at(20):
        request = asyncio.create_task(tokens(live))
        other = asyncio.create_task(live.engine.sample(PROMPT, 1, params))
        await live.hold.reached(2)
        await live.engine.control.verbs.sleep(1)
    request.cancel()
    await asked(lambda: in_core(live), lambda requests: requests <= 1)
    await live.engine.control.verbs.wake_up(None)
    assert len((await other)[0].token_ids) == TOKENS
    await asked(live.engine.get_num_unfinished_requests, lambda requests: requests == 0)
