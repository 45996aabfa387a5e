"""What goes over a fleet's control socket: its state, its reports and its errors as JSON, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from penstock import errors
from penstock.engine.control import EngineInfo
from penstock.errors import DeadlineError, EngineError, EngineHTTPError, PenstockError
from penstock.fleet.control import FanOut
from penstock.fleet.lifecycle import State
from penstock.parsing import reading
from penstock.types import UpdateReport


@dataclass(frozen=True, slots=True)
class MemberState:
    """One engine of a fleet, as another process sees it."""

    name: str
    url: str
    state: State
    reason: str
    weight_version: int
    coming: bool
    """It does not serve, and will."""
    gpus: tuple[str, ...]
    info: EngineInfo
    warning: str = ""
    """See `Member.warning`."""


@dataclass(frozen=True, slots=True)
class FleetState:
    """A fleet, as another process sees it."""

    url: str
    """Of its router."""
    pid: int
    """The process that holds it."""
    detached: bool
    version: int
    """Weight version."""
    used: int
    """See `Roster.used`."""
    change: int
    """Grows with each change."""
    members: tuple[MemberState, ...]
    kept: tuple[int, ...] = ()
    """See `Roster.kept`."""


@dataclass(frozen=True, slots=True)
class Keys:
    """What a process of the fleet's user needs for speaking to router and engines itself. Never shown or kept."""

    admin: str | None = field(repr=False)
    """Of the router's admin calls; it is good for requests too. None: none is asked for."""
    engines: Mapping[str, str] = field(repr=False)
    """By the engine's URL; one that is not here asks for none."""


_STATE = TypeAdapter(FleetState)
_REPORT = TypeAdapter(UpdateReport)
_KEYS = TypeAdapter(Keys)


def state_to_json(state: FleetState) -> dict[str, Any]:
    """As it goes over the socket."""
    return _STATE.dump_python(state, mode="json")


def state_of(data: Mapping[str, Any]) -> FleetState:
    """Read what `state_to_json` wrote. Raises EngineError where it is something else."""
    try:
        return _STATE.validate_python(data)
    except ValidationError as error:
        raise EngineError(f"the fleet's state cannot be read; is it of another Penstock? {error}") from error


def keys_of(data: Mapping[str, Any]) -> Keys:
    """The keys from their `dataclasses.asdict`. Raises EngineError, which does not show them, for something else."""
    try:
        return _KEYS.validate_python(data)
    except ValidationError:
        raise EngineError("the fleet's keys cannot be read; is it of another Penstock?") from None


def report_of(data: Mapping[str, Any]) -> UpdateReport:
    """An `UpdateReport` from its `dataclasses.asdict`. Raises EngineError where it is something else."""
    with reading("report of an update", EngineError):
        return _REPORT.validate_python(data)


def fan_out_to_json(outcome: FanOut[Any]) -> dict[str, Any]:
    """What each engine answered, as it goes over the socket; the answers are JSON already."""
    failures = {name: error_to_json(error) for name, error in outcome.failures.items()}
    return {"results": dict(outcome.results), "failures": failures}


def fan_out_of(data: Mapping[str, Any]) -> FanOut[Any]:
    """What `fan_out_to_json` wrote."""
    return FanOut(data["results"], {name: error_of(error) for name, error in data["failures"].items()})


def error_to_json(error: PenstockError) -> dict[str, Any]:
    """The error's class, message, and what else it holds."""
    more = {name: getattr(error, name) for name in ("status", "error_type", "seconds") if hasattr(error, name)}
    return {"type": type(error).__name__, "message": str(error), **more}


def error_of(data: Mapping[str, Any]) -> PenstockError:
    """The error that `error_to_json` described, of its own class."""
    message = str(data.get("message", data))
    found = getattr(errors, str(data.get("type")), None)
    if not (isinstance(found, type) and issubclass(found, PenstockError)):
        return PenstockError(message)
    if issubclass(found, EngineHTTPError):
        return found(message, status=int(data["status"]), error_type=str(data["error_type"]))
    if issubclass(found, DeadlineError):
        return found(message, seconds=float(data["seconds"]))
    return found(message)
