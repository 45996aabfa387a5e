"""One engine as its fleet holds it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.config import EngineConfig, ServerSpec
from penstock.engine.control import CoreState, EngineInfo
from penstock.fleet.lifecycle import Lifecycle, State
from penstock.router.membership import EngineEntry
from penstock.types import EngineStats, EngineUpdate, PauseMode
from penstock.weights.manifest import WeightManifest

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
