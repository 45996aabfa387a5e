"""The learner's interface: data, losses and settings in, logprobs and weights out.

One learner holds one base model, and trains either its weights or any number of adapters on it. In every call,
`adapter` selects one: a name that was given to `create_adapter`, or None for the base's own weights.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.errors import UserError
from penstock.train.losses import LossSpec

UNKNOWN_EXPERT = -1
"""Expert of a token without a report from the engine. The learner's own router chooses."""
_APART = {"extra", "experts"}
"""Fields of a datum without one value per target."""


@dataclass(frozen=True, slots=True)
class Datum:
    """One sequence of L tokens and its M targets, by default one per token. Lists, arrays and tensors are accepted.

    Attributes:
        input_ids: `[L]`, input of the model.
        target_ids: `[M]`, the token predicted at each place.
        weights: `[M]`, weight of each target in the loss; 0: not trained on (prompt, environment).
        logprobs: `[M]`, of the policy that made the target, in nats; 0 where the weight is 0.
        advantages: `[M]`, advantage of each target.
        reference: `[M]`, logprobs of a reference policy, for the loss part `kl`.
        positions: `[M]`, the place in `input_ids` at which each target is predicted; None: M is L, one at each place.
        extra: additional input of some losses, by name `[M]`; see `LossTerms.extra`. A call's data share the names.
        experts: `[L, layers, experts a token]`, ids of the experts that the engine chose for each input token, -1 if
            unknown. The learner replays them (`RouterReplay`); None: its own router chooses.

    Raises:
        UserError: the lengths differ.
    """

    input_ids: Sequence[int]
    target_ids: Sequence[int]
    weights: Sequence[float]
    logprobs: Sequence[float]
    advantages: Sequence[float]
    reference: Sequence[float] | None = None
    positions: Sequence[int] | None = None
    extra: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])
    experts: Any = None

    def __post_init__(self) -> None:
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__ if name not in _APART}
        fields.update(self.extra)
        if self.experts is not None and len(self.experts) != len(self.input_ids):
            raise UserError(f"a datum has experts of {len(self.experts)} tokens and {len(self.input_ids)} input tokens")
        if self.positions is not None:
            del fields["input_ids"]
        lengths = {name: len(values) for name, values in fields.items() if values is not None}
        if len(set(lengths.values())) > 1:
            raise UserError(f"a datum's fields must be of one length, one value for each token; got {lengths}")


@dataclass(frozen=True, slots=True)
class AdamSpec:
    """One step of AdamW. `grad_clip_norm` 0: no clipping.

    Raises:
        UserError: a value is negative or not finite, or a beta is 1 or more.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value, below = getattr(self, name), 1.0 if name.startswith("beta") else math.inf
            if not 0 <= value < below or (name == "eps" and not value):
                raise UserError(f"AdamW's {name} must be at least 0 and below {below} (eps above 0), got {value}")


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """A low-rank adapter: `W + alpha / rank * B A` for the chosen matrices.

    `alpha` None: `rank`, so the factor is 1. `train_mlp`: feed-forward layers; `train_unembed`: the output matrix.
    `seed` draws A's values; B starts at 0.
    """

    rank: int = 16
    alpha: float | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Outputs:
    """The results of a forward pass over data.

    Attributes:
        logprobs: logprobs of each datum's targets after temperature, `[M]`, fp32 on the CPU. They are 0 where the
            weight is 0, unless `LossSpec.all_logprobs`.
        losses: sum of each part of the loss, by name, without division and without its coefficient.
        denominators: number by which the schedule divides each part's sum.
        metrics: sums over tokens whose weight is not 0; see `LossOutput`.
    """

    logprobs: Sequence[Tensor]
    losses: Mapping[str, float]
    denominators: Mapping[str, float]
    metrics: Mapping[str, float]


class Learner(ABC):
    """Holds the weights in training. It uses no event loop; any thread may call it, but only one at a time.

    Attributes:
        versions: versions of the weights: 0 for a loaded base (None), 1 for a new adapter, +1 for each step.
        joins: whether `forward_backward_together` is supported.
    """

    versions: dict[str | None, int]
    joins: bool = False

    @abstractmethod
    def forward(self, adapter: str | None, loss: LossSpec, data: Sequence[Datum]) -> Outputs:
        """Evaluate the loss without a gradient."""

    @abstractmethod
    def forward_backward(self, adapter: str | None, loss: LossSpec, data: Sequence[Datum]) -> Outputs:
        """Evaluate the loss, and add its gradient to those since the last `optim_step`.

        If the call fails half way, the adapter's whole gradient is discarded.

        Raises:
            StateError: the base's weights are frozen, because adapters are trained on them.
        """

    def forward_backward_together(self, parts: Sequence[tuple[str, LossSpec, Sequence[Datum]]]) -> list[Outputs]:
        """Do `forward_backward` for several adapters, in shared passes over the base.

        Raises:
            StateError: a loss or a gradient is not finite.
            PenstockError: see `forward_backward`. After any error, all gradients are as before.
        """
        raise NotImplementedError(f"{type(self).__name__} has `joins` {self.joins}; got {len(parts)} parts")

    @abstractmethod
    def optim_step(self, adapter: str | None, adam: AdamSpec, *, scale: float) -> float:
        """Scale the gradient by `scale`, clip it, take a step, and discard the gradient.

        Returns:
            The gradient's norm after scaling and before clipping.

        Raises:
            StateError: the gradient is NaN or infinite. It is discarded; weights and optimiser are unchanged.
        """

    @abstractmethod
    def discard_gradient(self, adapter: str | None) -> None:
        """Discard the gradient. Weights and optimiser stay."""

    @abstractmethod
    def create_adapter(self, name: str, spec: LoraSpec) -> None:
        """Add an adapter that has no effect yet. From then on, the base's weights are frozen.

        Raises:
            UserError: the name is in use, or the spec does not fit the model; nothing is changed.
        """

    @abstractmethod
    def drop_adapter(self, name: str) -> None:
        """Remove an adapter with its gradient and its optimiser state."""

    @abstractmethod
    def set_adapter(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Replace an adapter's tensors, named and shaped as in `weights`. Discard its gradient and optimiser state.

        Raises:
            UserError: a tensor is missing, unknown or of another shape; nothing is changed.
        """

    @abstractmethod
    def adapter_config(self, name: str) -> Mapping[str, Any]:
        """Return PEFT's `adapter_config` of an adapter, with JSON values."""

    @abstractmethod
    def weights(self, adapter: str | None) -> Iterable[tuple[str, Tensor]]:
        """Return `(name, tensor)` pairs for engines. They are valid until the next call of the learner: copy before.

        For the base: all weights under their checkpoint names, tied weights once, in the dtypes that engines take. For
        an adapter: its own tensors, under PEFT's names.
        """

    @abstractmethod
    def merged_weights(self, adapter: str) -> Iterable[tuple[str, Tensor]]:
        """Return weights as `weights(None)` does, with an adapter's product added.

        Raises:
            UserError: the adapter changes an output matrix that is also the input matrix.
        """

    def release_memory(self) -> None:  # noqa: B027 - CPUs cache nothing
        """Release cached device memory, because engines on the same GPUs wake up."""

    @abstractmethod
    def save(self, adapter: str | None, folder: Path) -> Mapping[str, Any]:
        """Write all that a resumed run needs: weights, optimiser, random state, version.

        Returns:
            The JSON values that `load` needs in addition to the folder.

        Raises:
            CheckpointError: the disk refused.
        """

    @abstractmethod
    def load(self, adapter: str | None, folder: Path, values: Mapping[str, Any]) -> None:
        """Restore the state that `save` wrote, also with another number of ranks. Discard the current gradient.

        Raises:
            CheckpointError: the state is unreadable or belongs to another model; nothing is changed.
        """
