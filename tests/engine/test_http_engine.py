"""One engine over HTTP, against the simulated one: what it believes of the engine stays true whatever fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from penstock.engine.http import HTTPEngine
from penstock.errors import DeadlineError, StateError
from penstock.sim.config import SimConfig
from penstock.sim.server import SimServer
from penstock.types import PauseMode, SamplingParams

TOKENS = SamplingParams(max_tokens=150, detokenize=False)
SHORT = SamplingParams(max_tokens=2, detokenize=False)
WEIGHTS = [("w", torch.ones(4))]


@asynccontextmanager
async def engine(*, request_timeout_s: float = 10.0, load_seconds: float = 0.0) -> AsyncIterator[HTTPEngine]:
    """One whose requests of `TOKENS` take 0.6 s."""
    config = SimConfig(tokens_per_second=250, load_seconds=load_seconds)
    async with SimServer(config) as server:
        one = await HTTPEngine.connect(server.url, control_timeout_s=0.3, request_timeout_s=request_timeout_s)
        try:
            yield one
        finally:
            await one.teardown()


async def running(one: HTTPEngine) -> None:
    async with asyncio.timeout(5):
        while not await one.get_num_unfinished_requests():  # noqa: ASYNC110 - an engine sends no event
            await asyncio.sleep(0.005)


async def test_pause_wait_may_take_as_long_as_a_request() -> None:
    async with engine() as one:
        request = asyncio.create_task(one.sample([1], 1, TOKENS))
        await running(one)
        await one.pause_generation(PauseMode.WAIT)
        assert len((await request)[0].token_ids) == TOKENS.max_tokens
        await one.resume_generation()


async def test_a_pause_that_was_given_up_can_be_resumed() -> None:
    async with engine(request_timeout_s=0.2) as one, engine() as other:
        other.data.http.url = one.control.url
        request = asyncio.create_task(other.sample([1], 1, TOKENS))
        await running(one)
        with pytest.raises(DeadlineError):
            await one.pause_generation(PauseMode.WAIT)
        with pytest.raises(StateError, match="already paused"):
            await one.pause_generation()
        await one.resume_generation()
        assert len((await request)[0].token_ids) == TOKENS.max_tokens
        assert await one.sample([1], 1, SHORT)
        with pytest.raises(StateError, match="not paused"):
            await one.resume_generation()


async def test_a_pause_with_a_deadline_of_its_own_is_taken_back() -> None:
    async with engine() as one:
        request = asyncio.create_task(one.sample([1], 1, TOKENS))
        await running(one)
        with pytest.raises(DeadlineError):
            await one.pause_generation(PauseMode.WAIT, timeout_s=0.05)
        assert not await one.control.is_paused()
        assert not request.done()
        assert await one.sample([1], 1, SHORT)
        assert len((await request)[0].token_ids) == TOKENS.max_tokens


async def test_a_cancelled_update_ends_all_the_same() -> None:
    async with engine(load_seconds=0.2) as one:
        caller = asyncio.create_task(one.update_weights(WEIGHTS))
        await asyncio.sleep(0.1)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        with pytest.raises(StateError, match="another weight update"):
            await one.update_weights(WEIGHTS)
        await asyncio.sleep(0.3)
        assert one.weight_version == (await one.control.info()).weight_version == 1
        assert (await one.update_weights(WEIGHTS)).version == 2


async def test_teardown_waits_for_an_update() -> None:
    async with engine(load_seconds=0.2) as one:
        update = asyncio.create_task(one.update_weights(WEIGHTS))
        await asyncio.sleep(0.05)
        await one.teardown()
        assert (await update).version == 1
