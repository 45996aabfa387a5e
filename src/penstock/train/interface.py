"""What a learner is to its callers: data, losses and optimiser settings in, logprobs and weights out.

One learner holds one base model, and trains either its weights or any number of adapters on it. In every call
`adapter` says which: a name that `create_adapter` was given, or None for the base's own weights.
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

_APART = {"extra", "experts"}
"""Fields of a datum that have no value for each target."""


@dataclass(frozen=True, slots=True)
class Datum:
    """One sequence of L tokens and its M targets, by default one for each token; lists, arrays and tensors will do.

    Attributes:
        input_ids: `[L]`, what the model reads.
        target_ids: `[M]`, the token predicted at each place.
        weights: `[M]`, of each target in the loss; 0: not trained on (prompt, environment).
        logprobs: `[M]`, of the policy that made the target, nats; 0 where the weight is 0.
        advantages: `[M]`.
        reference: `[M]`, logprobs of a reference policy, for the loss part `kl`.
        positions: `[M]`, the place in `input_ids` at which each target is predicted; None: M is L, one at each.
        extra: by name `[M]`, what some losses read; see `LossTerms.extra`. All data of a call have the same names.
        experts: `[L, layers, experts a token]`, ids of the experts that the engine chose for each input token, -1 where
            it is not known; the learner replays them (`router_replay.py`). None: its own router chooses.

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
        UserError: a value is negative, no finite number, or a beta of 1 or more.
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

    Attributes:
        rank: columns of B.
        alpha: see above; None: `rank`, a factor of 1.
        train_attn: adapt the matrices of attention.
        train_mlp: adapt those of the feed-forward layers.
        train_unembed: adapt the output matrix.
        seed: of A's random values; B starts at 0.
    """

    rank: int = 16
    alpha: float | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a forward pass over data found.

    Attributes:
        logprobs: of each datum `[M]`, fp32 on the CPU: of the targets after temperature. They are 0 where the weight
            is 0, unless `LossSpec.all_logprobs`.
        losses: sum of each part of the loss, by its name, not divided and without its coefficient.
        denominators: of each part: what the schedule divides the sum by.
        metrics: sums over tokens of weight other than 0; see `LossOutput`.
    """

    logprobs: Sequence[Tensor]
    losses: Mapping[str, float]
    denominators: Mapping[str, float]
    metrics: Mapping[str, float]


class Learner(ABC):
    """Holds the weights being trained. It knows no event loop and may be called from any one thread at a time.

    Attributes:
        versions: of the weights held: the base's (None) 0 as loaded, an adapter's 1 as created, +1 for each step.
        joins: `forward_backward_together` can be called.
    """

    versions: dict[str | None, int]
    joins: bool = False

    @abstractmethod
    def forward(self, adapter: str | None, loss: LossSpec, data: Sequence[Datum]) -> Outputs:
        """Evaluate the loss without a gradient."""

    @abstractmethod
    def forward_backward(self, adapter: str | None, loss: LossSpec, data: Sequence[Datum]) -> Outputs:
        """Evaluate the loss, and add the gradient of its sum to what is held since the last `optim_step`.

        If it fails half way, the adapter's whole gradient is forgotten.

        Raises:
            StateError: the base's weights are frozen, as adapters are trained on them.
        """

    def forward_backward_together(self, parts: Sequence[tuple[str, LossSpec, Sequence[Datum]]]) -> list[Outputs]:
        """Do `forward_backward` for several adapters at once, in shared passes over the base.

        Raises:
            StateError: a loss or a gradient is not finite.
            PenstockError: what `forward_backward` refuses. Whatever is raised, no gradient was changed.
        """
        raise NotImplementedError(f"{type(self).__name__} has `joins` {self.joins}; got {len(parts)} parts")

    @abstractmethod
    def optim_step(self, adapter: str | None, adam: AdamSpec, *, scale: float) -> float:
        """Multiply the gradient by `scale`, clip it, take a step, and forget the gradient.

        Returns:
            The gradient's norm after scaling, before clipping.

        Raises:
            StateError: the gradient is NaN or infinite. It is forgotten; weights and optimiser are as before.
        """

    @abstractmethod
    def discard_gradient(self, adapter: str | None) -> None:
        """Forget the gradient; weights and optimiser stay."""

    @abstractmethod
    def create_adapter(self, name: str, spec: LoraSpec) -> None:
        """Add an adapter that changes nothing yet; from then on the base's weights are frozen.

        Raises:
            UserError: there is one of that name, or the spec does not fit the model; nothing was changed.
        """

    @abstractmethod
    def drop_adapter(self, name: str) -> None:
        """Forget an adapter, its gradient and its optimiser state."""

    @abstractmethod
    def set_adapter(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Replace an adapter's tensors, named and shaped as in `weights`; forget its gradient and optimiser state.

        Raises:
            UserError: a tensor is missing, unknown or of another shape; nothing was changed.
        """

    @abstractmethod
    def adapter_config(self, name: str) -> Mapping[str, Any]:
        """PEFT's `adapter_config` of an adapter, as JSON holds it."""

    @abstractmethod
    def weights(self, adapter: str | None) -> Iterable[tuple[str, Tensor]]:
        """`(name, tensor)` of what engines are sent: good until the next call of the learner, so copy before it.

        Of the base: all weights under the names of its checkpoint, tied ones once, in the dtypes that engines take. Of
        an adapter: its own tensors, under the names that PEFT stores them by.
        """

    @abstractmethod
    def merged_weights(self, adapter: str) -> Iterable[tuple[str, Tensor]]:
        """All weights as `weights(None)` gives them, with an adapter's product added to those that it changes.

        Raises:
            UserError: the adapter changes an output matrix that is the input matrix as well.
        """

    def release_memory(self) -> None:  # noqa: B027 - nothing is held on CPUs
        """Give back device memory that is cached for the next step: engines on the same GPUs wake up."""

    @abstractmethod
    def save(self, adapter: str | None, folder: Path) -> Mapping[str, Any]:
        """Write everything that a resumed run needs: weights, optimiser, random state, version.

        Returns:
            What `load` needs besides the folder, as JSON.

        Raises:
            CheckpointError: the disk refused.
        """

    @abstractmethod
    def load(self, adapter: str | None, folder: Path, values: Mapping[str, Any]) -> None:
        """Take up what `save` wrote and returned, also as another number of ranks; forget the gradient held.

        Raises:
            CheckpointError: it cannot be read, or is of another model; nothing was changed.
        """
