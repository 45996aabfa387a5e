"""The state of a router, for one process or several as one, and its client for more than announcements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pydantic import TypeAdapter

from penstock.checks import reading
from penstock.router.admin_client import Announcer, RouterClient


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One engine in the router's state."""

    name: str
    url: str
    weight_version: int
    eligible: bool
    """Whether requests may go there, as the fleet announced."""
    down: bool
    """Whether the breaker is open, see `membership.Engine.down`."""
    outstanding: int
    """Requests sent and not answered in full."""
    requests: int
    """Requests sent since the engine joined."""
    draining: bool = False
    """Whether only its own sessions still go there, as the fleet announced."""
    drained: bool = False
    """Whether it is draining and has no request in flight and no session left, so that it may leave."""
    dp_rank: int | None = None
    """Data-parallel rank of the server at `url`, as the fleet announced."""
    outstanding_tokens: int = 0
    """Prompt and expected tokens of the outstanding requests, according to their headers."""
    resident_tokens: int = 0
    """Tokens of context that live there."""
    sessions: int = 0
    """Sessions that live there."""
    kv_usage: float = -1.0
    """Estimated fraction of its KV cache in use, which may exceed 1; -1: unknown."""
    kv_capacity: int = 0
    """Tokens that its KV cache holds; 0: unknown."""
    breaker_openings: int = 0
    """Times that the breaker opened since the engine joined."""
    dead_answers: int = 0
    """Answers that reported a dead engine core."""
    failure: str = ""
    """Cause in the last such answer."""


@dataclass(frozen=True, slots=True)
class RouterState:
    """State of one process, or of several (`merged`)."""

    epoch: int
    """Epoch of the membership in force; -1 before the first one."""
    gate_closed: bool
    held: int
    """Requests waiting for the gate, for an engine or for room on one."""
    sessions: int
    """Sessions known to the router."""
    requests: int
    """Requests taken in since `counted_since`, without admin calls."""
    engines: tuple[EngineLoad, ...]
    held_bytes: int = 0
    """Upper bound of the bytes kept of requests that had to wait or came in pieces, until their answers begin."""
    held_by: Mapping[str, int] = field(default_factory=dict[str, int])
    """Waiting requests by reason: see `penstock.router.dispatcher.Wait`."""
    moved_sessions: int = 0
    """Later turns that the policy moved to another engine."""
    placements: Mapping[str, int] = field(default_factory=dict[str, int])
    """Requests placed, by the policy that chose the engine; `draining`: no policy was asked."""
    policy: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """`policy`, `prefix_length` and `overload_threshold` in force; empty: the router does not report them."""
    workers: tuple[int, ...] = ()
    """Ids of the processes that serve."""
    counted_since: float = 0.0
    """Unix time at which the newest process started; the counts of ended processes are lost. 0: unknown."""
    in_step: bool = True
    """Whether all processes have this epoch. A restarted one has no engines at first."""


_STATE = TypeAdapter(RouterState)


class Admin(Announcer, Protocol):
    """The control side of a router with its state: `RouterAdmin`, `running_router.VllmRouterAdmin`."""

    async def engines(self) -> RouterState: ...


class RouterAdmin(RouterClient):
    """Client of one router, with its state and its choices."""

    async def engines(self) -> RouterState:
        """Return the state of all processes, merged."""
        answers = await self._all("GET", "/router/engines")
        with reading("answer", self._other_form):
            return merged([_STATE.validate_python(answer) for answer in answers])

    async def choose(self, *, prompt_tokens: int = 0, prefix_hashes: str | None = None) -> str | None:
        """Return the engine for a request past the router; None: it would have to wait."""
        given = {} if prefix_hashes is None else {"prefix_hashes": prefix_hashes}
        # Always the same process, so that it knows the earlier choices.
        (answer,) = await self._all("POST", "/router/choose", {"prompt_tokens": prompt_tokens, **given}, most=1)
        with reading("answer", self._other_form):
            return None if answer["engine"] is None else str(answer["engine"])


# --- Several processes -----------------------------------------------------------------------------------------------

_SUMMED = ("held", "held_bytes", "sessions", "requests", "moved_sessions")
_ENGINE_SUMMED = (
    "outstanding", "outstanding_tokens", "resident_tokens", "sessions", "requests", "breaker_openings", "dead_answers",
)  # fmt: skip
_ENGINE_GREATEST = ("down", "kv_usage", "kv_capacity", "failure")


def merged(states: Sequence[RouterState]) -> RouterState:
    """Merge the states of at least one process. Engines are those of the newest epoch.

    A session counts in each process that served it. The gate is closed, or an engine down, if one process says so.
    """
    newest = max(states, key=lambda state: state.epoch)
    engines = [engine for state in states for engine in state.engines]
    return replace(
        newest,
        workers=tuple(pid for state in states for pid in state.workers),
        counted_since=max(state.counted_since for state in states),
        in_step=all(state.epoch == newest.epoch for state in states),
        gate_closed=any(state.gate_closed for state in states),
        held_by=_total(state.held_by for state in states),
        placements=_total(state.placements for state in states),
        engines=tuple(_merged(load, [one for one in engines if one.name == load.name]) for load in newest.engines),
        **{name: sum(getattr(state, name) for state in states) for name in _SUMMED},
    )


def _total(counts: Iterable[Mapping[str, int]]) -> Mapping[str, int]:
    total = Counter[str]()
    for each in counts:
        total.update(each)
    return dict(total)


def _merged(load: EngineLoad, of: Sequence[EngineLoad]) -> EngineLoad:
    figures: dict[str, Any] = {name: sum(getattr(one, name) for one in of) for name in _ENGINE_SUMMED}
    figures |= {name: max(getattr(one, name) for one in of) for name in _ENGINE_GREATEST}
    return replace(load, drained=all(one.drained for one in of), **figures)
