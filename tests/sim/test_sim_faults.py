"""Every fault does what it says, in process and in a process of its own."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from sim_http import PROMPT, sim_client

from patience import WAIT_S, eventually
from penstock.errors import ConfigError
from penstock.sim import Fault, FaultKind, Phase, SimConfig
from penstock.sim.config import FaultPlan
from penstock.weights.manifest import TensorEntry, WeightManifest
from virtual_time import virtual

GENERATE = "/inference/v1/generate"


def stream_body(max_tokens: int) -> dict:
    return {"token_ids": PROMPT, "sampling_params": {"max_tokens": max_tokens, "logprobs": 0}, "stream": True}


async def prepare(sim, version=1):
    manifest = WeightManifest(version, "shared_memory", {}, (TensorEntry("w", "float32", (1,), 0, version),))
    return await sim.call("POST", "/penstock/weights/prepare", {"manifest": manifest.to_json()})


async def at_phase(sim, phase):
    """Status of the call that gets to a phase."""
    if phase == "prepare":
        return (await prepare(sim))[0]
    if phase == "load":
        await prepare(sim)
        return (await sim.call("POST", "/penstock/weights/apply", {"version": 1}))[0]
    if phase == "health":
        return (await sim.call("GET", "/health"))[0]
    if phase == "request":
        return (await sim.call("POST", GENERATE, {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}}))[0]
    return (await sim.call("POST", f"/{phase}"))[0]


@pytest.mark.parametrize("phase", ["prepare", "pause", "load", "resume", "request", "health"])
async def test_hang_until_cleared(phase):
    async with sim_client() as sim:
        await sim.post("/sim/fault", {"kind": "hang", "phase": phase})
        task = asyncio.create_task(at_phase(sim, phase))
        await asyncio.sleep(0.1)
        assert not task.done()
        await sim.post("/sim/fault", {"clear": True})
        assert await task == 200


@virtual
async def test_who_meets_several_faults_meets_none_of_them_after_they_were_cleared():
    plan = FaultPlan((Fault(FaultKind.HANG, Phase.REQUEST), Fault(FaultKind.REFUSE, Phase.REQUEST)))
    visit = asyncio.create_task(plan.at(Phase.REQUEST))
    await asyncio.sleep(1.0)
    assert not visit.done()
    plan.clear()
    await visit


@pytest.mark.parametrize("phase", ["load", "request", "now"])
async def test_exit_breaks_connections_and_closes_the_port(phase):
    async with sim_client() as sim:
        task = asyncio.create_task(sim.generate(4000)) if phase != "request" else None
        await asyncio.sleep(0.02)
        if phase == "now":
            with pytest.raises(aiohttp.ClientError):
                await sim.post("/sim/fault", {"kind": "exit"})
        else:
            await sim.post("/sim/fault", {"kind": "exit", "phase": phase})
            with pytest.raises(aiohttp.ClientError):
                await at_phase(sim, phase)
        if task is not None:
            with pytest.raises(aiohttp.ClientError):
                await task
        await asyncio.wait_for(sim.server.gone.wait(), WAIT_S)
        with pytest.raises(aiohttp.ClientConnectorError):
            await sim.get("/health")


async def test_core_death_looks_like_vllms():
    async with sim_client() as sim:
        plain = asyncio.create_task(sim.call("POST", GENERATE, {**stream_body(4000), "stream": False}))
        stream = asyncio.create_task(sim.events(GENERATE, stream_body(4000)))
        await eventually(lambda: len(sim.server.engine.scheduler.running) == 2)
        await sim.call("POST", "/sim/fault", {"kind": "core_death"})
        status, answer = await plain
        assert (status, answer["error"]["type"]) == (500, "InternalServerError")
        *_, event, done = await stream
        assert event["error"]["code"] == 500
        assert done == "[DONE]"
        assert (await sim.call("GET", "/health"))[0] == 503
        await asyncio.wait_for(sim.server.gone.wait(), WAIT_S)


async def test_death_after_k_tokens_is_exact():
    async with sim_client() as sim:
        await sim.post("/sim/fault", {"kind": "core_death", "phase": "tokens", "after_tokens": 25})
        events = await sim.events(GENERATE, stream_body(4000))
        assert sum(len(e["choices"][0]["token_ids"]) for e in events[:-2]) == 25
        assert "error" in events[-2]


async def test_a_failure_in_load_holds_generation_until_a_version_has_come_whole():
    async with sim_client() as sim:
        await sim.post("/sim/fault", {"kind": "refuse", "phase": "load"})
        await prepare(sim)
        assert (await sim.call("POST", "/penstock/weights/apply", {"version": 1}))[0] == 500
        assert await sim.get("/is_paused") == {"is_paused": True}
        await sim.post("/resume")
        waiting = asyncio.create_task(sim.generate(1))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await prepare(sim)
        await sim.post("/penstock/weights/apply", {"version": 1})
        (choice,) = (await waiting)["choices"]
        assert choice["weight_versions"] == [{"version": "1", "start": 0, "end": 1}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("explode", "'kind': Input should be 'exit', 'core_death'"),
        ("hang", "cannot be set at 'now'"),
        ("cut:phase=load", "cannot be set at 'load'"),
        ("hang:phase=lunch", "lunch"),
        ("exit:when=now", "unknown config key 'when'"),
        ("slow:factor=nan", "'factor': Input should be a finite number"),
    ],
)
async def test_nonsense_faults_are_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        Fault.parse(text)


def test_a_fault_is_an_option_of_a_simulated_engine():
    config = SimConfig.read(["fault=exit:phase=tokens,after_tokens=10", "fault=hang:phase=pause"], api_key=None)
    assert config.faults == (Fault(FaultKind.EXIT, Phase.TOKENS, after_tokens=10), Fault(FaultKind.HANG, Phase.PAUSE))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("tokens_per_second=nan", "'tokens_per_second': Input should be a finite number, got 'nan'"),
        ("api_key=k", "api_key is not given as key=value; use the environment variable PENSTOCK_API_KEY"),
        ("faultt=exit", "did you mean 'faults'"),
    ],
)
def test_nonsense_options_are_refused(option, words):
    with pytest.raises(ConfigError, match=words):
        SimConfig.read([option], api_key=None)
