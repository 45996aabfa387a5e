"""The errors that Penstock raises on purpose.

A message says what was wrong, with which value, and what to do. The command line prints it in one line and exits with
status 2 (`UserError`) or 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class PenstockError(Exception):
    """Base of all errors that Penstock raises on purpose."""


class UserError(PenstockError, ValueError):
    """The caller's request cannot be met; the state is unchanged."""


class ConfigError(UserError):
    """A configuration key, type, path or value is wrong."""


class RequestError(UserError):
    """A generation request is malformed (both prompts and ids, empty batch, unknown sampling key, ...)."""


class WeightsError(UserError):
    """Weights do not fit the engine (missing, extra or misshapen tensor, wrong dtype, NaN) and were not loaded."""


class TransferError(PenstockError):
    """Some bytes of a weight version did not arrive; the engine is torn until it has loaded a whole version."""


class MissingCapabilityError(UserError):
    """An engine lacks a capability; the message names both and the way to start an engine that has it."""


class StateError(PenstockError):
    """The call does not fit the present state (paused twice, resumed while not paused, update during an update)."""


class EngineError(PenstockError):
    """One engine failed. `engine` names it."""

    def __init__(self, message: str, *, engine: str | None = None) -> None:
        super().__init__(message if engine is None else f"engine {engine}: {message}")
        self.engine = engine


class EngineStartError(EngineError):
    """An engine process did not become ready; the message holds the relevant lines of its log."""


class EngineHTTPError(EngineError):
    """An engine answered with an HTTP error; its status, OpenAI error type and message are kept (R7, R8)."""

    def __init__(self, message: str, *, status: int, error_type: str = "", engine: str | None = None) -> None:
        super().__init__(message, engine=engine)
        self.status = status
        self.error_type = error_type


class EngineDeadError(EngineError):
    """The engine is gone: connection refused or broken, or its process ended."""


class DeadlineError(EngineError):
    """An engine (or the router) did not answer in time. `seconds` is the deadline that passed."""

    def __init__(self, message: str, *, seconds: float, engine: str | None = None) -> None:
        super().__init__(message, engine=engine)
        self.seconds = seconds


class FanOutError(EngineError):
    """A call failed on some engines of many. `failures` holds their errors, `results` the others' answers."""

    def __init__(self, message: str, *, failures: Mapping[str, PenstockError], results: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.failures = failures
        self.results = results


class UpdateError(PenstockError):
    """Too few engines committed a weight update; the fleet still serves the previous version."""


class LearnerError(PenstockError):
    """A rank of a sharded learner is lost; the run goes on from its last checkpoint."""


class CheckpointError(PenstockError):
    """A checkpoint is missing or truncated, or belongs to another run."""
