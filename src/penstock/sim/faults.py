"""Faults on demand: what goes wrong, where, and how often."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Self

from penstock.errors import ConfigError, EngineError


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

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Self:
        """Read a fault from JSON: `{"kind": "hang", "phase": "pause"}`. Where only one phase fits, it may be left out.

        Raises:
            ConfigError: an unknown kind, phase or key, or a pair that makes no sense.
        """
        known = {f.name for f in fields(cls)}
        if unknown := set(data) - known:
            raise ConfigError(f"unknown fault keys {sorted(unknown)}; known: {', '.join(sorted(known))}")
        values = dict(data)
        try:
            values["kind"] = kind = FaultKind(values.get("kind"))
            places = _PLACES[kind]
            default = next(iter(places)) if len(places) == 1 else Phase.NOW
            values["phase"] = Phase(values.get("phase", default))
            return cls(**values)
        except (TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"fault {dict(data)!r}: {error}") from error

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a fault from a command line: `hang:phase=pause,times=2`."""
        kind, _, rest = text.partition(":")
        values: dict[str, Any] = {"kind": kind}
        for pair in filter(None, rest.split(",")):
            key, _, value = pair.partition("=")
            values[key] = value
        for key, number in (("after_tokens", int), ("times", int), ("seconds", float), ("factor", float)):
            if key in values:
                try:
                    values[key] = number(values[key])
                except ValueError as error:
                    raise ConfigError(f"fault {text!r}: {key} must be a number, got {values[key]!r}") from error
        return cls.of(values)


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
        """Take back every fault and let go of what hangs."""
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


_AT_PHASE = (FaultKind.DELAY, FaultKind.HANG, FaultKind.REFUSE, FaultKind.EXIT, FaultKind.CORE_DEATH)
