"""Two real vLLM CPU engines behind the router: the invariants where they count."""

from __future__ import annotations

import asyncio

import pytest

from nano_models import changed
from patience import asked
from penstock import Fleet
from penstock.control_types import PauseMode
from penstock.errors import StateError
from penstock.types import SamplingParams
from sim_fleets import samples_of

pytestmark = pytest.mark.vllm

LONG = SamplingParams(max_tokens=150, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
async def fleet(nano_path, hold):
    options = {"profile": "cpu", "max_model_len": 2048, "extra_args": hold.extra_args}
    async with Fleet.launch(nano_path, engines=2, **options) as fleet:
        yield fleet


async def test_updates_in_flight_lose_nothing_and_every_token_has_its_version(fleet, history, hold):
    start, prompts = fleet.weight_version, [[5 + i, 6, 7] for i in range(24)]
    with hold.at(40):
        batch = asyncio.create_task(fleet.generate(prompt_token_ids=prompts, sampling_params=LONG))
        groups = [asyncio.create_task(fleet.sample([40, 41, 42 + i], 3, LONG, session_id=i)) for i in range(4)]
        for seed, tokens in ((1, 80), (2, 120)):
            await hold.reached(36)
            report = await history.update(fleet, seed)
            assert [engine.engine for engine in report.engines] == ["e0", "e1"]
            assert len({engine.checksum for engine in report.engines}) == 1
            assert report.failures == {}
            hold.move(tokens)
    out = await batch
    assert [len(ids) for ids in out.response_ids] == [150] * 24
    samples = [(p, s) for p, s in zip(prompts, samples_of(out), strict=True)]
    samples += [([40, 41, 42 + i], s) for i, task in enumerate(groups) for s in await task]
    for prompt, sample in samples:
        assert [span.version for span in sample.spans] == [start, start + 1, start + 2]
        assert history.worst_difference(prompt, sample) < 1e-4
    last = max(history.models)
    history.models[last + 1] = changed(history.models[0], 77)
    assert all(history.worst_difference(p, s, shift=1) > 1e-2 for p, s in samples)
    del history.models[last + 1]


@pytest.mark.parametrize("how", ["resume", "cancel", "abort"])
async def test_a_pause_that_waits_is_taken_back_by_a_resume_and_ended_by_an_abort(fleet, history, hold, how):
    with hold.at(40):
        running = asyncio.create_task(fleet.generate(prompt_token_ids=[[5, 6]] * 6, sampling_params=LONG))
        await hold.reached(6)
        pausing = asyncio.create_task(fleet.pause_generation(PauseMode.WAIT))
        for member in fleet._roster.members:
            await asked(member.control.is_paused, bool)
        assert not pausing.done()
        match how:
            case "resume":
                await fleet.resume_generation()
                with pytest.raises(StateError, match="ended while it waited"):
                    await pausing
            case "cancel":
                pausing.cancel()
            case _:
                await fleet.abort_generation()
                await asyncio.wait_for(pausing, 60.0)
                await fleet.resume_generation()
    for sample in samples_of(await running):
        assert sample.finish_reason == ("abort" if how == "abort" else "length")
        assert history.worst_difference([5, 6], sample) < 1e-4
