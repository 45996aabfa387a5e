"""Episodes of several turns in token space. Each turn sends exactly the tokens sampled before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol
from uuid import uuid4

from penstock.aio import all_or_first_error
from penstock.config import RolloutConfig
from penstock.engine.interface import Engine
from penstock.errors import ConfigError, EngineError, PenstockError
from penstock.rollout.chat_template import ChatTemplate
from penstock.rollout.environment import Dialogue, Environment, Response, user_code
from penstock.rollout.generator import Generator, GeneratorInput, GeneratorOutput, Trajectory
from penstock.rollout.output_parser import OutputParser
from penstock.rollout.single_turn import Places, SingleTurnGenerator, finite_reward, token_space
from penstock.rollout.tokenizer import Tokenizer
from penstock.types import FinishReason, Sample, SamplingParams, SessionId

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


@dataclass(slots=True)
class TokenRow:
    """The tokens of an episode in order: the policy's and the environment's."""

    prompt_ids: tuple[int, ...]
    ids: list[int] = field(default_factory=list[int])
    mask: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    kv_kept: list[bool] = field(default_factory=list[bool])
    constrained: list[bool] = field(default_factory=list[bool])
    experts: Any = None
    """Routed experts of all tokens so far. The last sample's report covers its prompt too."""

    def add_sample(self, sample: Sample, *, trained: bool = True, constrained: bool = False) -> None:
        """Append the policy's tokens. EngineError: the sample has no logprobs."""
        if sample.logprobs is None:
            raise EngineError("the engine returned no logprobs, although they were asked for")
        self.ids += sample.token_ids
        self.mask += [int(trained)] * len(sample.token_ids)
        self.logprobs += sample.logprobs if trained else [0.0] * len(sample.token_ids)
        self.versions += sample.versions()
        self.kv_kept += sample.kv_kept()
        self.constrained += [constrained] * len(sample.token_ids)
        self.experts = sample.routed_experts

    def add_environment(self, token_ids: Sequence[int]) -> None:
        """Append the environment's tokens. They get the version of the token before them."""
        self.ids += token_ids
        self.mask += [0] * len(token_ids)
        self.logprobs += [0.0] * len(token_ids)
        self.versions += (self.versions[-1:] or [0]) * len(token_ids)
        self.kv_kept += [False] * len(token_ids)
        self.constrained += [False] * len(token_ids)

    def trajectory(
        self,
        *,
        reward: float,
        stop_reason: FinishReason,
        group_id: str,
        turn_rewards: Sequence[tuple[int, float]],
        episode_id: str = "",
    ) -> Trajectory:
        read = len(self.prompt_ids) + len(self.ids) - 1
        return Trajectory(
            prompt_ids=self.prompt_ids,
            response_ids=tuple(self.ids),
            loss_mask=tuple(self.mask),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            reward=reward,
            stop_reason=stop_reason,
            group_id=group_id,
            episode_id=episode_id,
            metrics={"turns": float(len(turn_rewards))},
            turn_rewards=tuple(turn_rewards),
            kv_kept=tuple(self.kv_kept) if any(self.kv_kept) else (),
            constrained=tuple(self.constrained) if any(self.constrained) else (),
            routed_experts=self.experts if self.experts is not None and len(self.experts) == read else None,
        )


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
        group_id = batch.group_ids[index] if batch.group_ids is not None else task.id
        async with self._environment.dialogue(task) as dialogue:
            return await self._exchange(dialogue, params, uuid4().hex, group_id)

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
