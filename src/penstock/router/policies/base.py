"""What a policy sees, and what it answers.

The values are named tuples and not dataclasses: they are made for every request, in a quarter of the time. A policy
keeps nothing between calls and does no I/O. What has to be remembered (where a session lives, which engine holds a
prefix, where the other samples of a group went) is kept by `penstock.router.placement.Placement`, and comes with the
request. So the same policies run in the router and in the discrete-event fleet of `penstock.sim`.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Protocol


class EngineView(NamedTuple):
    """What a policy sees of an engine."""

    name: str
    weight_version: int = 0
    outstanding: int = 0
    """Requests sent and not answered in full."""
    outstanding_tokens: int = 0
    """Prompt and expected tokens of those requests."""
    resident_tokens: int = 0
    """Context that lives there: of every session whose home it is, and of requests in flight without a session."""
    kv_usage: float = -1.0
    """Share of its KV cache in use, 0 to 1, as the engine itself said last; -1: not known."""
    kv_capacity: int = 0
    """Tokens that its KV cache holds; 0: not known."""


class PrefixHolder(NamedTuple):
    """An engine that has seen the beginning of this prompt."""

    engine: str
    tokens: int
    """Length of that beginning."""


class RequestView(NamedTuple):
    """What a policy sees of a request."""

    session_id: str | None = None
    """Header text of `X-Session-ID`; an integer id and its decimal text are one session."""
    home: str | None = None
    """The engine where this session lives; None for a new one, or where that engine may not serve this request."""
    home_tokens: int = 0
    """Tokens of this session's context that are resident there."""
    prompt_tokens: int = 0
    """`X-Prompt-Tokens`; 0: not said."""
    expected_tokens: int = 0
    """`X-Expected-Tokens`: most that the answer may add, all samples together; 0: not said."""
    prefix_holders: tuple[PrefixHolder, ...] = ()
    """Engines among the snapshot's that hold a prefix of this prompt, longest first."""
    group: tuple[tuple[str, int], ...] = ()
    """Where the other samples of `X-Group-ID` were placed: (engine, how many)."""


class Snapshot(NamedTuple):
    """The engines that may serve this request, at one moment: at least one."""

    engines: tuple[EngineView, ...]
    placed: int = 0
    """Requests placed so far, by this process; what rotates, and what seeds a random choice."""


class Defer(Enum):
    """Answers that are no engine."""

    PASS = "pass"  # noqa: S105 - no password
    """No opinion: ask the next policy of the list."""
    WAIT = "wait"
    """Hold the request until an engine has room; only for a request that opens a session."""


class Policy(Protocol):
    """Picks one of the engines that may serve a request."""

    def choose(self, snapshot: Snapshot, request: RequestView) -> EngineView | Defer:
        """One of `snapshot.engines`, or why none."""
        ...
