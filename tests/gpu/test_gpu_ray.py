"""Engines that Ray places on GPUs: one on each, or one that spans several, updated while they generate.

Run it with `TRITON_F32_DEFAULT=ieee`, as `test_gpu_layouts.py`.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nano_models import History, save_dense
from penstock import Fleet, SamplingParams
from sim_fleets import samples_of

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(300),
]
MIB = 2**20
ENGINE_MIB = 350
"""An engine takes as much of a GPU at least: its KV cache, and what CUDA itself takes."""
PARAMS = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True, detokenize=False)


@pytest.mark.parametrize("ranks", [1, 2])
async def test_every_gpu_has_an_engine_or_a_part_of_one(ranks: int, tmp_path: Path) -> None:
    path = save_dense(tmp_path / "dense")
    history = History.of(path)
    before = free()
    async with Fleet.launch(
        path, len(before) // ranks, launcher="ray", profile="gpu", dtype="float32", max_model_len=512,
        tensor_parallel_size=ranks, enforce_eager=True, gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=256 * MIB, weight_transport="shared_memory", log_dir=tmp_path / "logs",
        extra_args={"attention-backend": "TRITON_ATTN"},
    ) as fleet:  # fmt: skip
        assert all(had - has > ENGINE_MIB for had, has in zip(before, free(), strict=True)), (before, free())
        prompts = [[5, 6, 7 + i] for i in range(8 * len(before))]
        running = asyncio.create_task(fleet.generate(prompt_token_ids=prompts, sampling_params=PARAMS))
        await asyncio.sleep(1.0)
        report = await history.update(fleet, 1)
        assert report.failures == {}
        assert [len(update.checksum.split("-")) for update in report.engines] == [ranks] * (len(before) // ranks)
        out = await running
        assert any(len(spans) > 1 for spans in out.response_spans), "the update missed every request"
        for prompt, sample in zip(prompts, samples_of(out), strict=True):
            assert history.worst_difference(prompt, sample) < 1e-4
        short = await fleet.sample([9, 8], 1, replace(PARAMS, max_tokens=20))
        assert {version for sample in short for version in sample.versions()} == {1}
    deadline = time.monotonic() + 20
    while any(had - has > 64 for had, has in zip(before, free(), strict=True)):
        assert time.monotonic() < deadline, f"free MiB of each GPU before and after: {before}, {free()}"
        await asyncio.sleep(0.5)  # a driver frees memory a moment after its process has ended


def free() -> list[int]:
    """MiB free of each GPU."""
    return [torch.cuda.mem_get_info(gpu)[0] // MIB for gpu in range(torch.cuda.device_count())]
