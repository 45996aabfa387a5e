"""How one simulated engine is built, and its faults on demand: what goes wrong, where, and how often."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Self, TypeVar

from penstock.errors import ConfigError, EngineError, did_you_mean
from penstock.sim.tokens import Model
from penstock.types import TensorSpec

E = TypeVar("E", bound=StrEnum)

LAST_PORT = 65_535
_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_KINDS: Mapping[type, str] = {bool: "true or false", int: "a whole number", float: "a finite number"}


@dataclass(frozen=True, slots=True)
class SimConfig:
    """One simulated engine. Sizes in tokens, times in seconds."""

    name: str = "sim"
    host: str = "127.0.0.1"
    port: int = 0
    """0: any free port."""
    api_key: str | None = field(default=None, repr=False)
    served_model_name: str = "sim-model"
    max_body_bytes: int = 64 * 2**20

    vocab_size: int = 1024
    eos_token_id: int = 0
    eos_share: float = 0.0
    """Probability that a token is EOS; 0: samples end at `max_tokens` or a stop token only."""
    seed: int = 0
    """For requests without one. With the same seed, all engines give the same answers."""
    max_model_len: int = 4096
    """A longer prompt + max_tokens is refused with 400, as by vLLM 0.26; 0.32 clamps max_tokens."""

    tokens_per_second: float = 1000.0
    """Decoding rate of one sample alone."""
    sequence_seconds: float = 5e-6
    """Added to a step by each further sample of the batch."""
    prefill_tokens_per_second: float = 200_000.0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    """Prompt tokens computed in one step, at most."""
    block_size: int = 16
    kv_blocks: int = 16_384
    enable_prefix_caching: bool = True

    ignore_grammars: bool = False
    """Make any tokens for a request that asks for a grammar, which is refused otherwise."""
    load_seconds: float = 0.005
    tensor_specs: tuple[TensorSpec, ...] | None = None
    """Tensors of an update; None: any."""
    max_loras: int = 16
    logprobs_mode: str = "processed_logprobs"
    """Reported only; logprobs are the same in any mode."""
    data_parallel_size: int = 1
    """Ranks, each with a scheduler and a cache of its own, behind one address."""

    plain: bool = False
    """Speak as vLLM without Penstock's plugin; the options below have an effect only then."""
    vllm_version: str = "0.32.0"
    """Before 0.32 vLLM has no weight versions."""
    dev_mode: bool = True
    """VLLM_SERVER_DEV_MODE=1."""
    scale_out: bool = True
    """`--enable-scale-out`: the token endpoint."""
    enable_sleep_mode: bool = True
    weight_transfer_backend: str = "nccl"
    """From `--weight-transfer-config`; empty: not given."""
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        positive = ("vocab_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_blocks")
        rates = ("tokens_per_second", "prefill_tokens_per_second")
        for name in (*positive, *rates, "max_body_bytes", "data_parallel_size"):
            _check(f"sim option {name}", getattr(self, name), "positive", lambda value: value > 0)
        for name in ("sequence_seconds", "load_seconds", "max_loras"):
            _check(f"sim option {name}", getattr(self, name), "0 or more", lambda value: value >= 0)
        _check("sim option eos_share", self.eos_share, "from 0 to 1", lambda value: 0 <= value <= 1)
        _check("sim option port", self.port, "from 0 to 65535", lambda value: 0 <= value <= LAST_PORT)
        if not re.match(r"\d+\.\d+", self.vllm_version):
            raise ConfigError(f"sim option vllm_version must be a version such as 0.32.0, got {self.vllm_version!r}")
        if self.kv_blocks * self.block_size < self.max_model_len:
            raise ConfigError(
                f"sim options: {self.kv_blocks} KV blocks of {self.block_size} tokens cannot hold one sequence of "
                f"max_model_len={self.max_model_len}; raise kv_blocks or lower max_model_len"
            )

    @classmethod
    def read(cls, options: Sequence[str], **given: Any) -> Self:
        """Read options as a command line has them, `key=value`; those called `fault` add up. `given` are no text.

        Raises:
            ConfigError: an unknown key, a value of another type, or values that do not go together.
        """
        known: dict[str, Any] = {f.name: f.default for f in fields(cls) if f.name not in {*given, "faults"}}
        faults: list[Fault] = []
        for option in options:
            name, equals, text = option.partition("=")
            if not equals:
                raise ConfigError(f"option {option!r} is not of the form key=value")
            if name == "fault":
                faults.append(Fault.parse(text))
            elif name == "tensor_specs":
                given[name] = _specs(Path(text))
            elif name in known:
                given[name] = _read(f"sim option {name!r}", type(known[name]), text)  # pyright: ignore[reportUnknownArgumentType] - of any default
            elif name in {f.name for f in fields(cls)}:
                instead = "the environment variable PENSTOCK_API_KEY" if name == "api_key" else f"--{name}"
                raise ConfigError(f"sim option {name} is not given as key=value; use {instead}")
            else:
                # A launcher shows the tail of a log, so the name comes last.
                raise ConfigError(f"{did_you_mean(name, [*known, 'fault'])} (unknown sim option {name!r})")
        return cls(**given, faults=tuple(faults))

    @property
    def keeps_versions(self) -> bool:
        return not self.plain or tuple(map(int, re.findall(r"\d+", self.vllm_version)[:2])) >= (0, 32)

    @property
    def model(self) -> Model:
        """The part of it that decides tokens; give it to `verify`."""
        return Model(self.vocab_size, self.eos_token_id, self.eos_share, self.seed)


def _read(name: str, kind: type, given: Any) -> Any:
    """Read a value as an option's type. Raises ConfigError."""
    try:
        value = _TRUTH[given.lower()] if kind is bool else kind(given)
    except (KeyError, TypeError, ValueError, OverflowError):
        value = None
    if value is None or (kind is float and not math.isfinite(value)):
        raise ConfigError(f"{name} must be {_KINDS[kind]}, got {given!r}")
    return value


def _check(name: str, value: float, what: str, fits: Callable[[float], bool]) -> None:
    if not fits(value):
        raise ConfigError(f"{name} must be {what}, got {value}")


def _one_of(names: type[E], what: str, given: Any) -> E:
    if given not in tuple(names):
        raise ConfigError(f"there is no {what} {given!r}; known: {', '.join(names)}")
    return names(given)


def _specs(file: Path) -> tuple[TensorSpec, ...]:
    """Read `[["name", "dtype", [shape]], ...]`."""
    try:
        rows = json.loads(file.read_text())
        return tuple(TensorSpec(str(name), str(dtype), tuple(map(int, shape))) for name, dtype, shape in rows)
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(f"cannot read tensor specs from {file}: {error}") from error


class FaultKind(StrEnum):
    """Kinds of fault."""

    EXIT = "exit"
    """The process is gone at once: connections break, the port is closed."""
    CORE_DEATH = "core_death"
    """vLLM's engine core dies: 500, or an error event and `[DONE]` in streams, /health 503, then the process exits."""
    HANG = "hang"
    """Nothing happens any more, until the faults are cleared."""
    REFUSE = "refuse"
    """HTTP 500."""
    DELAY = "delay"
    """`seconds` longer."""
    CUT = "cut"
    """One stream's connection breaks after `after_tokens` tokens of it."""
    ERROR_EVENT = "error_event"
    """One stream gets an error event and `[DONE]` after `after_tokens` tokens of it."""
    WRONG_CHECKSUM = "wrong_checksum"
    """The apply call reports a checksum of other weights."""
    WRONG_LABEL = "wrong_label"
    """The apply call changes the weights but not the version that tokens are labelled with."""
    SLOW = "slow"
    """Every step takes `factor` times as long."""


class Phase(StrEnum):
    """Where it goes wrong. `NOW`: as soon as the fault is set; the others: the next time the engine gets there."""

    NOW = "now"
    TOKENS = "tokens"
    """When `after_tokens` more tokens have been made by the engine."""
    REQUEST = "request"
    """At the arrival of a generation request."""
    HEALTH = "health"
    CONTROL = "control"
    """At a question that the engine's core answers, and not the server in front of it."""
    PREPARE = "prepare"
    PAUSE = "pause"
    LOAD = "load"
    RESUME = "resume"


_PLACES: Mapping[FaultKind, frozenset[Phase]] = {
    FaultKind.EXIT: frozenset(Phase),
    FaultKind.CORE_DEATH: frozenset(Phase),
    FaultKind.HANG: frozenset(Phase) - {Phase.NOW},
    FaultKind.REFUSE: frozenset(Phase) - {Phase.NOW, Phase.TOKENS},
    FaultKind.DELAY: frozenset(Phase) - {Phase.NOW},
    FaultKind.CUT: frozenset({Phase.REQUEST}),
    FaultKind.ERROR_EVENT: frozenset({Phase.REQUEST}),
    FaultKind.WRONG_CHECKSUM: frozenset({Phase.LOAD}),
    FaultKind.WRONG_LABEL: frozenset({Phase.LOAD}),
    FaultKind.SLOW: frozenset({Phase.NOW}),
}


_AT_PHASE = (FaultKind.DELAY, FaultKind.HANG, FaultKind.REFUSE, FaultKind.EXIT, FaultKind.CORE_DEATH)
_NUMBERS = {"after_tokens": int, "seconds": float, "factor": float, "times": int}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. It fires `times` times and is then spent; SLOW lasts until the faults are cleared."""

    kind: FaultKind
    phase: Phase = Phase.NOW
    after_tokens: int = 0
    seconds: float = 0.0
    factor: float = 1.0
    times: int = 1

    def __post_init__(self) -> None:
        if self.phase not in _PLACES[self.kind]:
            known = ", ".join(sorted(_PLACES[self.kind]))
            raise ConfigError(f"fault {self.kind.value!r} cannot be set at {self.phase.value!r}; it can at: {known}")
        for name, least in (("after_tokens", 0), ("seconds", 0), ("times", 1)):
            _check(
                f"fault option {name}",
                getattr(self, name),
                f"{least} or more",
                lambda value, least=least: value >= least,
            )
        _check("fault option factor", self.factor, "positive", lambda value: value > 0)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Self:
        """Read a fault from JSON: `{"kind": "hang", "phase": "pause"}`. Where only one phase fits, it may be left out.

        Raises:
            ConfigError: an unknown kind, phase or key, or a pair that makes no sense.
        """
        if unknown := sorted(data.keys() - {f.name for f in fields(cls)}):
            raise ConfigError(f"unknown fault keys {unknown}; known: {', '.join(sorted(f.name for f in fields(cls)))}")
        kind = _one_of(FaultKind, "kind of fault", data.get("kind"))
        default = next(iter(_PLACES[kind])) if len(_PLACES[kind]) == 1 else Phase.NOW
        phase = _one_of(Phase, "phase of a fault", data.get("phase", default))
        given = {
            name: _read(f"fault option {name}", kind, data[name]) for name, kind in _NUMBERS.items() if name in data
        }
        return cls(kind, phase, **given)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a fault from a command line: `hang:phase=pause,times=2`."""
        kind, _, rest = text.partition(":")
        pairs = (pair.partition("=") for pair in rest.split(",") if pair)
        return cls.of({"kind": kind, **{key: value for key, _, value in pairs}})


class RefusedError(EngineError):
    """A fault says that this call is answered with HTTP 500."""


class Died(Exception):  # noqa: N818 - an event that ends a handler, not an error to report
    """The engine died here; `kind` says how."""

    def __init__(self, kind: FaultKind) -> None:
        super().__init__(kind.value)
        self.kind = kind


@dataclass(slots=True)
class _Armed:
    fault: Fault
    due: int
    """Tokens made by the engine from which on it fires (phase TOKENS)."""
    left: int


class FaultPlan:
    """The faults that are set. The engine asks it at each phase; it is the only place that knows of faults."""

    def __init__(self, faults: tuple[Fault, ...] = ()) -> None:
        self._armed: list[_Armed] = []
        self._released = asyncio.Event()
        self.slow_factor = 1.0
        self.tokens_made = 0
        for fault in faults:
            self.add(fault)

    def add(self, fault: Fault) -> None:
        """Set a fault. Token counts of phase `tokens` start now."""
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
        """Count a token; True where a fault may be due."""
        self.tokens_made += 1
        return bool(self._armed)

    def take(self, phase: Phase, *kinds: FaultKind) -> Fault | None:
        """The first fault of these kinds at this phase, spent once more."""
        return next((self._spend(armed) for armed in self._armed if self._fits(armed, phase, kinds)), None)

    async def at(self, phase: Phase) -> None:
        """The engine is at `phase`: wait, hang, refuse or die here if faults say so, each once a visit.

        Raises:
            RefusedError: answer with HTTP 500.
            Died: the engine is gone.
        """
        cleared = self._released
        for fault in [self._spend(armed) for armed in tuple(self._armed) if self._fits(armed, phase, _AT_PHASE)]:
            if cleared.is_set():  # while this visit waited: what it has not met by then is taken back too
                return
            if fault.kind is FaultKind.DELAY:
                await asyncio.sleep(fault.seconds)
            elif fault.kind is FaultKind.HANG:
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
