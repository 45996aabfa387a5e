"""Fleets over engines that someone else started, with faults set on them from the inside."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from patience import HANG_S, WAIT_S, asked
from penstock import Fleet, SamplingParams
from penstock.control_types import TensorSpec
from penstock.engine.command import server_command
from penstock.engine.launch import EngineProcess
from penstock.errors import ConfigError, DeadlineError, EngineDeadError, StateError, UserError
from penstock.fleet.member import State
from penstock.router.membership import EngineEntry, Membership
from penstock.router.state import RouterAdmin
from penstock.settings import EngineConfig
from penstock.sim.config import Fault, FaultKind, Phase, SimConfig
from penstock.sim.server import SimServer
from sim_fleets import begun, check_serves, impatient, in_flight, router_here, slowed, whole

SPECS = (TensorSpec("a", "float32", (2, 3)), TensorSpec("b", "float32", (4,)))
GOOD = [("a", torch.ones(2, 3)), ("b", torch.zeros(4))]
PROMPTS = [[1 + i, 2] for i in range(12)]
PARAMS = SamplingParams(max_tokens=100, detokenize=False)


@asynccontextmanager
async def engines(count: int = 3, *, api_key: str | None = None) -> AsyncIterator[list[SimServer]]:
    async with AsyncExitStack() as stack:
        config = SimConfig(tensor_specs=SPECS, tokens_per_second=500, max_model_len=512, api_key=api_key)
        yield [await stack.enter_async_context(SimServer(config)) for _ in range(count)]


@asynccontextmanager
async def connected(servers: list[SimServer]) -> AsyncIterator[Fleet]:
    """A fleet over them by way of a router in this process, which starts in no time."""
    urls = [server.url for server in servers]
    options = {"health_interval_s": 0.1, "restart_backoff_s": 3600.0}  # what is dead does not come back
    async with (
        router_here() as router,
        Fleet.connect(urls, url=router.url, control_timeout_s=WAIT_S, **options) as fleet,
    ):
        yield fleet


async def states(fleet: Fleet) -> list[State]:
    return [status.state for status in await fleet.engines()]


async def test_engines_of_others_run_on_and_the_next_owner_reads_their_version() -> None:
    async with engines(2, api_key="secret") as servers:
        urls = [server.url for server in servers]
        async with Fleet.connect(urls, api_key="secret") as fleet:
            await check_serves(fleet, engines=2)
            await fleet.update_weights(GOOD)
            await check_serves(fleet, engines=2)
        with pytest.raises(EngineDeadError, match=f"owns a fleet at {fleet.url}. Give the addresses of its engines"):
            await Fleet.connect(fleet.url, api_key="secret")
        async with Fleet.connect(urls, api_key="secret") as again:
            assert (again.weight_version, again.endpoint is None) == (1, False)
            assert (await again.update_weights(GOOD)).version == 2
            await check_serves(again, engines=2)


async def test_a_second_hand_on_another_machine_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    async with engines(2) as servers, connected(servers) as first:
        await first.update_weights(GOOD)
        assert [r.getMessage() for r in caplog.records if r.name.startswith("penstock")] == []
        admin = RouterAdmin(first.url)
        await admin.announce(Membership(99, (EngineEntry("e1", servers[1].url),)))
        await admin.close()
        await first.update_weights(GOOD)
        assert "another process has sent this fleet's router its engines" in caplog.text
        await check_serves(first, engines=2)


async def test_engines_that_do_not_agree_are_not_made_a_fleet() -> None:
    async with engines(2) as servers:
        async with connected(servers[:1]) as one:
            await one.update_weights(GOOD)
        with pytest.raises(StateError, match=r"do not agree on weight version \(e0: 1, e1: 0\)"):
            await Fleet.connect([server.url for server in servers])


async def test_connect_refuses_addresses_and_options_that_make_no_fleet() -> None:
    async with engines(1) as (server,):
        with pytest.raises(EngineDeadError, match="no process of yours on this machine owns a fleet at"):
            await Fleet.connect(server.url)
    for url in ("http://127.0.0.1:99999", "localhost:8000"):
        with pytest.raises(UserError, match=r"is not an address; give one such as http://127\.0\.0\.1:8000"):
            await Fleet.connect(url)
    with pytest.raises(EngineDeadError):
        await Fleet.connect([server.url])
    with pytest.raises(UserError, match="there are 0 engines"):
        await Fleet.connect([])
    with pytest.raises(ConfigError, match=r"unknown option 'min_engine'; did you mean 'min_engines'"):
        Fleet.connect(server.url, min_engine=2)
    with pytest.raises(ConfigError, match="unknown option 'port'"):
        Fleet.connect(server.url, port=1)
    with pytest.raises(ConfigError, match="no API key"):
        Fleet.connect([server.url], host="::")
    with pytest.raises(ConfigError, match=r"attach, engines would have no effect: connect .* starts none"):
        Fleet.connect([server.url], engines=2, attach=["http://127.0.0.1:9"])
    with pytest.raises(ConfigError, match="has chosen log_dir already"):
        Fleet.connect(server.url, log_dir="logs")


async def test_an_engine_whose_weights_nobody_knows_makes_no_more_tokens_though_nobody_can_end_it() -> None:
    async with engines(3) as servers, connected(servers) as fleet:
        servers[1].engine.faults.add(Fault(FaultKind.WRONG_CHECKSUM, Phase.LOAD))
        async with slowed(fleet):
            running = await begun(fleet, PROMPTS, PARAMS)
            await fleet.update_weights(GOOD)
        assert await states(fleet) == [State.SERVING, State.DEAD, State.SERVING]
        await whole(running, PROMPTS, PARAMS)
        assert servers[1].engine.paused


async def test_a_stopped_engine_that_nobody_can_end_keeps_no_request(tmp_path: Path) -> None:
    config = EngineConfig(model="sim-model", profile="sim", max_model_len=512, extra_args={"tokens-per-second": 100})
    async with AsyncExitStack() as stack:
        processes: list[EngineProcess] = []
        for i in range(2):
            processes.append(await EngineProcess.launch(server_command(config), name=f"e{i}", log_dir=tmp_path))
            stack.push_async_callback(processes[i].stop, 0.0)
        opening = Fleet.connect([p.url for p in processes], hang_timeout_s=HANG_S, health_interval_s=0.1)
        holder = await stack.enter_async_context(opening)
        fleet = await stack.enter_async_context(Fleet.connect(holder.url))
        params = replace(PARAMS, max_tokens=400)
        async with slowed(holder):
            batch = asyncio.create_task(fleet.generate(prompt_token_ids=PROMPTS, sampling_params=params))
            stream = fleet.completion_stream({"model": "sim-model", "prompt": "x", "max_tokens": 400, "n": 2})
            await anext(stream)
            await in_flight(fleet, lambda requests: requests > len(PROMPTS))
        impatient(holder._roster.members[1], 0.3)
        os.killpg(processes[1].pid, signal.SIGSTOP)
        await whole(batch, PROMPTS, params)
        async with asyncio.timeout(WAIT_S):
            ends = [c["finish_reason"] async for chunk in stream for c in chunk["choices"] if c["finish_reason"]]
        assert ends == ["length"] * 2
        # The owner tells it a little later than the router.
        await asked(lambda: states(fleet), lambda seen: seen == [State.SERVING, State.DEAD])
        assert (await fleet.engines())[1].reason.startswith("health check failed: ")
        await check_serves(fleet, engines=1)


async def test_requests_on_an_engine_of_others_go_on_elsewhere_when_it_is_removed() -> None:
    async with engines(2) as servers, connected(servers) as fleet:
        async with slowed(fleet):
            running = await begun(fleet, PROMPTS, PARAMS)
            await fleet.remove("e0", timeout_s=0.1)
        await whole(running, PROMPTS, PARAMS)


async def test_an_engine_that_hangs_is_left_out_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.fleet.engines.CONNECT_S", 3.0)
    async with engines(2) as servers:
        async with asyncio.timeout(WAIT_S):
            with socket.create_server(("127.0.0.1", 0)) as silent:
                urls = [servers[0].url, f"http://127.0.0.1:{silent.getsockname()[1]}", servers[1].url]
                with pytest.raises(DeadlineError, match=r"engine e1: .* did not say what it is within 3 s"):
                    await Fleet.connect(urls, min_engines=3)
                async with Fleet.connect(urls, min_engines=2) as fleet:
                    assert [status.name for status in await fleet.engines()] == ["e0", "e2"]
                    await check_serves(fleet, engines=2)
