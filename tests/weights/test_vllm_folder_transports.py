"""A real vLLM engine takes versions from a folder, whole and as deltas."""

from __future__ import annotations

import copy

import pytest
import torch

from nano_models import changed
from penstock.types import SamplingParams
from penstock.weights.delta import DeltaStore
from penstock.weights.disk import DiskStore

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
PROMPT = [5, 6, 7]
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True, detokenize=False, seed=2)


@pytest.fixture(params=[DiskStore, DeltaStore])
def store(live, tmp_path, request):
    kept, live.engine._store = live.engine._store, request.param(tmp_path)
    yield live.engine._store
    live.engine._store.close()
    live.engine._store = kept


async def served(live) -> float:
    (sample,) = await live.engine.sample(PROMPT, 1, PARAMS)
    assert {span.version for span in sample.spans} == {live.engine.weight_version}
    return live.history.worst_difference(PROMPT, sample)


async def test_versions_are_served_as_they_were_published(live, store):
    assert store.__class__.__module__.rpartition(".")[2] in (await live.engine.control.info()).transports
    for seed in (1, 2):
        await live.update(changed(live.history.latest, seed))
        assert await served(live) < 1e-4
    for row in (3, 4):  # a whole version after a large delta, and a small one
        partly = copy.deepcopy(live.history.latest)
        with torch.no_grad():
            next(iter(partly.parameters()))[row] += 0.5
        report = await live.update(partly)
        assert await served(live) < 1e-4
    if isinstance(store, DeltaStore):
        assert 0 < int(store.current.location["delta_bytes"]) < report.bytes / 10
