"""Real vLLM engines that die under load and in an update: back by themselves, with the weights of the moment."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import replace

import pytest

from http_engine import HTTPEngine
from patience import eventually
from penstock import Fleet
from penstock.http import HttpTransport
from penstock.types import SamplingParams
from sim_fleets import core_of, returned, samples_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

LONG = SamplingParams(max_tokens=200, ignore_eos=True, detokenize=False)
PROMPTS = [[5 + i, 6, 7] for i in range(12)]
KEY = "of this fleet"
START_S = 180.0
"""An engine starts in 20 s; the machine may have other things to do."""


@pytest.fixture(scope="module")
async def fleet(nano_path, hold, tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    options = {
        "max_restarts": 20,
        "restart_backoff_s": 0.1,
        "hang_timeout_s": 15.0,
        "control_timeout_s": 20.0,
        "log_dir": logs,
    }
    given = json.loads(os.environ.get("PENSTOCK_TEST_ENGINE", '{"profile": "cpu"}'))  # see tests/conftest.py
    given["extra_args"] = {**hold.extra_args, **given.get("extra_args", {})}
    given |= {"dtype": "float32", "max_model_len": 512, "api_key": KEY}
    async with Fleet.launch(nano_path, engines=2, **given, **options) as fleet:
        yield fleet


def key_of(member):
    """What the engine asks for: the fleet's own key where it has one."""
    return member.api_key or KEY


def check(history, prompts, out):
    for prompt, sample in zip(prompts, samples_of(out), strict=True):
        assert len(sample.token_ids) == LONG.max_tokens
        assert history.worst_difference(prompt, sample) < 1e-4


DEATHS = {
    "core": (0, lambda pid: os.kill(core_of(pid), signal.SIGKILL)),
    "core stopped": (0, lambda pid: os.kill(core_of(pid), signal.SIGSTOP)),
    "group in an update": (1, lambda pid: os.killpg(pid, signal.SIGKILL)),
    "stopped in an update": (0, lambda pid: os.killpg(pid, signal.SIGSTOP)),
}


@pytest.mark.parametrize("death", DEATHS)
async def test_a_death_under_load(fleet, history, hold, death):
    """No request is lost, every logprob is that of its version, and the engine is back with the weights in force."""
    victim, die = DEATHS[death]
    member = fleet._roster.members[victim]
    await history.update(fleet, 1 + len(history.models))
    before = len(member.lifecycle.history)
    with hold.at(20):
        running = asyncio.create_task(fleet.generate(prompt_token_ids=PROMPTS, sampling_params=LONG))
        await hold.reached(len(PROMPTS))
        if death.startswith("core"):
            die(member.process.pid)
        else:
            await dies_in_an_update(fleet, history, member, die)
    check(history, PROMPTS, await asyncio.wait_for(running, START_S))
    await returned(fleet, member, before)
    await serves_the_weights_in_force(fleet, history, member)


async def test_a_core_that_dies_is_noticed_by_its_connection_though_its_server_answers(fleet, history):
    member = fleet._roster.members[0]
    await member.control.state()
    before = len(member.lifecycle.history)
    began = asyncio.get_running_loop().time()
    os.kill(core_of(member.process.pid), signal.SIGKILL)
    assert await fleet._roster.until(lambda: len(member.lifecycle.history) > before, deadline_s=60.0)
    print(f"noticed after {asyncio.get_running_loop().time() - began:.3f} s")
    assert "POST /penstock/core: nothing answers" in member.lifecycle.history[before].reason
    await returned(fleet, member, before)
    await serves_the_weights_in_force(fleet, history, member)


async def test_an_engine_that_another_process_gives_weights_starts_again(fleet, history):
    member = fleet._roster.members[1]
    http = HttpTransport(member.url, api_key=key_of(member))
    before = len(member.lifecycle.history)
    await eventually(lambda: member.foreign is not None)  # a probe counts what others do from then on
    zero = ("/weight_checker", {"action": "reset"}) if "0.26" not in member.info.vllm else (
        "/collective_rpc", {"method": "reload_weights"})  # fmt: skip
    await http.post(*zero, timeout_s=60.0)
    await http.close()
    await returned(fleet, member, before)
    assert "another process" in member.lifecycle.history[before].reason
    await serves_the_weights_in_force(fleet, history, member)


async def dies_in_an_update(fleet, history, member, die):
    """Between the order to load and its answer: its processes stand still when the order comes."""
    apply = member.control.apply_weights

    async def dying(version, *, kv="recompute"):
        os.killpg(member.process.pid, signal.SIGSTOP)
        order = asyncio.create_task(apply(version, kv=kv))
        await asyncio.sleep(0.1)  # it is sent
        die(member.process.pid)
        return await order

    member.control.apply_weights = dying
    try:
        report = await asyncio.wait_for(history.update(fleet, 1 + len(history.models)), START_S)
    finally:
        member.control.apply_weights = apply
    others = [other.name for other in fleet._roster.members if other is not member]
    assert [engine.engine for engine in report.engines] == others
    assert list(report.failures) == [member.name]


async def serves_the_weights_in_force(fleet, history, member):
    """Its label, its checksum against its peer's, and the logprobs of what it makes itself."""
    assert len(set(await fleet.collective_rpc("penstock_checksum"))) == 1
    async with HTTPEngine.connected(member.url, api_key=key_of(member)) as engine:
        assert engine.weight_version == fleet.weight_version
        (sample,) = await engine.sample([9, 8, 7], 1, replace(LONG, max_tokens=50))
    assert set(sample.versions()) == {fleet.weight_version}
    assert history.worst_difference([9, 8, 7], sample) < 1e-4
