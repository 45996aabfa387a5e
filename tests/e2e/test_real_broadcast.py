"""Two real vLLM CPU engines that get new weights by broadcast, in flight; then one is killed in the middle of it."""

from __future__ import annotations

import asyncio
import os
import select
import signal

import psutil
import pytest

from nano_models import changed
from penstock import Fleet
from penstock.types import SamplingParams
from sim_fleets import samples_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

LONG = SamplingParams(max_tokens=150, ignore_eos=True, detokenize=False)


class Killing:
    """A model's tensors, gathered in two passes; in the second one a process group is killed on the way."""

    def __init__(self, model, process):
        self.tensors = list(model.named_parameters())
        self.process = process
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        for index, pair in enumerate(self.tensors):
            if self.passes == 2 and index == len(self.tensors) // 2:
                family = [self.process.pid, *(p.pid for p in psutil.Process(self.process.pid).children(recursive=True))]
                ends = [os.pidfd_open(pid) for pid in family]
                os.killpg(self.process.pid, signal.SIGKILL)
                # Its connections break when all of it is gone; until then the rest of so small a model fits into them.
                for end in ends:
                    assert select.select([end], [], [], 60.0)[0]
                    os.close(end)
            yield pair


@pytest.mark.each
async def test_every_token_has_its_version_and_a_death_costs_nobody_else_an_update(nano_path, history, hold, tmp_path):
    prompts = [[5 + i, 6, 7] for i in range(16)]
    options = {"profile": "cpu", "max_model_len": 512, "max_restarts": 0, "weight_transport": "broadcast"}
    options["extra_args"] = hold.extra_args
    outs = []

    async def update(tensors, model):
        with hold.at(20):
            batch = asyncio.create_task(fleet.generate(prompt_token_ids=prompts, sampling_params=LONG))
            await hold.reached(16)
            report = await fleet.update_weights(tensors)
        history.models[report.version] = model
        outs.append(await batch)
        return report

    async with Fleet.launch(nano_path, engines=2, log_dir=tmp_path, **options) as fleet:
        for seed in (1, 2, 3):  # the group is formed once
            model = changed(history.latest, seed)
            report = await update(model.named_parameters(), model)
            assert [engine.engine for engine in report.engines] == ["e0", "e1"]
            assert len({engine.checksum for engine in report.engines}) == 1
        fleet._operations._store.of("broadcast")._bucket_bytes = 2**14
        model = changed(history.latest, 4)
        tensors = Killing(model, fleet._roster.members[1].process)
        report = await update(tensors, model)
        assert [engine.engine for engine in report.engines] == ["e0"]
        assert list(report.failures) == ["e1"]
        assert tensors.passes == 4, "checksums, a send that was cut, all of it again, and a copy of the last engine's"
        late = await fleet.generate(prompt_token_ids=prompts, sampling_params=LONG)
        assert {span.version for spans in late.response_spans for span in spans} == {4}
    for version, out in enumerate([*outs, late]):
        for prompt, sample in zip(prompts, samples_of(out), strict=True):
            assert len(sample.token_ids) == 150
            crossed = [[version, version + 1]]
            if version == 3:  # of those on the engine that died, no token may have been told
                crossed.append([4])
            assert [span.version for span in sample.spans] in ([[4]] if out is late else crossed)
            assert history.worst_difference(prompt, sample) < 1e-4
