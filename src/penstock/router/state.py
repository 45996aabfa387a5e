"""The answer to `GET /router/engines`, of one router process or of several as one."""

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
    """As announced by the fleet."""
    down: bool
    """The breaker is open, see `memory.Engine.down`: a connection was refused, or its core said to be dead."""
    outstanding: int
    """Requests sent and not answered in full."""
    requests: int
    """Requests sent since the engine joined."""
    draining: bool = False
    """As announced by the fleet: only its own sessions still go there."""
    drained: bool = False
    """It is draining, nothing is in flight there, and no session lives there any more: it may go."""
    dp_rank: int | None = None
    """As announced by the fleet: a data-parallel rank of the server at `url`."""
    outstanding_tokens: int = 0
    """Prompt and expected tokens of the outstanding requests, as far as their headers say."""
    resident_tokens: int = 0
    """Context that lives there."""
    sessions: int = 0
    """Sessions that live there."""
    kv_usage: float = -1.0
    """Share of its KV cache in use, 0 to 1; -1: not known."""
    kv_capacity: int = 0
    """Tokens that its KV cache holds; 0: not known."""
    breaker_openings: int = 0
    """How often the breaker opened since the engine joined."""
    dead_answers: int = 0
    """Answers that said that its core is dead."""
    failure: str = ""
    """Cause that the last of them gave."""


@dataclass(frozen=True, slots=True)
class RouterState:
    """State of one process, or of several (`workers.merged`)."""

    epoch: int
    """-1 before the first membership."""
    gate_closed: bool
    held: int
    """Requests waiting for the gate, for an engine or for room on one."""
    sessions: int
    """Sessions that have a home."""
    requests: int
    """Requests taken in since `counted_since`, its own admin calls not counted."""
    engines: tuple[EngineLoad, ...]
    held_bytes: int = 0
    """Most bytes that are kept of requests that had to wait or came in pieces, until their answers begin."""
    held_by: Mapping[str, int] = field(default_factory=dict[str, int])
    """How many wait for what: see `penstock.router.dispatcher.Kind`."""
    moved_sessions: int = 0
    """Later turns that went to another engine than the one before."""
    placements: Mapping[str, int] = field(default_factory=dict[str, int])
    """Requests placed, by the rule that chose the engine."""
    policy: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """`policy`, `prefix_length` and `overload_threshold` that are in force; empty where the router does not say."""
    workers: tuple[int, ...] = ()
    """Process ids of those that serve."""
    counted_since: float = 0.0
    """Start of the process that started last, Unix time: a worker that ended took its counts along. 0: unknown."""
    in_step: bool = True
    """All of them are of this epoch; one that was started again has no engines at first."""
