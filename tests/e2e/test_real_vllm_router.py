"""A real vLLM CPU engine behind vllm-router: what goes through it is exact, and an update needs no gate."""

from __future__ import annotations

import asyncio

import pytest

from http_engine import HTTPEngine
from nano_models import changed
from penstock import Fleet
from penstock.types import SamplingParams
from sim_fleets import samples_of
from vllm_router_server import installed, vllm_router

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    installed,
]
LONG = SamplingParams(max_tokens=150, ignore_eos=True, detokenize=False)


@pytest.fixture
async def fleet(live, tmp_path):
    async with (
        vllm_router(tmp_path / "router.log") as url,
        Fleet.connect([live.process.url], kind="vllm-router", url=url, api_key=live.key) as fleet,
    ):
        yield fleet
    await live.engine.teardown()
    live.engine = await HTTPEngine.connect(
        live.process.url, name="live", api_key=live.key
    )  # its version is another one now


async def test_every_token_is_exact_and_in_flight_updates_lose_none(fleet, live):
    prompts = [[5 + i, 6, 7] for i in range(16)]
    start, model = fleet.weight_version, changed(live.history.latest, 5)
    with live.hold.at(40):
        running = asyncio.create_task(fleet.generate(prompt_token_ids=prompts, sampling_params=LONG))
        await live.hold.reached(16)
        update = asyncio.create_task(fleet.update_weights(model.named_parameters()))
        late = asyncio.create_task(fleet.sample([40, 41], 2, LONG, session_id="s"))  # no gate holds it
        report = await update
    live.history.models[report.version] = model
    out = await running
    samples = samples_of(out)
    assert [len(sample.token_ids) for sample in samples] == [150] * 16
    for sample in samples:
        assert [span.version for span in sample.spans] == [start, start + 1]
    for prompt, sample in [*zip(prompts, samples, strict=True), *(([40, 41], s) for s in await late)]:
        assert live.history.worst_difference(prompt, sample) < 1e-4
