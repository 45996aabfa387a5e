"""Plays episodes of one turn, or of several turns that each send exactly the tokens sampled before."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, SupportsFloat, cast
from uuid import uuid4

from penstock.aio import all_or_first_error
from penstock.config import RolloutConfig
from penstock.engine.interface import Engine
from penstock.errors import ConfigError, EngineError, PenstockError
from penstock.rollout.chat_template import ChatTemplate
from penstock.rollout.environment import Dialogue, Environment, Response, Task, user_code
from penstock.rollout.generator import Generator, GeneratorInput, GeneratorOutput, TokenRow, Trajectory
from penstock.rollout.output_parser import OutputParser
from penstock.rollout.tokenizer import Tokenizer
from penstock.types import Sample, SamplingParams, SessionId

_SEED_STEP = 1_000_003
_SEEDS = 2**63


class Sampler(Protocol):
    """Source of samples: an `Engine` or a `DataClient`."""

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        num_samples: int,
        sampling_params: SamplingParams,
        session_id: SessionId | None = None,
    ) -> list[Sample]: ...


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
        prompt_ids = tuple(self._tokenizer.encode(task.prompt))
        samples = await self._sample(prompt_ids, batch.num_samples, params)
        return [self._trajectory(task, batch.group_of(index), prompt_ids, sample) for sample in samples]

    async def _sample(self, prompt_ids: Sequence[int], n: int, params: SamplingParams) -> list[Sample]:
        """Return `n` samples of a prompt; `benchmarks/schedules.py` gives them lengths of its own."""
        async with self._places.take(n):
            samples = await self._client.sample(prompt_ids, n, params, adapter=self._adapter)
        if len(samples) != n:
            raise EngineError(f"asked for {n} samples of one prompt, got {len(samples)}")
        return samples

    def _trajectory(self, task: Task, group_id: str, prompt_ids: tuple[int, ...], sample: Sample) -> Trajectory:
        row = TokenRow(prompt_ids)
        row.add_sample(sample)
        with user_code(f"the environment's reward of task {task.id!r} failed", PenstockError):
            reward = self._environment.reward(task, self._tokenizer.decode(sample.token_ids))
        return row.trajectory(reward=finite_reward(reward, task), stop_reason=sample.finish_reason, group_id=group_id)


class MultiTurnGenerator(Generator):
    """Plays `Environment.step` until an episode ends, is cut off, or reaches a limit.

    The environment answers on the event loop; slow work belongs in a separate process. `max_tokens` of
    `sampling_params` limits one turn; the other `max_tokens` counts all tokens of an episode after its prompt, the
    environment's too.

    Raises:
        ConfigError: stop strings, a limit below 1, or see `prepare_turns`.
    """

    def __init__(
        self,
        client: Sampler,
        tokenizer: Tokenizer,
        environment: Environment,
        sampling_params: SamplingParams,
        concurrency: int,
        *,
        max_turns: int = 8,
        max_tokens: int = 4096,
        adapter: str | None = None,
    ) -> None:
        if max_turns < 1 or max_tokens < 1:
            raise ConfigError(f"max_turns and max_tokens must be at least 1, got {max_turns} and {max_tokens}")
        self._template, self._schemas = prepare_turns(tokenizer, environment)
        self._parser = OutputParser(tokenizer)
        self._environment = environment
        self._params = self._with_ends(sampling_params)
        self._places = Places(concurrency)
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        sample: Any = client.sample
        self._draw = sample if adapter is None else partial(sample, adapter=adapter)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._template.tokenizer

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        episodes = (
            self._episode(input_batch, index, number)
            for index in range(len(input_batch.tasks))
            for number in range(input_batch.num_samples)
        )
        return GeneratorOutput.of(await all_or_first_error(episodes))

    async def _episode(self, batch: GeneratorInput, index: int, number: int) -> Trajectory:
        task = batch.tasks[index]
        params = self._params if batch.sampling_params is None else self._with_ends(batch.sampling_params)
        seed = params.seed if batch.seeds is None else batch.seeds[index]
        params = replace(params, seed=None if seed is None else seed + number)
        async with self._environment.dialogue(task) as dialogue:
            return await self._exchange(dialogue, params, uuid4().hex, batch.group_of(index))

    async def _exchange(
        self, dialogue: Dialogue, params: SamplingParams, session: SessionId, group_id: str
    ) -> Trajectory:
        task, tools = dialogue.task, self._environment.tools
        row = TokenRow(tuple(self._template.render(dialogue.opening, tools)))
        responses: list[Response] = []
        rewards: list[tuple[int, float]] = []
        while True:
            context = [*row.prompt_ids, *row.ids]
            sample = await self._sample(row, params, session, len(responses))
            row.add_sample(sample)
            stop_reason = sample.finish_reason
            responses.append(self._response(context, sample, params))
            with user_code(f"the environment's step of task {task.id!r} failed", PenstockError):
                turn = await dialogue.step(responses)
            rewards.append((len(row.ids), finite_reward(turn.reward if turn else 0.0, task)))
            if turn is None or turn.done or stop_reason != "stop":
                break
            suffix = self._template.suffix(turn.messages, tools, last_id=sample.token_ids[-1])
            if suffix is None:
                raise PenstockError(f"the chat template cannot render the answer to task {task.id!r}: {turn.messages}")
            if len(responses) == self._max_turns or len(row.ids) + len(suffix) >= self._max_tokens:
                stop_reason = "length"
                break
            row.add_environment(suffix)
        with user_code(f"the environment's reward of task {task.id!r} failed", PenstockError):
            last = self._environment.reward(task, responses[-1])
        total = finite_reward(last, task) + sum(reward for _, reward in rewards)
        return row.trajectory(reward=total, stop_reason=stop_reason, group_id=group_id, turn_rewards=rewards)

    def _with_ends(self, params: SamplingParams) -> SamplingParams:
        ends = dict.fromkeys((*params.stop_token_ids, *self._template.end_ids))
        return replace(token_space(params), stop_token_ids=tuple(ends))

    def _response(self, context: Sequence[int], sample: Sample, params: SamplingParams) -> Response:
        ended = sample.finish_reason == "stop" and sample.token_ids[-1] in params.stop_token_ids
        ids = sample.token_ids[:-1] if ended else sample.token_ids
        parsed = self._parser.parse(context, ids, self._schemas)
        return Response.of(self.tokenizer.decode(sample.token_ids), parsed.text, parsed.calls)

    async def _sample(self, row: TokenRow, params: SamplingParams, session: SessionId, turn: int) -> Sample:
        room = min(params.max_tokens, self._max_tokens - len(row.ids))
        seed = None if params.seed is None else seed_of_turn(params.seed, turn)
        now = replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room), seed=seed)
        async with self._places.take(1):
            (sample,) = await self._draw([*row.prompt_ids, *row.ids], 1, now, session)
        if not sample.token_ids and sample.finish_reason != "abort":
            raise EngineError("the engine returned a sample without a token")
        return sample


def seed_of_turn(seed: int, turn: int) -> int:
    """Return the seed of one turn. With the episode's seed, every turn would draw the same random numbers."""
    return (seed + turn * _SEED_STEP) % _SEEDS


def prepare_turns(tokenizer: Tokenizer, environment: Environment) -> tuple[ChatTemplate, Mapping[str, Any]]:
    """Return the chat template, and the schema of each tool's parameters by its name.

    Raises:
        ConfigError: no chat template, one that cannot be extended turn by turn, or tools of another form.
    """
    template = ChatTemplate(tokenizer)
    if faults := template.faults():
        raise ConfigError(f"the chat template cannot be extended turn by turn: {faults[0]}")
    with user_code("the environment's tools are not in OpenAI's form", ConfigError):
        return template, {t["function"]["name"]: t["function"].get("parameters", {}) for t in environment.tools}


def generator_for(
    client: Engine, tokenizer: Tokenizer, environment: Environment, config: RolloutConfig, *, adapter: str | None = None
) -> Generator:
    """Return the generator of a training run. It plays several turns if the environment answers responses.

    Raises:
        ConfigError: see `MultiTurnGenerator`.
    """
    params = SamplingParams(max_tokens=config.max_tokens, temperature=config.temperature)
    given = (client, tokenizer, environment, params, config.concurrency)
    if not environment.has_turns():
        return SingleTurnGenerator(*given, adapter=adapter)
    limits = {"max_turns": config.max_turns, "max_tokens": config.max_episode_tokens}
    return MultiTurnGenerator(*given, **limits, adapter=adapter)


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
