"""LoRA adapters over a router and simulated engines: swaps in the middle of samples, pauses of one, tenants apart."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
import torch
from test_connect import GOOD, connected, engines

from patience import WAIT_S, eventually
from penstock import Fleet, SamplingParams
from penstock.control_types import KV
from penstock.errors import DeadlineError, EngineHTTPError, StateError, UserError
from penstock.fleet.member import State
from penstock.fleet.service import socket_of
from penstock.sim.config import FaultKind
from penstock.sim.server import SimServer
from penstock.types import Sample
from sim_fleets import slowed
from sim_verify import verify

CONFIG = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
PARAMS = SamplingParams(max_tokens=200, detokenize=False, ignore_eos=True)


class Tenants:
    """What decides the tokens of each version of each adapter."""

    def __init__(self, fleet: Fleet, servers: list[SimServer]) -> None:
        self.fleet = fleet
        self.contents: dict[tuple[str, int | None], str] = {}
        self._servers = servers
        self._value = 0.0

    async def update(self, name: str, kv: KV = "recompute") -> int:
        self._value += 1.0
        tensors = [(NAME, torch.full((2, 4), self._value))]
        report = await self.fleet.update_adapter(name, tensors, config=CONFIG, kv=kv)
        self.contents[name, report.version] = self._servers[-1].engine.adapters.loaded[name].content
        return report.version

    def check(self, prompt: list[int], sample: Sample, name: str | None, *versions: int) -> None:
        assert {span.adapter for span in sample.spans} == {name}
        if versions:
            assert tuple(span.adapter_version for span in sample.spans) == versions
        assert verify(prompt, sample, params=PARAMS, adapter=self.contents, seeds=range(4)) == []


async def begun(servers: list[SimServer], count: int) -> None:
    """Return when so many samples have a token each."""
    await eventually(lambda: len([s for server in servers for s in server.engine.scheduler if s.output]) >= count)


async def test_a_simulated_engine_has_room_for_an_adapter_of_each_step() -> None:
    async with engines(1) as servers, connected(servers) as fleet:
        tenants = Tenants(fleet, servers)
        for step in range(20):
            await tenants.update(f"step-{step}")
        assert len(await fleet.adapters()) == 20


@pytest.mark.parametrize("kv", ["recompute", "keep_in_flight"])
async def test_a_sample_spans_a_swap_and_names_both_versions(kv: KV) -> None:
    async with engines(2) as servers, connected(servers) as fleet:
        tenants = Tenants(fleet, servers)
        assert await tenants.update("x") == 1
        async with slowed(fleet):
            group = asyncio.create_task(fleet.sample([1, 2], 3, PARAMS, adapter="x"))
            base = asyncio.create_task(fleet.sample([1, 2], 1, PARAMS))
            prompts = [[3, 4], [5]]
            batch = asyncio.create_task(fleet.generate(prompt_token_ids=prompts, sampling_params=PARAMS, adapter="x"))
            await begun(servers, 6)
            assert await tenants.update("x", kv) == 2
        for sample in await group:
            tenants.check([1, 2], sample, "x", 1, 2)
            assert [span.kv_kept for span in sample.spans] == [False, kv == "keep_in_flight"]
        (plain,) = await base
        tenants.check([1, 2], plain, None)
        assert all([s.adapter_version for s in spans] == [1, 2] for spans in (await batch).response_spans)
        (fresh,) = await fleet.sample([1, 2], 1, PARAMS, adapter="x")
        tenants.check([1, 2], fresh, "x", 2)
        with pytest.raises(EngineHTTPError, match="does not exist"):
            await fleet.sample([1], 1, PARAMS, adapter="unknown")
        with pytest.raises(UserError, match="kv must be one of recompute, keep, keep_in_flight, got 'lose'"):
            await tenants.update("x", "lose")  # type: ignore[arg-type]


async def test_a_new_owner_goes_on_counting_an_adapters_versions() -> None:
    """Otherwise one label stood for two sets of weights."""
    async with engines(1) as servers:
        for version in (1, 2):
            async with connected(servers) as fleet:
                assert await Tenants(fleet, servers).update("x") == version


async def test_requests_in_flight_survive_the_death_of_their_engine_while_their_adapter_is_paused() -> None:
    async with engines(2) as servers, connected(servers) as fleet:
        tenants = Tenants(fleet, servers)
        await tenants.update("x")
        async with slowed(fleet):
            tasks = [asyncio.create_task(fleet.sample([1 + i], 1, PARAMS, adapter="x")) for i in range(8)]
            await begun(servers, 8)
            await fleet.pause_generation(adapter="x")
        servers[0].engine.die(FaultKind.CORE_DEATH, "a test")
        await tenants.update("x")
        await fleet.resume_generation(adapter="x")
        for i, task in enumerate(tasks):
            (sample,) = await task  # tokens that a dead engine had not reported yet are made again, under version 2
            tenants.check([1 + i], sample, "x")
            assert sample.spans[-1].adapter_version == 2


async def test_tenants_never_get_anothers_adapter_under_churn_deaths_and_joins() -> None:
    async with engines(3) as servers, connected(servers[1:]) as fleet:
        tenants = Tenants(fleet, servers)
        names = [f"tenant-{i}" for i in range(4)]
        for name in names:
            await tenants.update(name)
        done, prompt, stop = list[str](), [5, 6, 7], asyncio.Event()
        params = SamplingParams(max_tokens=60, detokenize=False, ignore_eos=True)

        async def ask(name: str) -> None:
            while not stop.is_set():
                for sample in await fleet.sample(prompt, 2, params, adapter=name):
                    assert verify(prompt, sample, params=params, adapter=tenants.contents, seeds=range(2)) == []
                    assert {span.adapter for span in sample.spans} == {name}
                    done.append(name)

        asking = [asyncio.create_task(ask(name)) for name in names]
        for turn in range(12):
            await tenants.update(names[turn % 4])
            if turn == 3:
                await fleet.attach(servers[0].url)
                assert servers[0].engine.adapters.loaded.keys() == set(names), "it has them before it serves"
            if turn == 6:
                servers[1].engine.die(FaultKind.CORE_DEATH, "a test")
            await asyncio.sleep(0.05)
        before = len(done)
        await eventually(lambda: len(done) >= before + 8)
        stop.set()
        await asyncio.gather(*asking)
        assert [status.state for status in await fleet.engines()].count(State.SERVING) == 2


async def test_another_process_updates_pauses_and_waits_by_the_owner() -> None:
    async with engines(2) as servers, connected(servers) as first:
        async with Fleet.connect(first.url) as second:
            tenants = Tenants(second, servers)
            assert await tenants.update("x") == 1
            assert (await first.adapters())["x"].version == 1
            await second.pause_generation(adapter="x")
            held = asyncio.create_task(first.sample([9], 1, PARAMS, adapter="x"))
            (plain,) = await first.sample([1, 2], 1, PARAMS)
            tenants.check([1, 2], plain, None)
            assert ((await first.adapters())["x"].paused, held.done()) == (True, False)
            with pytest.raises(StateError, match="already paused"):
                await first.pause_generation(adapter="x")
            waiting = asyncio.create_task(second.wait_until_resumed("x", timeout_s=WAIT_S))
            with pytest.raises(DeadlineError):
                await second.wait_until_resumed("x", timeout_s=0.05)
            await first.resume_generation(adapter="x")
            await waiting
            tenants.check([9], (await held)[0], "x", 1)
            with pytest.raises(UserError, match="no adapter 'y'; loaded: x"):
                await second.unload_adapter("y")
            await second.pin_adapter("x")
            assert (await second.adapters())["x"].pinned
            await second.update_weights(GOOD)
        async with engines(1) as more:
            await first.attach(more[0].url)
            assert more[0].engine.adapters.loaded["x"].content == tenants.contents["x", 1], "the writer has ended"
            (sample,) = await first.sample([4], 1, PARAMS, adapter="x")
            assert sample.spans[0].adapter_version == 1
        await first.unload_adapter("x")
        assert not servers[1].engine.adapters.loaded


async def test_the_owners_socket_has_skyrls_paths() -> None:
    async with engines(1) as servers, connected(servers) as fleet:
        tenants = Tenants(fleet, servers)
        await tenants.update("x")
        path = socket_of(fleet.url)
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as http:

            async def post(name: str, **body: Any) -> tuple[int, Any]:
                async with http.post(f"http://localhost/skyrl/v1/{name}", json=body) as answer:
                    return answer.status, await answer.json()

            async with slowed(fleet):
                task = asyncio.create_task(fleet.sample([1, 2], 2, PARAMS, adapter="x"))
                await begun(servers, 2)
                for _ in range(2):
                    assert await post("abort_lora_requests", lora_name="x") == (
                        200,
                        {"status": "ok", "aborted": [], "count": 2},
                    )
            assert await post("wait_lora_unpaused", lora_name="x", timeout_s=0.01) == (
                200,
                {"status": "ok", "paused": True},
            )
            waiting = asyncio.create_task(post("wait_lora_unpaused", lora_name="x"))
            await tenants.update("x")
            for _ in range(2):
                assert await post("resume_lora_requests", lora_name="x") == (200, {"status": "ok"})
            assert await waiting == (200, {"status": "ok", "paused": False})
            assert (await post("abort_lora_requests"))[0] == 400
            assert (await post("abort_lora_requests", lora_name="y"))[0] == 400
            assert (await post("wait_lora_unpaused", lora_name="x", timeout_s=-1))[0] == 400
        for sample in await task:
            tenants.check([1, 2], sample, "x", 1, 2)


async def test_versions_of_one_name_are_in_the_order_of_the_calls_however_long_their_tensors_take() -> None:
    writing, go_on = threading.Event(), threading.Event()

    def slow() -> Iterator[tuple[str, torch.Tensor]]:
        writing.set()
        assert go_on.wait(WAIT_S)
        yield NAME, torch.full((2, 4), 1.0)

    async with engines(1) as servers, connected(servers) as fleet:
        first = asyncio.create_task(fleet.update_adapter("x", slow(), config=CONFIG))
        assert await asyncio.to_thread(writing.wait, WAIT_S)
        second = asyncio.create_task(fleet.update_adapter("x", [(NAME, torch.full((2, 4), 2.0))], config=CONFIG))
        await asyncio.sleep(0.05)  # without an order, the second is done by now
        go_on.set()
        assert [report.version for report in await asyncio.gather(first, second)] == [1, 2]
