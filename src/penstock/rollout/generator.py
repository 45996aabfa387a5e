"""The generator interface (R27): tasks in, rewarded token sequences out, in order.

The fields follow other trainers (SkyRL's `GeneratorInterface`): prompt ids, response ids, rewards, loss masks, stop
reasons, logprobs, metrics. Penstock adds the weight version of every token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from penstock.errors import EngineError, RequestError
from penstock.rollout.environment import Task
from penstock.rollout.tokenizer import Tokenizer
from penstock.types import FinishReason, Sample, SamplingParams


@dataclass(frozen=True, slots=True)
class GeneratorInput:
    """A batch of tasks, with `num_samples` episodes for each task.

    Attributes:
        tasks: the problems, `[B]`.
        num_samples: episodes of each task; they form one group.
        group_ids: names of the groups, `[B]`. Default: the tasks' ids.
        sampling_params: replaces the generator's own (evaluation is greedy). Its `n` is ignored.
        seeds: sampling seeds, `[B]`. Episode `j` of task `i` has seed `seeds[i] + j`; None: the engine chooses.
    """

    tasks: Sequence[Task]
    num_samples: int = 1
    group_ids: Sequence[str] | None = None
    sampling_params: SamplingParams | None = None
    seeds: Sequence[int] | None = None

    def group_of(self, index: int) -> str:
        """Return the group of task `index`."""
        return self.tasks[index].id if self.group_ids is None else self.group_ids[index]

    def __post_init__(self) -> None:
        if not self.tasks:
            raise RequestError("empty batch: give at least one task")
        if self.num_samples < 1:
            raise RequestError(f"num_samples must be at least 1, got {self.num_samples}")
        for name in ("group_ids", "seeds"):
            given: Sequence[object] | None = getattr(self, name)
            if given is not None and len(given) != len(self.tasks):
                raise RequestError(f"{name} has {len(given)} entries for {len(self.tasks)} tasks; give one for each")


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode in token space, the trainer's training example (R27, R28).

    `response_ids` holds every token after the prompt. `loss_mask` is 1 for the policy's tokens, else 0. All per-token
    fields are as long as `response_ids`. Tokens of the environment carry logprob 0.0 and the version of the turn before
    them.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    reward: float
    stop_reason: FinishReason
    group_id: str
    """Group shared by the trajectories of one prompt. Advantages are computed within a group."""
    episode_id: str = ""
    """Episode shared by its trajectories, which together weigh as much as one. Empty: the only one of its episode."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    kv_kept: tuple[bool, ...] = ()
    """True for each token of `response_ids` that attends to KV of older weights. Empty: False for all."""
    constrained: tuple[bool, ...] = ()
    """True for each token of `response_ids` that a grammar constrained; its logprob is constrained too. Empty: none."""
    turn_rewards: tuple[tuple[int, float], ...] = ()
    """Per turn of a longer episode: its end in `response_ids`, and its own reward."""
    routed_experts: Any = field(default=None, compare=False, repr=False)  # same form as in `Sample`

    def __post_init__(self) -> None:
        lengths = {len(self.response_ids), len(self.loss_mask), len(self.logprobs), len(self.versions)}
        lengths |= {len(given) for given in (self.kv_kept, self.constrained) if given}
        if len(lengths) != 1:
            raise ValueError(f"per-token fields of a trajectory differ in length: {sorted(lengths)}")


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
        turn_rewards: Sequence[tuple[int, float]] = (),
        episode_id: str = "",
    ) -> Trajectory:
        """Return the episode as a training example. `turn_rewards` is for an episode of several turns."""
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
            metrics={"turns": float(len(turn_rewards))} if turn_rewards else {},
            turn_rewards=tuple(turn_rewards),
            kv_kept=tuple(self.kv_kept) if any(self.kv_kept) else (),
            constrained=tuple(self.constrained) if any(self.constrained) else (),
            routed_experts=self.experts if self.experts is not None and len(self.experts) == read else None,
        )


@dataclass(frozen=True, slots=True)
class GeneratorOutput:
    """Finished episodes, `[B * num_samples]` in input order; episodes of one task are adjacent.

    `metrics` are means over the batch.
    """

    trajectories: tuple[Trajectory, ...]
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> Self:
        """Join trajectories in order and compute the metrics. An empty batch has no metrics."""
        if not (n := len(trajectories)):
            return cls(())
        metrics = {
            "reward_mean": sum(t.reward for t in trajectories) / n,
            "response_tokens_mean": sum(len(t.response_ids) for t in trajectories) / n,
            "truncated_share": sum(t.stop_reason == "length" for t in trajectories) / n,
        }
        return cls(tuple(trajectories), metrics)


class Generator(ABC):
    """Turns tasks into trajectories. An episode may have one turn, several turns, or an agent with tools."""

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer: ...
    @abstractmethod
    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Play `num_samples` episodes of every task.

        Raises:
            EngineError: an engine failed and no other could take over.
            RequestError: a task does not fit the engine (prompt longer than the context, ...).
        """
