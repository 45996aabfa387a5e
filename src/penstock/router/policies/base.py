"""What a policy sees, and what it answers.

The values are named tuples and not dataclasses: they are made for every request, in a quarter of the time. A policy
keeps nothing between calls and does no I/O. What has to be remembered (where a session lives, which engine holds a
prefix, where the other samples of a group went) is kept by `penstock.router.placement.Placement`, and comes with the
request. So the same policies run in the router and in the discrete-event fleet of `benchmarks/fleet_sim`.

Python's own hash of a string is salted anew in every process; TorchRL's balancer uses it, and two of its processes
send one prompt to two replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import lru_cache
from hashlib import blake2b
from operator import attrgetter
from typing import NamedTuple, Protocol, Self


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
    """Share of its KV cache in use, 0 to 1: as the engine itself said last, with what was placed there since on top;
    -1: not known."""
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
    home: EngineView | None = None
    """The engine, one of the snapshot's, where this session lives; None for a new one, or where that engine may not
    serve this request."""
    home_tokens: int = 0
    """Tokens of this session's context that are resident there."""
    known: bool = False
    """The session has had a turn before, even if its engine is lost: it is never made to wait."""
    prompt_tokens: int = 0
    """`X-Prompt-Tokens`; 0: not said."""
    expected_tokens: int = 0
    """What the answer is expected to add, all samples together: `X-Expected-Tokens`, the most it may, times the share
    of that which answers usually do add; 0: not said."""
    prefix_holders: tuple[PrefixHolder, ...] = ()
    """Engines that hold a prefix of this prompt, longest first; those that may not serve it included."""
    prefix: bytes | None = None
    """Hash of the prompt's beginning, of `prefix_length` tokens at most; None: not said."""
    group: tuple[tuple[str, int], ...] = ()
    """Where the other samples of `X-Group-ID` were placed: (engine, how many)."""


class Snapshot(NamedTuple):
    """The engines that may serve this request, at one moment: at least one. Build it with `of`."""

    engines: tuple[EngineView, ...]
    placed: int
    """Requests placed so far, by this process; what rotates, and what seeds a random choice."""
    resident_tokens: int
    """Of all `engines` together, so that no policy has to walk over them for a mean."""

    @classmethod
    def of(cls, engines: Iterable[EngineView], placed: int = 0) -> Self:
        """A snapshot of these engines."""
        views = tuple(engines)
        return cls(views, placed, sum([engine.resident_tokens for engine in views]))


class Defer(Enum):
    """Answers that are no engine."""

    PASS = "pass"  # noqa: S105 - no password
    """No opinion: ask the next policy of the list."""
    WAIT = "wait"
    """Hold the request until an engine has room; only for a request that opens a session."""
    GATED = "gated"
    """Hold the request until a gate opens: that of its session's engine, or of every engine that may serve it. No
    policy says so, only the placement."""


class ReadsPrefixes(IntEnum):
    """Which requests a policy wants `prefix_holders` and `prefix` of; they cost a few microseconds."""

    NEVER = 0
    OPENING = 1
    """Of those without a home."""
    ALWAYS = 2


class Policy(Protocol):
    """Picks one of the engines that may serve a request."""

    @property
    def sticky(self) -> bool:
        """Whether a session belongs to its engine: it waits for that engine's gate, and stays while it is drained."""
        ...

    @property
    def reads_prefixes(self) -> ReadsPrefixes:
        """Which requests it wants prefixes of."""
        ...

    def choose(self, snapshot: Snapshot, request: RequestView) -> EngineView | Defer:
        """One of `snapshot.engines`, or why none."""
        ...


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """What can be set about policies. `RouterConfig` has the same names and defaults."""

    prefix_length: int = 2048
    """Shortest shared prefix, in tokens, for which an engine is preferred."""
    overload_threshold: float = 1.5
    """`prefix-aware` leaves an engine alone that has more than so many times the mean of outstanding requests."""
    kv_admission: float = 0.92
    """New sessions wait while resident and expected context would exceed this share of every KV cache."""
    balance_factor: float = 1.1
    """An engine takes more as long as its resident tokens are at most so many times the mean, and `slack_tokens`."""
    slack_tokens: int = 8192
    seed: int = 0
    """Of random choices, and where rotation begins."""
    processes: int = 1
    """So many processes place requests on the same engines, each with about such a part of the load."""


_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """A 64-bit integer to another that looks unrelated: the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def draw(seed: int, counter: int, below: int) -> int:
    """The random number `counter` of the stream `seed`, in `[0, below)`: SplitMix64, which needs no state."""
    return mix64((seed * 0xD1B54A32D192ED03 + (counter + 1) * _GOLDEN) & _MASK) % below


@lru_cache(maxsize=4096)
def _hash64(name: bytes) -> int:
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little")


def rendezvous(key: bytes, engines: Sequence[EngineView]) -> EngineView:
    """Highest random weight hashing (Thaler and Ravishankar 1998): losing an engine moves only its own keys."""
    of_key = int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
    return max(engines, key=lambda engine: mix64(of_key ^ _hash64(engine.name.encode())))


def breaking_tie(engines: Sequence[EngineView], session_id: str | None, placed: int) -> EngineView:
    """One of equals: by rendezvous for a session, so that a restarted router finds it again; else in rotation."""
    if len(engines) == 1:
        return engines[0]
    if session_id is not None:
        return rendezvous(session_id.encode(), engines)
    return engines[placed % len(engines)]


Figure = Callable[[EngineView], int]
OUTSTANDING: Figure = attrgetter("outstanding")
RESIDENT_TOKENS: Figure = attrgetter("resident_tokens")


def lowest(engines: Sequence[EngineView], figure: Figure) -> Sequence[EngineView]:
    """Those of the engines, at least one, with the lowest figure."""
    figures = list(map(figure, engines))
    least = min(figures)
    if figures.count(least) == 1:
        return (engines[figures.index(least)],)
    return [engine for engine, value in zip(engines, figures, strict=True) if value == least]
