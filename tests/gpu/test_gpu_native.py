"""Plain `vllm serve` with vLLM's own NCCL transfer in a fleet: nothing of ours in its processes, and updates reach it.

Run it with `TRITON_F32_DEFAULT=ieee`, as `test_gpu_layouts.py`.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nano_models import History, changed, save_dense
from penstock import Fleet, SamplingParams
from penstock.engine.launch import reserved_port
from penstock.errors import MissingCapabilityError
from penstock.types import Sample
from plain_server import plain_server

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: a trainer's and an engine's"),
    pytest.mark.timeout(300),
]
PARAMS = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, detokenize=False)
PROMPTS = [[5 + i, 6, 7] for i in range(12)]


def plain_vllm(model: Path, log: Path, gpu: int) -> AbstractAsyncContextManager[str]:
    """The address of vLLM without any plugin, on the GPU of that place among ours."""
    ours = os.environ.get("CUDA_VISIBLE_DEVICES")
    env = {
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": "",
        "CUDA_VISIBLE_DEVICES": ours.split(",")[gpu] if ours else str(gpu),
    }  # fmt: skip
    options = {
        "model": model, "max-model-len": 512, "dtype": "float32", "kv-cache-memory-bytes": 64 << 20,
        "gpu-memory-utilization": 0.05, "attention-backend": "TRITON_ATTN", "logprobs-mode": "processed_logprobs",
        "weight-transfer-config": '{"backend": "nccl"}',
    }  # fmt: skip
    return plain_server(options, ["--enforce-eager"], env, log)


class Trainer:
    """VLLM's own trainer's side, as its documentation has it."""

    def __init__(self, engines: int) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        self._engine = NCCLWeightTransferEngine
        with reserved_port() as port:
            self.at = {"master_address": "127.0.0.1", "master_port": port, "world_size": 1 + engines}
        self._group: Any = None

    def join(self) -> None:
        self._group = self._engine.trainer_init(self.at)

    def send(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        self._engine.trainer_send_weights(iter(tensors), {"group": self._group, "packed": True})
        torch.cuda.synchronize()


async def test_plain_servers_take_weights_by_vllms_own_nccl(tmp_path: Path) -> None:
    path = save_dense(tmp_path / "dense", tied=False)
    history = History({0: AutoModelForCausalLM.from_pretrained(path, dtype="float32")})
    engines = min(2, torch.cuda.device_count() - 1)
    async with AsyncExitStack() as owned:
        starting = [owned.enter_async_context(plain_vllm(path, tmp_path / "e0.log", 1))]
        if engines > 1:
            starting.append(owned.enter_async_context(plain_vllm(path, tmp_path / "e1.log", 2)))
        urls = [await each for each in starting]
        fleet = await owned.enter_async_context(Fleet.connect(urls, control_timeout_s=60.0))
        with pytest.raises(MissingCapabilityError, match="lacks Penstock's plugin"):
            await fleet.update_weights(history.latest.named_parameters())
        trainer = Trainer(engines)
        async with asyncio.timeout(90), asyncio.TaskGroup() as joining:
            joining.create_task(fleet.init_weight_update_communicator({**trainer.at, "rank_offset": 1}))
            joining.create_task(asyncio.to_thread(trainer.join))
        for version in (1, 2):
            model = changed(history.latest, version)
            tensors = [(name, tensor.detach().cuda()) for name, tensor in model.named_parameters()]
            info = {
                "names": [name for name, _ in tensors],
                "dtype_names": ["float32"] * len(tensors),
                "shapes": [list(tensor.shape) for _, tensor in tensors],
                "packed": True,
            }
            await fleet.pause_generation()
            async with asyncio.timeout(90), asyncio.TaskGroup() as updating:
                updating.create_task(fleet.update_named_weights(info, version=version))
                updating.create_task(asyncio.to_thread(trainer.send, tensors))
            await fleet.resume_generation()
            history.models[version] = model
            out = await fleet.generate(prompt_token_ids=PROMPTS, sampling_params=PARAMS)
            for prompt, *answer in zip(
                PROMPTS, out.response_ids, out.response_logprobs or (), out.response_spans, strict=True
            ):
                ids, logprobs, spans = answer
                sample = Sample(ids, "length", logprobs, spans)
                assert sample.versions() == (version,) * PARAMS.max_tokens
                assert history.worst_difference(prompt, sample) < 1e-4
        assert [status.weight_version for status in await fleet.engines()] == [2] * engines
