"""The life of an engine as the fleet sees it: one transition table, and the one place that changes a state.

Pure: no I/O, the clock is injected, so the whole table is tested without a process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Protocol, Self

from penstock.config import EngineConfig, ServerSpec
from penstock.engine.control import CoreState, EngineInfo
from penstock.errors import StateError
from penstock.router.membership import EngineEntry
from penstock.types import EngineStats, EngineUpdate, PauseMode
from penstock.weights.manifest import WeightManifest

logger = logging.getLogger(__name__)

Clock = Callable[[], float]
"""Monotonic seconds."""


class State(StrEnum):
    """Where an engine stands. Only SERVING, PAUSED and DRAINING engines are known to the router."""

    LAUNCHING = "launching"
    """Its process is starting, or its address has not answered yet."""
    SYNCING = "syncing"
    """It answers, and its weights are being confirmed to be of the fleet's version."""
    SERVING = "serving"
    """It takes requests."""
    PAUSED = "paused"
    """It holds its requests and makes no token."""
    DRAINING = "draining"
    """It gets no new request, ends those it has, and is about to stop. It still takes part in pauses and updates."""
    STOPPED = "stopped"
    """It left on purpose. Final."""
    DEAD = "dead"
    """It failed; it serves again only by way of LAUNCHING and SYNCING, or it is taken out of the fleet."""


TRANSITIONS: Mapping[State, frozenset[State]] = MappingProxyType(
    {
        State.LAUNCHING: frozenset({State.SYNCING, State.DEAD}),
        State.SYNCING: frozenset({State.SERVING, State.DEAD}),
        State.SERVING: frozenset({State.PAUSED, State.DRAINING, State.DEAD}),
        State.PAUSED: frozenset({State.SERVING, State.DRAINING, State.DEAD}),
        State.DRAINING: frozenset({State.STOPPED, State.DEAD}),
        State.STOPPED: frozenset(),
        State.DEAD: frozenset({State.LAUNCHING, State.STOPPED}),
    }
)
"""Every edge there is. Into SERVING lead only SYNCING (weights confirmed) and PAUSED."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change of state; `at` in seconds of the injected clock."""

    at: float
    old: State
    new: State
    reason: str


class Lifecycle:
    """The state of one engine and how it came to it."""

    def __init__(self, engine: str, *, clock: Clock = time.monotonic) -> None:
        self.engine = engine
        self.history: list[Change] = []
        """Every change so far, oldest first."""
        self._state = State.LAUNCHING
        self._reason = ""
        self._clock = clock

    @classmethod
    def told(cls, engine: str, state: State, reason: str) -> Self:
        """That of an engine of which another process says where it stands; it holds the table there."""
        life = cls(engine)
        life._state = state
        life.history.append(Change(life._clock(), state, state, reason))
        life._reason = reason
        return life

    @property
    def state(self) -> State:
        """Where the engine stands now."""
        return self._state

    @property
    def reason(self) -> str:
        """Why it stands there; empty before the first change."""
        return self._reason

    def explain(self, reason: str) -> None:
        """Say why the engine stays where it stands, in the place of why it came there."""
        if reason == self._reason:
            return
        self._reason = reason
        logger.warning("engine %s stays %s: %s", self.engine, self._state, reason)

    def to(self, new: State, reason: str) -> None:
        """Change the state, and log why.

        Raises:
            StateError: the table has no such edge; nothing was changed.
        """
        old = self._state
        if new not in TRANSITIONS[old]:
            allowed = ", ".join(sorted(TRANSITIONS[old])) or "nothing, it is final"
            raise StateError(
                f"engine {self.engine} cannot go from {old} to {new} ({reason}); from {old} leads: {allowed}"
            )
        self._state, self._reason = new, reason
        self.history.append(Change(self._clock(), old, new, reason))
        level = logging.WARNING if new is State.DEAD else logging.INFO
        logger.log(level, "engine %s: %s -> %s: %s", self.engine, old, new, reason)


SERVABLE = frozenset({State.SERVING, State.PAUSED, State.DRAINING})
"""States in which the engine has confirmed its weights and the router knows it."""


RANK = ".dp"
"""Between the name of a server and the number of one of its data-parallel ranks."""


class EngineControl(Protocol):
    """The control calls that a fleet makes; `engine.control.ControlClient` is the real one.

    Every method raises `EngineDeadError`, `DeadlineError` or `EngineHTTPError`, and `prepare_weights` also
    `WeightsError`.
    """

    async def info(self) -> EngineInfo: ...  # noqa: D102 - as in ControlClient, all of them
    async def state(self) -> CoreState: ...  # noqa: D102
    async def core_gone(self) -> None: ...  # noqa: D102
    async def health(self, timeout_s: float) -> None: ...  # noqa: D102
    async def stats(self) -> EngineStats: ...  # noqa: D102
    async def pause(  # noqa: D102
        self, mode: PauseMode, *, clear_cache: bool = True, timeout_s: float | None = None
    ) -> None: ...
    async def load_adapter(self, name: str, path: str, *, timeout_s: float) -> None: ...  # noqa: D102
    async def release(self) -> None: ...  # noqa: D102
    async def resume(self) -> None: ...  # noqa: D102
    async def abort(self) -> None: ...  # noqa: D102
    async def reset_prefix_cache(self) -> None: ...  # noqa: D102
    async def sleep(self, level: int) -> None: ...  # noqa: D102
    async def wake_up(self, tags: Sequence[str] | None) -> None: ...  # noqa: D102
    async def collective_rpc(  # noqa: D102
        self, method: str, timeout_s: float, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> list[Any]: ...
    async def init_weight_transfer(self, init_info: Mapping[str, Any]) -> None: ...  # noqa: D102
    async def native_update(self, update_info: Mapping[str, Any], *, version: int) -> None: ...  # noqa: D102
    async def join_group(self, group: Mapping[str, Any]) -> None: ...  # noqa: D102
    async def prepare_weights(self, manifest: WeightManifest) -> None: ...  # noqa: D102
    async def apply_weights(self, version: int, *, clear_cache: bool = True) -> EngineUpdate: ...  # noqa: D102
    async def close(self) -> None: ...  # noqa: D102


class EngineHandle(Protocol):
    """The process of an engine that this fleet launched; `engine.process.EngineProcess` is the real one."""

    @property
    def url(self) -> str: ...  # noqa: D102
    async def wait(self) -> int: ...  # noqa: D102
    async def stop(self, timeout_s: float) -> None: ...  # noqa: D102
    def kill(self) -> None: ...  # noqa: D102


@dataclass(slots=True, eq=False)
class Member:
    """One engine: where it is, how to speak to it, what it is, and what it was last known to serve."""

    name: str
    url: str
    control: EngineControl
    info: EngineInfo
    lifecycle: Lifecycle
    weight_version: int
    """The version that the engine itself has confirmed last."""
    api_key: str | None = field(default=None, repr=False)
    """What it asks for: the fleet's own key, or of a server that someone else started the one it was started with."""
    process: EngineHandle | None = None
    """None where someone else started it."""
    gpus: tuple[str, ...] = ()
    """It keeps them through its restarts; none: it takes what it finds."""
    returns: bool = False
    """Should it die, it is started anew."""
    leaving: bool = False
    """DRAINING, it gets not even later turns of sessions that live there."""
    ranks: int = 1
    """Its data-parallel ranks, each an engine of its own to the router; 1: it is one."""
    spec: ServerSpec | None = None
    """Someone else started it, and it may come back; None: it was launched, or is gone for good when it dies."""
    waits: bool = False
    """SYNCING, it waits for weights that nobody here has."""
    torn: str | None = None
    """Its weights are half of one version and half of another, since an update failed, in this instance of it."""

    warning: str = ""
    """What whoever attached it has to know."""
    foreign: int | None = None
    """`CoreState.foreign` as it was when nothing was wrong; None: not asked since a call of ours that may change it."""
    asleep: frozenset[str] = frozenset()
    """Memory tags that it was told to give back, and of which it has not said that it took them again."""

    def become(self, new: Member) -> None:
        """Take over where it is and what it is, from a start of the same engine under the same name."""
        self.url, self.control, self.info, self.process = new.url, new.control, new.info, new.process
        self.api_key = new.api_key
        self.weight_version, self.foreign = new.weight_version, None
        if new.process is not None:
            self.torn, self.asleep = None, frozenset()  # it has loaded them anew

    def entries(self) -> list[EngineEntry]:
        """What the router is told of it."""
        ranks = [None] if self.ranks == 1 else range(self.ranks)
        return [
            EngineEntry(
                self.name if rank is None else f"{self.name}{RANK}{rank}",
                self.url,
                self.weight_version,
                eligible=not self.leaving,
                draining=self.state is State.DRAINING,
                dp_rank=rank,
                max_model_len=self.info.max_model_len or None,
                api_key=self.api_key,
            )
            for rank in ranks
        ]

    @property
    def state(self) -> State:
        """Where it stands."""
        return self.lifecycle.state

    @property
    def coming(self) -> bool:
        """It does not serve, and will: who needs an engine may wait for it."""
        return self.returns and self.state in {State.DEAD, State.LAUNCHING, State.SYNCING}

    @property
    def updatable(self) -> bool:
        """The next update is for it too: it has the fleet's weights, or waits for some that can be had."""
        awaits = self.state is State.SYNCING and self.waits and self.info.capabilities.plugin
        return self.state in SERVABLE or awaits

    @property
    def layout(self) -> tuple[int, int, int]:
        """TP, PP and DP ranks; checksums can be compared among engines of one layout."""
        return self.info.tp, self.info.pp, self.info.dp


def updatable(members: Iterable[Member]) -> list[Member]:
    """Those that take part in an update, or still do."""
    return [member for member in members if member.updatable]


def why(members: Iterable[Member]) -> str:
    """How and why each stands where it does, but for those that left on purpose: `e0, e1 dead: REASON; e2 ...`."""
    names: dict[tuple[State, str], list[str]] = {}
    for member in members:
        if member.state is not State.STOPPED:
            names.setdefault((member.state, member.lifecycle.reason), []).append(member.name)
    return "; ".join(f"{', '.join(its)} {state}: {reason}" for (state, reason), its in names.items())


class Engines(Protocol):
    """Starts engines, and ends them; `launched_engines.LaunchedEngines` is the real one."""

    config: EngineConfig

    async def start(self, lifecycle: Lifecycle, gpus: Sequence[str]) -> Member: ...  # noqa: D102
    async def end(self, lifecycle: Lifecycle) -> None: ...  # noqa: D102
    async def place(self, taken: Sequence[Sequence[str]]) -> tuple[str, ...]: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine as `penstock status` shows it."""

    name: str
    url: str
    state: State
    reason: str
    """Why it is in this state."""
    weight_version: int
    stats: EngineStats | None
    """None where the engine does not say, or was not asked."""
