"""vLLM's own weight transfer: a learner samples from a plain vLLM server and gives it weights over NCCL."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from penstock.config import RunConfig
from penstock.engine.launch import EngineProcess, reserved_port
from penstock.fleet.fleet import Fleet
from penstock.train.interface import AdamSpec, Datum
from penstock.train.learner import LocalLearner
from penstock.train.losses import LossSpec
from penstock.train.scenarios.checks import LOGPROB_BARS, Check, length_check
from penstock.train.scenarios.fleets import LONG, data_of, largest_gap, task_prompts
from penstock.types import Sample

UPDATES = 2
DEADLINE_S = 120.0
"""For one native call, or for engine and trainer to join."""
PLAIN: Mapping[str, Any] = {
    "middleware": None, "worker-extension-cls": None, "weight-transfer-config": '{"backend": "nccl"}',
}  # fmt: skip
"""Options of an engine without the plugin's parts, with vLLM's own backend."""


class NcclLink:
    """The trainer's end of vLLM's own NCCL transfer to one engine of one GPU, tensor by tensor."""

    def __init__(self) -> None:
        with reserved_port() as port:
            self.joins = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2, "rank_offset": 1}
        self._group: Any = None

    def join(self) -> None:
        """Meet the engine, which joins meanwhile; blocking."""
        folder = "vllm.distributed.weight_transfer"
        if find_spec(f"{folder}.nccl_common"):
            trainer_init = import_module(f"{folder}.nccl_common").trainer_init
        else:  # vLLM 0.26
            trainer_init = import_module(f"{folder}.nccl_engine").NCCLWeightTransferEngine.trainer_init
        self._group = trainer_init({name: self.joins[name] for name in ("master_address", "master_port", "world_size")})

    def send(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Send what `announced` says, while the engine receives it. Blocking."""
        for _, tensor in tensors:
            self._group.broadcast(tensor.contiguous(), src=0, stream=torch.cuda.current_stream())
        torch.cuda.synchronize()


def announced(tensors: Sequence[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """Say what follows, as vLLM's call wants it."""
    return {
        "names": [name for name, _ in tensors],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
        "shapes": [list(tensor.shape) for _, tensor in tensors],
    }


async def native_sync(config: RunConfig) -> list[Check]:
    """Train on what a plain vLLM server samples, and give it the weights by vLLM's own calls."""
    engine = config.engine.model_copy(update={"extra_args": {**config.engine.extra_args, **PLAIN}})
    logs = config.run_dir / "native-sync-logs"
    logs.mkdir(parents=True, exist_ok=True)
    server = await EngineProcess.launch(engine, name="plain", log_dir=logs, gpus=last_gpu())
    try:
        learner = await asyncio.to_thread(
            LocalLearner, config.learner_model, config.train, seed=config.seed, served_dtype=config.engine.dtype
        )
        async with Fleet.connect([server.url], control_timeout_s=DEADLINE_S) as fleet:
            rounds = await _rounds(config, fleet, learner)
            statuses = await fleet.engines(stats=False)
    finally:
        await server.stop(10.0)
    versions = [sorted({v for sample in samples for v in sample.versions()}) for samples, _ in rounds]
    gaps = [gap for _, gap in rounds]
    lengths = Counter(len(sample.token_ids) for samples, _ in rounds for sample in samples)
    return [
        Check("engines", [s.weight_version for s in statuses] == [UPDATES], f"{len(statuses)} of 1"),
        length_check(lengths, LONG.max_tokens),
        Check("versions", versions == [[v] for v in range(UPDATES + 1)], f"0-{UPDATES}"),
        Check("logprobs", max(gaps) <= LOGPROB_BARS["gpu"], ", ".join(f"{gap:.1e}" for gap in gaps)),
    ]


async def _rounds(config: RunConfig, fleet: Fleet, learner: LocalLearner) -> list[tuple[list[Sample], float]]:
    """Return the samples of each version, and their largest |learner - engine logprob|, nats."""
    link, prompts = NcclLink(), task_prompts(config)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as joining:
        joining.create_task(fleet.init_weight_update_communicator(link.joins))
        joining.create_task(asyncio.to_thread(link.join))
    found: list[tuple[list[Sample], float]] = []
    for version in range(UPDATES + 1):
        if version:
            data = data_of(prompts, found[-1][0])
            await asyncio.to_thread(_learn, learner, data, config.train.learning_rate)
            await _send(fleet, link, version, list(learner.weights(None)))
        samples = [one for made in await asyncio.gather(*(fleet.sample(p, 1, LONG) for p in prompts)) for one in made]
        found.append((samples, await asyncio.to_thread(largest_gap, learner, data_of(prompts, samples))))
    return found


def _learn(learner: LocalLearner, data: Sequence[Datum], learning_rate: float) -> None:
    """Take a step that makes every answer likelier; the weights then differ."""
    outputs = learner.forward_backward(None, LossSpec({"dapo": 1.0}), data)
    learner.optim_step(None, AdamSpec(learning_rate), scale=1 / outputs.denominators["dapo"])


async def _send(fleet: Fleet, link: NcclLink, version: int, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    await fleet.pause_generation()
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as updating:
        updating.create_task(fleet.update_named_weights(announced(tensors), version=version))
        updating.create_task(asyncio.to_thread(link.send, tensors))
    await fleet.resume_generation()


def last_gpu() -> tuple[str, ...]:
    """The last visible GPU, by its name in CUDA_VISIBLE_DEVICES; none on a machine without one."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
    return tuple(name.strip() for name in named.split(",")[-1:] if name.strip())
