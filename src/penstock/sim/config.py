"""How one simulated engine is configured, and its faults on demand: the kind, the phase and the number of times."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass as checked

from penstock.control_types import TensorSpec
from penstock.errors import ConfigError, EngineError
from penstock.options import validate
from penstock.router_settings import Port
from penstock.sim.tokens import Model

_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


class FaultKind(StrEnum):
    """Kinds of faults."""

    EXIT = "exit"
    """The process is gone at once. Connections break, and the port is closed."""
    CORE_DEATH = "core_death"
    """vLLM's engine core dies: 500 (in streams, an error event and `[DONE]`), /health 503, then the process exits."""
    HANG = "hang"
    """The call or step that meets the fault hangs until the faults are cleared."""
    REFUSE = "refuse"
    """HTTP 500."""
    CUT = "cut"
    """One stream's connection breaks after `after_tokens` of its tokens."""
    ERROR_EVENT = "error_event"
    """One stream gets an error event and `[DONE]` after `after_tokens` of its tokens."""
    WRONG_CHECKSUM = "wrong_checksum"
    """The apply call reports a checksum of other weights."""
    WRONG_LABEL = "wrong_label"
    """The apply call changes the weights but not the version label of new tokens."""
    SLOW = "slow"
    """Every step takes `factor` times as long."""


class Phase(StrEnum):
    """Where a fault strikes. `NOW`: when the fault is set. Other phases: the next time the engine reaches them."""

    NOW = "now"
    TOKENS = "tokens"
    """When the engine has made `after_tokens` more tokens."""
    REQUEST = "request"
    """At the arrival of a generation request."""
    HEALTH = "health"
    CONTROL = "control"
    """At a call that the engine's core answers, not the server in front of it."""
    PREPARE = "prepare"
    PAUSE = "pause"
    LOAD = "load"
    RESUME = "resume"


_PLACES: Mapping[str, frozenset[Phase]] = {
    FaultKind.EXIT: frozenset(Phase),
    FaultKind.CORE_DEATH: frozenset(Phase),
    FaultKind.HANG: frozenset(Phase) - {Phase.NOW},
    FaultKind.REFUSE: frozenset(Phase) - {Phase.NOW, Phase.TOKENS},
    FaultKind.CUT: frozenset({Phase.REQUEST}),
    FaultKind.ERROR_EVENT: frozenset({Phase.REQUEST}),
    FaultKind.WRONG_CHECKSUM: frozenset({Phase.LOAD}),
    FaultKind.WRONG_LABEL: frozenset({Phase.LOAD}),
    FaultKind.SLOW: frozenset({Phase.NOW}),
}


@checked(frozen=True, slots=True, config=_STRICT)
class Fault:
    """One fault. It strikes `times` times. SLOW lasts until the faults are cleared."""

    kind: FaultKind
    phase: Phase = Phase.NOW
    after_tokens: NonNegativeInt = 0
    factor: PositiveFloat = 1.0
    times: PositiveInt = 1

    def __post_init__(self) -> None:
        if self.phase not in _PLACES[self.kind]:
            known = ", ".join(sorted(_PLACES[self.kind]))
            raise ConfigError(f"fault {self.kind.value!r} cannot be set at {self.phase.value!r}; it can at: {known}")

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Self:
        """Read a fault from JSON: `{"kind": "hang", "phase": "pause"}`. The phase is optional if the kind has only one.

        Raises:
            ConfigError: an unknown kind, phase or key, or a phase that the kind does not have.
        """
        places = _PLACES.get(str(data.get("kind")), ())
        return validate(cls, {**({"phase": next(iter(places))} if len(places) == 1 else {}), **data})

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a fault from a command line: `hang:phase=pause,times=2`."""
        kind, _, rest = text.partition(":")
        pairs = (pair.partition("=") for pair in rest.split(",") if pair)
        return cls.of({"kind": kind, **{key: value for key, _, value in pairs}})


def _specs(given: object) -> object:
    """Read `[["name", "dtype", [shape]], ...]` from a file if a path is given."""
    if not isinstance(given, str):
        return given
    try:
        rows = json.loads(Path(given).read_text())
        return tuple(TensorSpec(str(name), str(dtype), tuple(map(int, shape))) for name, dtype, shape in rows)
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"cannot read tensor specs: {error}") from error


@checked(frozen=True, slots=True, config=_STRICT)
class SimConfig:
    """Configuration of one simulated engine. Sizes are in tokens, times in seconds."""

    name: str = "sim"
    host: str = "127.0.0.1"
    port: Port = 0
    """0 picks a free port."""
    api_key: str | None = field(default=None, repr=False)
    served_model_name: str = "sim-model"
    max_body_bytes: PositiveInt = 64 * 2**20

    vocab_size: PositiveInt = 1024
    eos_token_id: int = 0
    eos_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Probability that a token is EOS. With 0, samples end only at `max_tokens` or a stop token."""
    seed: int = 0
    """Seed for requests that carry none. With the same seed, all engines give the same answers."""
    max_model_len: PositiveInt = 4096
    """vLLM 0.26 and this engine refuse a longer prompt + max_tokens with 400; 0.32 clamps max_tokens."""

    tokens_per_second: PositiveFloat = 1000.0
    """Decoding rate of a single sample."""
    sequence_seconds: NonNegativeFloat = 5e-6
    """Step time that each further sample of the batch adds."""
    prefill_tokens_per_second: PositiveFloat = 200_000.0
    max_num_seqs: PositiveInt = 256
    max_num_batched_tokens: PositiveInt = 8192
    """Maximum of prompt tokens computed in one step."""
    block_size: PositiveInt = 16
    kv_blocks: PositiveInt = 16_384
    enable_prefix_caching: bool = True

    ignore_grammars: bool = False
    """Make arbitrary tokens for a request with a grammar. Otherwise the engine refuses it."""
    load_seconds: NonNegativeFloat = 0.005
    tensor_specs: Annotated[tuple[TensorSpec, ...] | None, BeforeValidator(_specs)] = None
    """Tensors that an update must have; None accepts any."""
    max_loras: NonNegativeInt = 256
    """Adapters until it refuses more: by default as many as a fleet keeps, since vLLM would read the others again."""
    logprobs_mode: str = "processed_logprobs"
    """Only reported. Logprobs are the same in any mode."""
    data_parallel_size: PositiveInt = 1
    """Ranks behind one address, each with its own scheduler and cache."""

    plain: bool = False
    """Behave as vLLM without Penstock's plugin. The options below have an effect only then."""
    vllm_version: Annotated[str, Field(pattern=r"^\d+\.\d+")] = "0.32.0"
    """vLLM has weight versions from 0.32 on."""
    dev_mode: bool = True
    """Whether VLLM_SERVER_DEV_MODE=1 is set."""
    scale_out: bool = True
    """Whether `--enable-scale-out` is given, which opens the token endpoint."""
    enable_sleep_mode: bool = True
    weight_transfer_backend: str = "nccl"
    """Backend from `--weight-transfer-config`. Empty: the option is not given."""
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        if self.kv_blocks * self.block_size < self.max_model_len:
            raise ConfigError(
                f"{self.kv_blocks} KV blocks of {self.block_size} tokens cannot hold one sequence of "
                f"max_model_len={self.max_model_len}; raise kv_blocks or lower max_model_len"
            )

    @classmethod
    def read(cls, options: Sequence[str], **given: Any) -> Self:
        """Read `key=value` options; several called `fault` add up. `given` holds values that are already parsed.

        Raises:
            ConfigError: an unknown key, a value of the wrong type, or values that contradict each other.
        """
        values, faults = dict[str, Any](), list[Fault]()
        for option in options:
            name, equals, text = option.partition("=")
            if not equals:
                raise ConfigError(f"option {option!r} is not of the form key=value")
            if name in given:
                instead = "the environment variable PENSTOCK_API_KEY" if name == "api_key" else f"--{name}"
                raise ConfigError(f"{name} is not given as key=value; use {instead}")
            if name == "fault":
                faults.append(Fault.parse(text))
            else:
                values[name] = text
        return validate(cls, {**values, **given, "faults": tuple(faults)})

    @property
    def keeps_versions(self) -> bool:
        return not self.plain or tuple(map(int, re.findall(r"\d+", self.vllm_version)[:2])) >= (0, 32)

    @property
    def model(self) -> Model:
        """The part of the configuration that decides tokens, for `expected_token`."""
        return Model(self.vocab_size, self.eos_token_id, self.eos_share, self.seed)


_AT_PHASE = (FaultKind.HANG, FaultKind.REFUSE, FaultKind.EXIT, FaultKind.CORE_DEATH)


class RefusedError(EngineError):
    """A fault demands that this call is answered with HTTP 500."""


class Died(Exception):  # noqa: N818 - an event that ends a handler, not an error to report
    """The engine died at this point. `kind` is the kind of death."""

    def __init__(self, kind: FaultKind) -> None:
        super().__init__(kind.value)
        self.kind = kind


@dataclass(slots=True)
class _Armed:
    fault: Fault
    due: int
    """Count of the engine's tokens from which the fault may strike (phase TOKENS)."""
    left: int


class FaultPlan:
    """The faults that are set. The engine consults the plan at each phase; only this class knows about faults."""

    def __init__(self, faults: tuple[Fault, ...] = ()) -> None:
        self._armed: list[_Armed] = []
        self._released = asyncio.Event()
        self.slow_factor = 1.0
        self.tokens_made = 0
        for fault in faults:
            self.add(fault)

    def add(self, fault: Fault) -> None:
        """Set a fault. Token counts of phase `tokens` start at this moment."""
        if fault.kind is FaultKind.SLOW:
            self.slow_factor = fault.factor
        else:
            self._armed.append(_Armed(fault, self.tokens_made + fault.after_tokens, fault.times))

    def clear(self) -> None:
        self._armed.clear()
        self.slow_factor = 1.0
        self._released.set()
        self._released = asyncio.Event()

    def made_token(self) -> bool:
        """Count a token. Return True if a fault may be due."""
        self.tokens_made += 1
        return bool(self._armed)

    def take(self, phase: Phase, *kinds: FaultKind) -> Fault | None:
        """Return the first fault of these kinds at this phase, and use it up once."""
        return next((self._spend(armed) for armed in self._armed if self._fits(armed, phase, kinds)), None)

    async def at(self, phase: Phase) -> None:
        """Wait, refuse or die at `phase` for each fault, once per visit.

        Raises:
            RefusedError: the call must be answered with HTTP 500.
            Died: the engine has died.
        """
        cleared = self._released
        for fault in [self._spend(armed) for armed in tuple(self._armed) if self._fits(armed, phase, _AT_PHASE)]:
            if cleared.is_set():  # cleared while this visit hung: skip its remaining faults
                return
            if fault.kind is FaultKind.HANG:
                await cleared.wait()
            elif fault.kind is FaultKind.REFUSE:
                raise RefusedError(f"a fault refuses the phase {phase.value!r}")
            else:
                raise Died(fault.kind)

    def _fits(self, armed: _Armed, phase: Phase, kinds: tuple[FaultKind, ...]) -> bool:
        due = phase is not Phase.TOKENS or self.tokens_made >= armed.due
        return armed.fault.phase is phase and armed.fault.kind in kinds and due

    def _spend(self, armed: _Armed) -> Fault:
        armed.left -= 1
        if armed.left <= 0:
            self._armed.remove(armed)
        return armed.fault
