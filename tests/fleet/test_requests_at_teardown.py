"""Requests in flight on engines of others when a fleet ends: their callers are told, and nothing is sent again."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fleet_fakes import until

from patience import WAIT_S
from penstock import Fleet
from penstock.engine.client import DataClient
from penstock.errors import StateError
from penstock.sim.config import SimConfig
from penstock.sim.server import SimServer
from sim_fleets import in_flight, router_here

LONG = {"max_tokens": 400}


@asynccontextmanager
async def found() -> AsyncIterator[tuple[Fleet, SimServer]]:
    """A fleet behind a router that runs on when it has ended."""
    async with SimServer(SimConfig(tokens_per_second=50, max_model_len=512)) as server, router_here() as router:
        yield await Fleet.connect([server.url], url=router.url), server


def complaints() -> list[dict[str, Any]]:
    """What the loop has to say from now on, such as of a session that nobody closed."""
    gc.collect()  # what an earlier test left open is not ours
    said: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
    return said


async def read(fleet: Fleet) -> None:
    async for _ in fleet.completion_stream({"prompt": [1, 2, 3], **LONG}):
        pass


REQUESTS: dict[str, Callable[[Fleet], Coroutine[Any, Any, Any]]] = {
    "generate": lambda fleet: fleet.generate(prompt_token_ids=[[1, 2], [3, 4]], sampling_params=LONG),
    "completion": lambda fleet: fleet.completion({"prompt": [1, 2, 3], **LONG}),
    "stream": read,
}


@pytest.mark.parametrize("adopted", [False, True], ids=["held", "adopted"])
@pytest.mark.parametrize("kind", REQUESTS)
async def test_what_is_in_flight_ends_with_the_fleet_and_is_not_sent_again(kind: str, *, adopted: bool) -> None:
    async with found() as (holder, server):
        said = complaints()
        fleet = await Fleet.connect(holder.url) if adopted else holder
        asking = asyncio.create_task(REQUESTS[kind](fleet))
        await in_flight(holder, lambda requests: requests > 0)
        await fleet.teardown()
        with pytest.raises(StateError, match="torn down"):
            await asyncio.wait_for(asking, WAIT_S)
        await until(lambda: not server.engine.scheduler.running)
        assert fleet.counters.deaths == 0
        await holder.teardown()
        gc.collect()
        assert said == []


@pytest.mark.parametrize("adopted", [False, True], ids=["held", "adopted"])
async def test_the_end_does_not_wait_for_tensors_that_never_come(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, adopted: bool
) -> None:
    goes_on, threads = threading.Event(), list[threading.Thread]()

    def never() -> Iterator[tuple[str, Any]]:
        threads.append(threading.current_thread())
        goes_on.wait()
        yield from ()

    monkeypatch.setattr("penstock.fleet.stores.LEAVE_S", 0.2)
    async with found() as (holder, _):
        fleet = await Fleet.connect(holder.url) if adopted else holder
        updating = asyncio.create_task(fleet.update_weights(never()))
        await until(lambda: bool(threads))
        try:
            await asyncio.wait_for(fleet.teardown(), 20.0)
            with pytest.raises(StateError, match="torn down in the middle"):
                await asyncio.wait_for(updating, 20.0)
            assert "the tensors of weight version 1 did not come within 0.2 s" in caplog.text
            assert threads[0].daemon, "the process must not wait for it either"
        finally:
            goes_on.set()
        await holder.teardown()


async def test_a_client_that_was_closed_sends_nothing_more() -> None:
    async with SimServer(SimConfig()) as server:
        client = DataClient(server.url)
        await client.sample([1], 1, {"max_tokens": 1})
        await client.close()
        with pytest.raises(StateError, match=f"the connections to {server.url} were closed for good"):
            await client.sample([1], 1, {"max_tokens": 1})
        await client.close()
