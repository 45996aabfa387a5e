"""Frozen dataclasses of control calls: pauses, weight updates, and what engines are, can do and report. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, Self, TypeAlias

from penstock.errors import UserError

if TYPE_CHECKING:
    import torch

KV = Literal["recompute", "keep", "keep_in_flight"]
"""KV cache in a weight update: recomputed under the new weights, kept as it is, or kept only by requests that are
making tokens, so that new requests reuse no KV of older weights."""


NamedTensors: TypeAlias = (
    "Iterable[tuple[str, torch.Tensor]] | Callable[[], Iterable[tuple[str, torch.Tensor]]] | torch.nn.Module"
)
"""Argument of `update_weights`: pairs of a checkpoint name and a tensor, or a function or module that gives them."""


class PauseMode(StrEnum):
    """Treatment of requests in flight when generation is paused (R23)."""

    KEEP = "keep"
    """Requests are frozen in the scheduler, and go on after `resume`."""
    WAIT = "wait"
    """The pause returns when the requests have finished."""
    ABORT = "abort"
    """Requests give up their KV at once and are recomputed from their tokens after `resume`, as with `KEEP` and
    `clear_cache`. vLLM without our plugin ends them, and our client sends them again with their tokens."""

    @classmethod
    def _missing_(cls, value: object) -> Self:
        raise UserError(f"unknown pause mode {value!r}; known: {', '.join(cls)}")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of a checkpoint. `dtype` is torch's name without the prefix: `float32`, `bfloat16`, ..."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Tokens that one update cost one engine, as `token_meter.TokenMeter` measures them."""

    tokens: float
    """Tokens expected at the steady rate minus tokens made, from the update until the rate was back."""
    seconds: float
    """Seconds of that time."""
    rate: float
    """Steady rate before the update, tokens/s."""
    back: bool
    """Whether the rate came back; False: the next update, a pause or a deadline ended the measurement."""


@dataclass(frozen=True, slots=True)
class EngineUpdate:
    """One engine's report of one weight update; times in seconds."""

    engine: str
    seconds: Mapping[str, float]
    """Seconds of each phase: `prepare` or `read` (before the pause), `pause`, `load`, `resume`; `bubble`: these 3."""
    preempted: int
    """Requests in flight that recompute their KV, waiting ones included."""
    checksum: str
    """Checksum of the present weights, over every parameter of every worker; equal for engines of one layout."""
    kept: int = 0
    """Requests in flight that kept their KV."""
    loss: TokenLoss | None = None
    """Tokens lost; `None` if not known yet (`Fleet.recovered`), or not measured since the engine was paused."""


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """The outcome of one weight update."""

    version: int
    bytes: int
    seconds: Mapping[str, float]
    """Wall seconds of the fleet's phases: `publish`, `prepare`, `gate` (closed to open), `total`."""
    engines: tuple[EngineUpdate, ...]
    failures: Mapping[str, str] = field(default_factory=dict[str, str])
    """Engines that left the fleet during the update, with the reason."""
    adapter: str | None = None
    """LoRA adapter to which `version` belongs; None: the engines' own weights."""

    @property
    def bubble(self) -> float:
        """Longest time in seconds that an engine made no token because of this update."""
        return max((e.seconds["bubble"] for e in self.engines), default=0.0)

    @property
    def tokens_lost(self) -> float | None:
        """Tokens that the update cost, summed over the engines' `TokenLoss`.

        It is None until `Fleet.recovered` has returned the report with it, and if no engine measured it.
        """
        losses = [engine.loss.tokens for engine in self.engines if engine.loss is not None]
        return sum(losses) if losses else None


@dataclass(frozen=True, slots=True)
class CoreState:
    """State that an engine's core reports about itself; None: it does not report the value."""

    paused: bool
    """It makes no token: it is paused, asleep, or without weights."""
    weight_version: int | None = None
    asleep: bool = False
    """It has given back memory."""
    torn: bool = False
    """Its weights were dropped or partly overwritten."""
    foreign: int | None = None
    """Number of calls other than our updates that may have changed its weights."""
    checksum: str | None = None
    """Checksum of the last `update_weights`, of any owner."""
