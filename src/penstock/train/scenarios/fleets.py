"""Scenarios with a fleet alone: a kept pause, HTTP beside tokens, native transfer."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from penstock.config import RunConfig
from penstock.control_types import PauseMode
from penstock.engine.command import server_command
from penstock.engine.launch import EngineProcess, reserved_port
from penstock.fleet.fleet import Fleet
from penstock.rollout.environment import load_environment
from penstock.rollout.generator import Trajectory
from penstock.rollout.tokenizer import load_tokenizer
from penstock.train.grpo import datum_of
from penstock.train.interface import AdamSpec, Datum
from penstock.train.learner import LocalLearner
from penstock.train.losses import LossSpec
from penstock.types import Sample, SamplingParams

LOGPROB_BARS = {"cpu": 1e-4, "gpu": 2e-2}
"""Largest |learner - engine logprob| at equal weights, nats, by the engines' profile. GPUs round fp32 products."""
PROMPTS = 16
TOKENS = 96
"""Tokens of each answer: long enough that a pause mostly finds all answers under way."""
ATTEMPTS = 10
"""Attempts to pause while answers are under way. On a busy machine, an engine may finish them before."""
PAUSED_S = 1.0
LONG = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
UPDATES = 2
"""Number of native weight transfers."""
BACKEND = "nccl"
DEADLINE_S = 120.0
"""Seconds for one native call, or for engine and trainer to join."""


@dataclass(frozen=True, slots=True)
class Check:
    """One point of a checklist: whether it holds, and the figure that shows it."""

    name: str
    ok: bool
    figure: str


async def pause_keep(config: RunConfig) -> list[Check]:
    """Pause requests in flight, keep them for a second, and let them continue."""
    prompts, params = _task_prompts(config), LONG
    async with Fleet.launch(config.engine, fleet=config.fleet, router=config.router) as fleet:
        asked = await _pause_under_way(fleet, prompts, params)
        before = sum(task.done() for task in asked)
        await asyncio.sleep(PAUSED_S)
        held = sum(task.done() for task in asked)
        await fleet.resume_generation()
        samples = [sample for samples in await asyncio.gather(*asked) for sample in samples]
        engines = [status for status in await fleet.engines(stats=False) if status.state == "serving"]
    checks = [
        Check("engines", len(engines) == config.fleet.engines, f"{len(engines)} of {config.fleet.engines}"),
        Check("paused", held == before < len(asked), f"{len(asked) - held} requests kept, {before} had ended"),
        length_check(Counter(len(sample.token_ids) for sample in samples), TOKENS),
        Check("versions", all(set(s.versions()) == {0} for s in samples), "0"),
    ]
    if (bar := LOGPROB_BARS.get(config.engine.profile)) is not None:
        learner = await asyncio.to_thread(LocalLearner, config.learner_model, config.train, seed=config.seed)
        gap = await asyncio.to_thread(_largest_gap, learner, _data_of(prompts, samples))
        checks.append(Check("logprobs", gap <= bar, f"{gap:.1e}"))
    return checks


async def _pause_under_way(
    fleet: Fleet, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[asyncio.Task[list[Sample]]]:
    """Send all prompts and pause once an engine has one. Try again if all were finished by then."""
    asked: list[asyncio.Task[list[Sample]]] = []
    for _ in range(ATTEMPTS):
        asked = [asyncio.create_task(fleet.sample(prompt, 1, params)) for prompt in prompts]
        while not await fleet.get_num_unfinished_requests() and (await asyncio.wait(asked, timeout=0.01))[1]:
            pass
        await fleet.pause_generation(PauseMode.KEEP, clear_cache=False)
        await asyncio.sleep(PAUSED_S)  # for answers that had ended and are on their way
        if not all(task.done() for task in asked):
            break
        await fleet.resume_generation()
    return asked


async def http_generator(config: RunConfig) -> list[Check]:
    """Send the same greedy requests to `/v1/completions` and to the token interface."""
    prompts = _task_prompts(config)
    params = SamplingParams(max_tokens=24, temperature=0.0)
    async with Fleet.launch(config.engine, fleet=config.fleet, router=config.router) as fleet:
        tokens = await asyncio.gather(*(fleet.sample(prompt, 1, params) for prompt in prompts))
        name = config.engine.served_model_name or config.engine.model
        bodies = [{"model": name, "prompt": list(p), "max_tokens": 24, "temperature": 0.0} for p in prompts]
        answers = await asyncio.gather(*(fleet.completion(body) for body in bodies))
    tokenizer = load_tokenizer(config.engine.tokenizer or config.engine.model)
    texts = [tokenizer.decode(samples[0].token_ids) for samples in tokens]
    same = sum(answer["choices"][0]["text"] == text for answer, text in zip(answers, texts, strict=True))
    labelled = sum(bool(answer["choices"][0].get("weight_versions")) for answer in answers)
    real = config.engine.profile != "sim"  # the simulated engine's text does not come from the tokenizer
    return [
        Check("answers", len(answers) == PROMPTS, str(len(answers))),
        *([Check("texts", same == PROMPTS, f"{same} of {PROMPTS} equal")] if real else []),
        Check("versions", labelled == PROMPTS, f"on {labelled} of {PROMPTS}"),
    ]


def _largest_gap(learner: LocalLearner, data: Sequence[Datum]) -> float:
    """Return the largest |learner - engine logprob|, nats, over the engine's tokens."""
    gaps: list[Tensor] = []
    for ours, datum in zip(learner.forward(None, LossSpec({}), data).logprobs, data, strict=True):
        made = ours.new_tensor(datum.weights) != 0
        gaps.append((ours - ours.new_tensor(datum.logprobs))[made].abs().max())
    return float(max(gaps))


def _data_of(prompts: Sequence[Sequence[int]], samples: Sequence[Sample]) -> list[Datum]:
    """Convert samples into inputs and targets, each with an advantage of 1."""
    made = [
        Trajectory(tuple(p), s.token_ids, (1,) * len(s.token_ids), s.logprobs or (), s.versions(), 1.0, "stop", "")
        for p, s in zip(prompts, samples, strict=True)
    ]
    return [datum_of(trajectory, 1.0) for trajectory in made]


def _task_prompts(config: RunConfig) -> list[tuple[int, ...]]:
    """Return the token ids of the first tasks of the training stream."""
    environment = load_environment(config.environment, config.seed)
    tokenizer = load_tokenizer(config.engine.tokenizer or config.engine.model)
    return [tuple(tokenizer.encode(environment.train_task(i).prompt)) for i in range(PROMPTS)]


class NcclLink:
    """The trainer's end of vLLM's own NCCL transfer to an engine on one GPU."""

    def __init__(self) -> None:
        with reserved_port() as port:
            self.joins = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2, "rank_offset": 1}
        self._group: Any = None

    def join(self) -> None:
        """Join the engine, which joins at the same time. Blocks."""
        trainer_init = import_module("vllm.distributed.weight_transfer.nccl_common").trainer_init
        self._group = trainer_init({name: self.joins[name] for name in ("master_address", "master_port", "world_size")})

    def send(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Send the tensors that `_announced` describes, while the engine receives them. Blocks."""
        for _, tensor in tensors:
            self._group.broadcast(tensor.contiguous(), src=0, stream=torch.cuda.current_stream())
        torch.cuda.synchronize()


def _announced(tensors: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
    """Return the description of the tensors in the form of vLLM's call."""
    return {
        "names": [name for name, _ in tensors],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
        "shapes": [list(tensor.shape) for _, tensor in tensors],
    }


async def native_sync(config: RunConfig) -> list[Check]:
    """Train on samples of a plain vLLM server, and send weights by vLLM's own calls."""
    logs = config.run_dir / "native-sync-logs"
    logs.mkdir(parents=True, exist_ok=True)
    server = await EngineProcess.launch(
        server_command(config.engine, native=BACKEND), name="plain", log_dir=logs, gpus=_last_gpu()
    )
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
    """Return each version's samples, and the largest |learner - engine logprob|, nats."""
    link, prompts = NcclLink(), _task_prompts(config)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as joining:
        joining.create_task(fleet.init_weight_update_communicator(link.joins))
        joining.create_task(asyncio.to_thread(link.join))
    found: list[tuple[list[Sample], float]] = []
    for version in range(UPDATES + 1):
        if version:
            data = _data_of(prompts, found[-1][0])
            await asyncio.to_thread(_learn, learner, data, config.train.learning_rate)
            await _send(fleet, link, version, list(learner.weights(None)))
        samples = [one for made in await asyncio.gather(*(fleet.sample(p, 1, LONG) for p in prompts)) for one in made]
        found.append((samples, await asyncio.to_thread(_largest_gap, learner, _data_of(prompts, samples))))
    return found


def _learn(learner: LocalLearner, data: Sequence[Datum], learning_rate: float) -> None:
    """Take a step that makes every answer likelier, so that the weights differ."""
    outputs = learner.forward_backward(None, LossSpec({"dapo": 1.0}), data)
    learner.optim_step(None, AdamSpec(learning_rate), scale=1 / outputs.denominators["dapo"])


async def _send(fleet: Fleet, link: NcclLink, version: int, tensors: Sequence[tuple[str, Tensor]]) -> None:
    await fleet.pause_generation()
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as updating:
        updating.create_task(fleet.update_named_weights(_announced(tensors), version=version))
        updating.create_task(asyncio.to_thread(link.send, tensors))
    await fleet.resume_generation()


def _last_gpu() -> tuple[str, ...]:
    """Return the last visible GPU by its name in CUDA_VISIBLE_DEVICES; empty on a machine without a GPU."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
    return tuple(name.strip() for name in named.split(",")[-1:] if name.strip())


def length_check(lengths: Mapping[int, int], wanted: int) -> Check:
    """Check that every answer has all its tokens. `lengths` counts answers by their number of tokens."""
    return Check("tokens", set(lengths) == {wanted}, ", ".join(f"{n} answers of {size}" for size, n in lengths.items()))
