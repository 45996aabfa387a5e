"""A real vLLM CPU engine under a Ray actor: what the fleet promises of an engine holds of one that Ray has placed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hold import Hold
from nano_models import History
from penstock import Fleet, SamplingParams
from penstock.fleet.member import State

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.each, pytest.mark.timeout(400)]

PARAMS = SamplingParams(max_tokens=100, ignore_eos=True, detokenize=False)


async def test_an_update_in_flight_and_a_death(nano_path: Path, history: History, hold: Hold) -> None:
    options = {"profile": "auto", "max_model_len": 512, "dtype": "float32", "extra_args": hold.extra_args}
    async with Fleet.launch(nano_path, launcher="ray", **options) as fleet:
        with hold.at(20):
            running = asyncio.create_task(fleet.sample([5, 6, 7], 4, PARAMS))
            await hold.reached(4)
            report = await history.update(fleet, 1)
        assert (report.version, report.failures) == (1, {})
        samples = await running
        assert [[span.version for span in sample.spans] for sample in samples] == [[0, 1]] * 4
        assert all(history.worst_difference([5, 6, 7], sample) < 1e-4 for sample in samples)

        member = fleet._roster.members[0]
        assert member.process is not None
        with hold.at(20):
            running = asyncio.create_task(fleet.sample([8, 9], 2, PARAMS))
            await hold.reached(2)
            member.process.kill()
        for sample in await asyncio.wait_for(running, 200.0):
            assert len(sample.token_ids) == PARAMS.max_tokens
            assert history.worst_difference([8, 9], sample) < 1e-4
        assert (member.state, member.weight_version) == (State.SERVING, 1)
