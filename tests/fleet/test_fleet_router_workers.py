"""A fleet behind a router of two processes: an update in the middle of a batch, a hang, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal

import torch

from patience import alive, eventually
from penstock import Fleet, SamplingParams
from penstock.router_settings import RouterConfig
from sim_fleets import SIM, check, check_serves, in_flight, slowed, stepped, whole

PROMPTS = [[1 + i, 2, 3] for i in range(24)]
LONG = SamplingParams(max_tokens=450, detokenize=False)


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("layer.weight", torch.full((4, 3), value)), ("layer.bias", torch.zeros(4))]


async def test_updates_under_load_behind_two_router_processes() -> None:
    async with Fleet.launch("sim-model", engines=2, router=RouterConfig(workers=2), **SIM) as fleet:
        sessions = [f"s{i}" for i in range(len(PROMPTS))]
        async with slowed(fleet):
            running = asyncio.create_task(
                fleet.generate(prompt_token_ids=PROMPTS, sampling_params=LONG, session_ids=sessions)
            )
            for i in range(2):
                await in_flight(fleet, lambda requests: requests == len(PROMPTS))
                await stepped(fleet, len(PROMPTS))
                report = await fleet.update_weights(weights(float(i)))
                assert report.failures == {}
            await stepped(fleet, len(PROMPTS))
        out = await whole(running, PROMPTS, LONG)
        versions = [[span.version for span in spans] for spans in out.response_spans]
        assert versions == [[0, 1, 2]] * len(PROMPTS), "every sample went on through every update"
        await fleet.pause_generation()
        late = asyncio.create_task(fleet.generate(prompt_token_ids=PROMPTS, sampling_params={"max_tokens": 3}))
        await asyncio.sleep(0.1)
        assert not late.done(), "the gate is closed on both"
        await fleet.resume_generation()
        check(PROMPTS, await late, SamplingParams(max_tokens=3))
        await check_serves(fleet, engines=2)
        state = await fleet.router_admin.engines()
        assert len(state.workers) == 2
        assert state.sessions >= len(PROMPTS)  # each process counts those that it had a turn of
        assert [engine.outstanding for engine in state.engines] == [0, 0]
        assert {engine.weight_version for engine in state.engines} == {2}
    assert not any(alive(pid) for pid in state.workers)


async def test_a_router_process_that_hangs_has_the_router_started_again() -> None:
    options = {**SIM, "health_interval_s": 0.1, "hang_timeout_s": 5.0, "workers": 2}
    async with Fleet.launch("sim-model", **options) as fleet:
        hung = (await fleet.router_admin.engines()).workers[0]
        os.kill(hung, signal.SIGSTOP)
        await eventually(lambda: not alive(hung))
        await fleet.generate(prompt_token_ids=PROMPTS, sampling_params={"max_tokens": 3})
        state = await fleet.router_admin.engines()
        assert (len(state.workers), hung in state.workers) == (2, False)
