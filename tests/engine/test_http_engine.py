"""One engine over HTTP, against the simulated one: what it believes of the engine stays true whatever fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from http_engine import HTTPEngine
from penstock.errors import DeadlineError, RequestError, StateError, WeightsError
from penstock.sim.config import SimConfig
from penstock.sim.faults import Fault, FaultKind, Phase
from penstock.sim.server import SimServer
from penstock.types import PauseMode, SamplingParams

TOKENS = SamplingParams(max_tokens=150, detokenize=False)
SHORT = SamplingParams(max_tokens=2, detokenize=False)
WEIGHTS = [("w", torch.ones(4))]


@asynccontextmanager
async def engine(*, control_timeout_s: float = 30.0, hang: Phase | None = None) -> AsyncIterator[HTTPEngine]:
    """One whose requests of `TOKENS` take 0.6 s; its first visit to the phase `hang` lasts until `let_go`."""
    faults = (Fault(FaultKind.HANG, hang),) if hang else ()
    async with SimServer(SimConfig(tokens_per_second=250, faults=faults)) as server:
        one = await HTTPEngine.connect(server.url, control_timeout_s=control_timeout_s, request_timeout_s=60.0)
        try:
            yield one
        finally:
            await one.teardown()


async def let_go(one: HTTPEngine) -> None:
    await one.control.http.post("/sim/fault", {"clear": True}, timeout_s=30.0)


async def loading(one: HTTPEngine) -> None:
    async with asyncio.timeout(60):
        while not await one.control.is_paused():  # noqa: ASYNC110 - an engine sends no event
            await asyncio.sleep(0.005)


async def running(one: HTTPEngine) -> None:
    async with asyncio.timeout(60):
        while not await one.get_num_unfinished_requests():  # noqa: ASYNC110 - an engine sends no event
            await asyncio.sleep(0.005)


async def test_pause_wait_may_take_as_long_as_a_request() -> None:
    async with engine(control_timeout_s=0.3) as one:
        request = asyncio.create_task(one.sample([1], 1, TOKENS))
        await running(one)
        await one.pause_generation("wait")
        assert len((await request)[0].token_ids) == TOKENS.max_tokens
        await one.resume_generation()


async def test_a_pause_that_was_given_up_can_be_resumed() -> None:
    async with engine() as one:
        request = asyncio.create_task(one.sample([1], 1, TOKENS))
        await running(one)
        one.data.request_timeout_s = 0.2
        with pytest.raises(DeadlineError):
            await one.pause_generation(PauseMode.WAIT)
        one.data.request_timeout_s = 60.0
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
    async with engine(hang=Phase.LOAD) as one:
        caller = asyncio.create_task(one.update_weights(WEIGHTS))
        await loading(one)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        with pytest.raises(StateError, match="another weight update"):
            await one.update_weights(WEIGHTS)
        await let_go(one)
        assert one._update is not None
        await asyncio.wait({one._update})
        assert one.weight_version == (await one.control.info()).weight_version == 1
        assert (await one.update_weights(WEIGHTS)).version == 2


async def test_teardown_waits_for_an_update() -> None:
    async with engine(hang=Phase.LOAD) as one:
        update = asyncio.create_task(one.update_weights(WEIGHTS))
        await loading(one)
        ending = asyncio.create_task(one.teardown())
        await let_go(one)
        await ending
        assert (await update).version == 1


async def test_bad_calls_are_refused_before_they_are_sent() -> None:
    """Those on batches and sampling parameters are in test_http_clients.py and test_fleet_generates.py."""
    async with engine() as one:
        for call, error, message in (
            (one.sample([5], 0), RequestError, "n must be at least 1, got 0"),
            (one.generate(prompt_token_ids=[[5, -1]]), RequestError, r"prompt_token_ids\[0\]\[1\] is -1, outside"),
            (one.generate(["a"], {"max_tokens": -3}), RequestError, "max_tokens must be at least 1, got -3"),
            (one.generate(["a"], session_ids=["s", "t"]), RequestError, "2 entries for 1 prompts"),
            (one.sleep(3), RequestError, "sleep level"),
            (one.get_cache_usage(1), RequestError, "index must be 0"),
            (one.update_weights(WEIGHTS, version=0), WeightsError, "not newer"),
        ):
            with pytest.raises(error, match=message):
                await call
        assert await one.get_num_unfinished_requests() == 0
