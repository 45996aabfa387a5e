"""OpenAI's own client against the simulated engine."""

from __future__ import annotations

import openai
import pytest

from penstock.sim import SimConfig, SimServer

MESSAGES = [{"role": "user", "content": "say something"}]


@pytest.fixture(scope="module")
async def client():
    async with SimServer(SimConfig(api_key="key")) as server:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="key", max_retries=0, timeout=10) as openai_client:
            yield openai_client


async def test_completion_and_its_stream_say_the_same(client):
    given = {"model": "sim-model", "prompt": ["one", "two"], "max_tokens": 9, "n": 2, "logprobs": 0}
    whole = await client.completions.create(**given)
    assert [c.index for c in whole.choices] == [0, 1, 2, 3]
    assert whole.usage.completion_tokens == 36
    texts, logprobs, usage = [""] * 4, [[], [], [], []], None
    async for chunk in await client.completions.create(**given, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            logprobs[choice.index] += choice.logprobs.token_logprobs
    assert texts == [c.text for c in whole.choices]
    assert logprobs == [c.logprobs.token_logprobs for c in whole.choices]
    assert usage == whole.usage


async def test_chat_and_its_stream_say_the_same(client):
    given = {"model": "sim-model", "messages": MESSAGES, "max_completion_tokens": 9, "n": 2, "logprobs": True}
    whole = await client.chat.completions.create(**given, top_logprobs=1)
    assert [len(c.logprobs.content) for c in whole.choices] == [9, 9]
    texts, roles = ["", ""], ["", ""]
    async for chunk in await client.chat.completions.create(**given, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role or ""
    assert texts == [c.message.content for c in whole.choices]
    assert roles == ["assistant", "assistant"]


async def test_stop_strings_are_held_back_in_streams(client):
    plain = (await client.completions.create(model="sim-model", prompt="x", max_tokens=20)).choices[0].text
    given = {"model": "sim-model", "prompt": "x", "max_tokens": 20, "stop": [plain[8:11]]}
    whole = (await client.completions.create(**given)).choices[0]
    assert (whole.text, whole.finish_reason) == (plain[:8], "stop")
    stream = await client.completions.create(**given, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == plain[:8]


async def test_models(client):
    assert [m.id async for m in await client.models.list()] == ["sim-model"]


async def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await client.completions.create(model="sim-model", prompt="x", max_tokens=5000)
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").models.list()
