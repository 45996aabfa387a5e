"""One of two engines is killed under requests of every kind: the answers are those of an undisturbed run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from patience import WAIT_S
from penstock import Fleet, SamplingParams
from sim_fleets import SIM, engine_process, in_flight, slowed, stepped

CHUNK = 16
TOKENS = 250
PARAMS = SamplingParams(max_tokens=TOKENS, n=2, seed=3, detokenize=False)
BODY: dict[str, Any] = {"model": "sim-model", "max_tokens": TOKENS, "seed": 3, "logprobs": 1}
CHAT = {**BODY, "messages": [{"role": "user", "content": "go on"}], "logprobs": True}
PROMPTS = [[1 + i, 2] for i in range(8)]


@pytest.fixture
async def two() -> AsyncIterator[Fleet]:
    options = {"stream_chunk_tokens": CHUNK, "max_restarts": 0}
    async with Fleet.launch("sim-model", engines=2, **SIM, **options) as fleet:
        yield fleet


async def kill(fleet: Fleet) -> None:
    (_, second) = await fleet.engines()
    os.kill(engine_process(second.url).pid, signal.SIGKILL)


async def texts(chunks: Any) -> list[list[Any]]:
    """Text, end and number of versioned tokens of each choice."""
    choices: dict[int, list[Any]] = {}
    async for chunk in chunks:
        for choice in chunk["choices"]:
            got = choices.setdefault(choice["index"], ["", None, 0])
            delta = choice.get("delta", choice)
            got[0] += delta.get("text") or delta.get("content") or ""
            if choice["finish_reason"]:
                got[1:] = [choice["finish_reason"], choice["weight_versions"][-1]["end"]]
    return [choices[i] for i in sorted(choices)]


def choices(answer: dict[str, Any]) -> Any:
    return [answer["choices"], answer["usage"]]


async def every_kind(fleet: Fleet) -> list[Any]:
    prompts = [f"prompt {i}" for i in range(6)]
    completion, chat = await asyncio.gather(
        fleet.completion({**BODY, "prompt": prompts, "n": 2}),
        fleet.chat_completion({**CHAT, "n": 3}),
    )
    return [choices(completion), choices(chat)]


async def every_stream(fleet: Fleet) -> list[Any]:
    return await asyncio.gather(
        *(texts(fleet.completion_stream({**BODY, "prompt": f"prompt {i}", "n": 2})) for i in range(6)),
        *(texts(fleet.chat_completion_stream({**CHAT, "n": 2, "seed": i})) for i in range(4)),
    )


@pytest.mark.parametrize("ask", [every_kind, every_stream])
async def test_openai_requests_of_every_kind_survive(two: Fleet, ask: Any) -> None:
    undisturbed = await ask(two)
    async with slowed(two, 20.0):
        running = asyncio.create_task(ask(two))
        await in_flight(two, lambda requests: requests >= 12)
        await stepped(two, 20 * (CHUNK + 1))  # so that the client has a chunk of each, and the router retries none
        await kill(two)
    assert await asyncio.wait_for(running, WAIT_S) == undisturbed
    assert two.counters.deaths > 0
    assert two.counters.wasted_tokens == 0
