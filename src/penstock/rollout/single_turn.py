"""Episodes of one turn: one prompt, one response, one reward. Tokens in and tokens out."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import SupportsFloat, cast

from penstock.aio import all_or_first_error
from penstock.engine.interface import Engine
from penstock.errors import ConfigError, EngineError, PenstockError
from penstock.rollout.environment import Environment, Task, user_code
from penstock.rollout.generator import Generator, GeneratorInput, GeneratorOutput, Trajectory
from penstock.rollout.tokenizer import Tokenizer
from penstock.types import Sample, SamplingParams


class SingleTurnGenerator(Generator):
    """Sends one n-way request per group. It decodes the text itself, so engines return only tokens.

    The environment's `reward` runs on the event loop; a slow reward belongs in a separate process. At most
    `concurrency` samples are in flight; a group waits for all its places, in FIFO order. `adapter`: the LoRA adapter
    that answers.

    Raises:
        ConfigError: stop strings, which need text. Use stop tokens instead.
    """

    def __init__(
        self,
        client: Engine,
        tokenizer: Tokenizer,
        environment: Environment,
        sampling_params: SamplingParams,
        concurrency: int,
        *,
        adapter: str | None = None,
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._environment = environment
        self._params = token_space(sampling_params)
        self._places = Places(concurrency)
        self._adapter = adapter

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        given = input_batch.sampling_params
        params = self._params if given is None else token_space(given)
        groups = await all_or_first_error(self._group(input_batch, i, params) for i in range(len(input_batch.tasks)))
        return GeneratorOutput.of([trajectory for group in groups for trajectory in group])

    async def _group(self, batch: GeneratorInput, index: int, params: SamplingParams) -> list[Trajectory]:
        task = batch.tasks[index]
        params = params if batch.seeds is None else replace(params, seed=batch.seeds[index])
        group_id = batch.group_ids[index] if batch.group_ids is not None else task.id
        prompt_ids = tuple(self._tokenizer.encode(task.prompt))
        samples = await self._sample(prompt_ids, batch.num_samples, params)
        return [self._trajectory(task, group_id, prompt_ids, sample) for sample in samples]

    async def _sample(self, prompt_ids: Sequence[int], n: int, params: SamplingParams) -> list[Sample]:
        """Return `n` samples of a prompt; `benchmarks/schedules.py` gives them lengths of its own."""
        async with self._places.take(n):
            samples = await self._client.sample(prompt_ids, n, params, adapter=self._adapter)
        if len(samples) != n:
            raise EngineError(f"asked for {n} samples of one prompt, got {len(samples)}")
        return samples

    def _trajectory(self, task: Task, group_id: str, prompt_ids: tuple[int, ...], sample: Sample) -> Trajectory:
        if sample.logprobs is None:
            raise EngineError(f"the engine returned no logprobs for task {task.id}, although they were asked for")
        text = self._tokenizer.decode(sample.token_ids)
        with user_code(f"the environment's reward of task {task.id!r} failed", PenstockError):
            reward = self._environment.reward(task, text)
        return Trajectory(
            prompt_ids=prompt_ids,
            response_ids=sample.token_ids,
            loss_mask=(1,) * len(sample.token_ids),
            logprobs=sample.logprobs,
            versions=sample.versions(),
            reward=finite_reward(reward, task),
            stop_reason=sample.finish_reason,
            group_id=group_id,
            kv_kept=sample.kv_kept() if any(span.kv_kept for span in sample.spans) else (),
            routed_experts=sample.routed_experts,
        )


def finite_reward(reward: object, task: Task, giver: str = "environment") -> float:
    """Return a reward as a Python float, also from numpy and torch. PenstockError: it is no finite number."""
    try:
        value = math.nan if isinstance(reward, str) else float(cast("SupportsFloat", reward))
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with several elements
        value = math.nan
    if not math.isfinite(value):
        raise PenstockError(f"the {giver}'s reward of task {task.id!r} must be a finite number, got {reward!r}")
    return value


def token_space(params: SamplingParams) -> SamplingParams:
    """Return the parameters of one sample in tokens. ConfigError: stop strings, which need text."""
    if params.stop:
        raise ConfigError(f"stop strings {params.stop!r} need text, but rollouts are in tokens: use stop_token_ids")
    return replace(params, n=1, detokenize=False, logprobs=True)


class Places:
    """A semaphore that grants several places at once, in the order of requests.

    A large request at the head of the queue holds back smaller ones, so it cannot starve. A request for more than all
    places gets all of them.
    """

    def __init__(self, places: int) -> None:
        if places < 1:
            raise ConfigError(f"concurrency must be at least 1, got {places}")
        self._all = places
        self._free = places
        self._turn = asyncio.Lock()  # a fair lock: it serves waiters in order
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def take(self, places: int) -> AsyncGenerator[None]:
        """Wait for `places` places, and return them at the end of the block."""
        wanted = min(places, self._all)
        async with self._turn:
            while self._free < wanted:
                self._freed.clear()
                await self._freed.wait()
            self._free -= wanted
        try:
            yield
        finally:
            self._free += wanted
            self._freed.set()
