"""Scenarios without training: a pause that keeps requests, and the HTTP interface beside the token interface."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from penstock.config import RunConfig
from penstock.fleet.fleet import Fleet
from penstock.rollout.environment import load_environment
from penstock.rollout.tokenizer import load_tokenizer
from penstock.train.interface import Datum
from penstock.train.learner import LocalLearner
from penstock.train.losses import LossSpec
from penstock.train.scenarios.checks import LOGPROB_BARS, Check, length_check
from penstock.types import PauseMode, Sample, SamplingParams

PROMPTS = 16
TOKENS = 96
"""Of each answer: long enough that a pause mostly finds all of them under way."""
ATTEMPTS = 10
"""To pause while answers are under way: on a busy machine an engine can end them before it is asked."""
PAUSED_S = 1.0
LONG = SamplingParams(max_tokens=TOKENS, ignore_eos=True)


async def pause_keep(config: RunConfig) -> list[Check]:
    """Pause requests in flight, keep them for a second, and let them go on."""
    prompts, params = task_prompts(config), LONG
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
        Check("paused", held == before < len(asked), f"{len(asked) - held} of {len(asked)} kept for {PAUSED_S:.0f} s"),
        length_check(Counter(len(sample.token_ids) for sample in samples), TOKENS),
        Check("versions", all(set(s.versions()) == {0} for s in samples), "0"),
    ]
    if (bar := LOGPROB_BARS.get(config.engine.profile)) is not None:
        learner = await asyncio.to_thread(LocalLearner, config.learner_model, config.train, seed=config.seed)
        gap = await asyncio.to_thread(largest_gap, learner, data_of(prompts, samples))
        checks.append(Check("logprobs", gap <= bar, f"{gap:.1e}"))
    return checks


async def _pause_under_way(
    fleet: Fleet, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[asyncio.Task[list[Sample]]]:
    """Ask for all prompts and pause as soon as an engine has one; again where all were done by then."""
    asked: list[asyncio.Task[list[Sample]]] = []
    for _ in range(ATTEMPTS):
        asked = [asyncio.create_task(fleet.sample(prompt, 1, params)) for prompt in prompts]
        while not await fleet.get_num_unfinished_requests() and (await asyncio.wait(asked, timeout=0.01))[1]:
            pass
        await fleet.pause_generation(PauseMode.KEEP, clear_cache=False)
        await asyncio.sleep(PAUSED_S)  # for answers that were ended before and are on their way
        if not all(task.done() for task in asked):
            break
        await fleet.resume_generation()
    return asked


async def http_generator(config: RunConfig) -> list[Check]:
    """Ask the same greedily by `/v1/completions` and by the token interface."""
    prompts = task_prompts(config)
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
    return [
        Check("answers", len(answers) == PROMPTS, str(len(answers))),
        Check("texts", same == PROMPTS, f"{same} of {PROMPTS} equal"),
        Check("versions", labelled == PROMPTS, f"on {labelled} of {PROMPTS}"),
    ]


def largest_gap(learner: LocalLearner, data: Sequence[Datum]) -> float:
    """Return the largest |learner - engine logprob|, nats, over the tokens that the engine made."""
    gaps: list[Tensor] = []
    for ours, datum in zip(learner.forward(None, LossSpec({}), data).logprobs, data, strict=True):
        made = ours.new_tensor(datum.weights) != 0
        gaps.append((ours - ours.new_tensor(datum.logprobs))[made].abs().max())
    return float(max(gaps))


def data_of(prompts: Sequence[Sequence[int]], samples: Sequence[Sample]) -> list[Datum]:
    """Lay samples out as what is read and what is predicted, each with an advantage of 1."""
    data: list[Datum] = []
    for prompt, sample in zip(prompts, samples, strict=True):
        ids, context, made = (*prompt, *sample.token_ids), (0.0,) * (len(prompt) - 1), (1.0,) * len(sample.token_ids)
        logprobs = (*context, *(sample.logprobs or ()))
        data.append(Datum(ids[:-1], ids[1:], (*context, *made), logprobs, (*context, *made)))
    return data


def task_prompts(config: RunConfig) -> list[tuple[int, ...]]:
    """Token ids of the first tasks of the training stream."""
    environment = load_environment(config.environment, config.seed)
    tokenizer = load_tokenizer(config.engine.tokenizer or config.engine.model)
    return [tuple(tokenizer.encode(environment.train_task(i).prompt)) for i in range(PROMPTS)]
