"""The generator interface (R27): a batch of tasks in, rewarded token sequences out, in input order.

The fields of input and output are those that trainers of this kind agree on (SkyRL's `GeneratorInterface`): prompt ids,
response ids, rewards, loss masks, stop reasons, logprobs, metrics; with the weight version of every token beside them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from penstock.errors import RequestError
from penstock.rollout.environment import Task
from penstock.rollout.tokenizer import Tokenizer
from penstock.types import FinishReason, SamplingParams, Trajectory


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
