"""The answer to `GET /router/engines`, for one router process or several as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
    """State of one process, or of several (`other_calls.merged`)."""

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
