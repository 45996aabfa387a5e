"""The generator interface (R27): a batch of tasks in, rewarded token sequences out, in input order.

The fields of input and output are those that trainers of this kind agree on (SkyRL's `GeneratorInterface`): prompt ids,
response ids, rewards, loss masks, stop reasons, logprobs, metrics; with the weight version of every token beside them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from penstock.errors import RequestError
from penstock.rollout.environment import Task
from penstock.rollout.tokenizer import Tokenizer
from penstock.types import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class GeneratorInput:
    """A batch of tasks, with `num_samples` episodes wanted of each.

    Attributes:
        tasks: the problems, `[B]`.
        num_samples: episodes of each task; they form its group.
        group_ids: `[B]`, names of the groups; default: the tasks' ids.
        sampling_params: instead of the generator's own (evaluation is greedy); its `n` is ignored.
        seeds: `[B]`, of sampling; episode `j` of task `i` has seed `seeds[i] + j`. None leaves it to the engine.
    """

    tasks: Sequence[Task]
    num_samples: int = 1
    group_ids: Sequence[str] | None = None
    sampling_params: SamplingParams | None = None
    seeds: Sequence[int] | None = None

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
    """One episode in token space: what the trainer learns from (R27, R28).

    `response_ids` holds everything after the prompt; `loss_mask` is 1 where the policy made the token and 0 where the
    environment did. All per-token fields have the length of `response_ids`; tokens of the environment carry logprob
    0.0 and the version of the turn before them.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    reward: float
    stop_reason: FinishReason
    group_id: str
    """Trajectories of one prompt share it; advantages are taken within it."""
    episode_id: str = ""
    """Trajectories of one episode share it, and weigh as much as one; empty: this is the episode's only one."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    kv_kept: tuple[bool, ...] = ()
    """Of each token of `response_ids`: it attends to KV of older weights. Empty: none does."""
    constrained: tuple[bool, ...] = ()
    """Of each token of `response_ids`: it was sampled under a grammar, as was its logprob. Empty: none was."""
    turn_rewards: tuple[tuple[int, float], ...] = ()
    """Of an episode of several turns: the end of each turn in `response_ids`, and its own reward."""
    routed_experts: Any = field(default=None, compare=False, repr=False)  # as of `Sample`

    def __post_init__(self) -> None:
        lengths = {len(self.response_ids), len(self.loss_mask), len(self.logprobs), len(self.versions)}
        lengths |= {len(given) for given in (self.kv_kept, self.constrained) if given}
        if len(lengths) != 1:
            raise ValueError(f"per-token fields of a trajectory differ in length: {sorted(lengths)}")


@dataclass(frozen=True, slots=True)
class GeneratorOutput:
    """Finished episodes, `[B * num_samples]` in input order, the episodes of a task one after another.

    Attributes:
        trajectories: all there is to learn from; the properties below are columns of it.
        metrics: means over the batch: `reward_mean`, `response_tokens_mean`, `truncated_share`.
    """

    trajectories: tuple[Trajectory, ...]
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> Self:
        """Join trajectories, in order, and compute the metrics; without a trajectory there are none."""
        if not (n := len(trajectories)):
            return cls(())
        metrics = {
            "reward_mean": sum(t.reward for t in trajectories) / n,
            "response_tokens_mean": sum(len(t.response_ids) for t in trajectories) / n,
            "truncated_share": sum(t.stop_reason == "length" for t in trajectories) / n,
        }
        return cls(tuple(trajectories), metrics)

    @property
    def prompt_token_ids(self) -> list[tuple[int, ...]]:
        """Prompts, ragged `[N][P_i]`."""
        return [t.prompt_ids for t in self.trajectories]

    @property
    def response_ids(self) -> list[tuple[int, ...]]:
        """Responses, ragged `[N][T_i]`."""
        return [t.response_ids for t in self.trajectories]

    @property
    def rewards(self) -> list[float]:
        """One reward an episode, `[N]`."""
        return [t.reward for t in self.trajectories]

    @property
    def loss_masks(self) -> list[tuple[int, ...]]:
        """1 where the policy made the token, ragged as `response_ids`."""
        return [t.loss_mask for t in self.trajectories]

    @property
    def stop_reasons(self) -> list[FinishReason]:
        """`stop`, `length` or `abort`, `[N]`."""
        return [t.stop_reason for t in self.trajectories]

    @property
    def rollout_logprobs(self) -> list[tuple[float, ...]]:
        """The engine's logprobs after temperature, ragged as `response_ids`."""
        return [t.logprobs for t in self.trajectories]

    @property
    def versions(self) -> list[tuple[int, ...]]:
        """Weight version of each token, ragged as `response_ids`."""
        return [t.versions for t in self.trajectories]


class Generator(ABC):
    """Turns tasks into trajectories. A schedule knows nothing of how: one turn, many, or an agent with tools."""

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The policy's tokenizer, to show trajectories as text."""

    @abstractmethod
    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Play `num_samples` episodes of every task.

        Raises:
            EngineError: an engine failed and no other could take over.
            RequestError: a task does not fit the engine (prompt over the context, ...).
        """
