"""An engine as the fleet sees it, and calls to one engine or many."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from penstock.control_types import EngineUpdate
from penstock.engine.capabilities import EngineInfo
from penstock.engine.control import ControlClient
from penstock.errors import DeadlineError, EngineError, PenstockError
from penstock.fleet.lifecycle import SERVABLE, Lifecycle, State, Substate
from penstock.router.membership import EngineEntry
from penstock.weights.manifest import WeightManifest

T = TypeVar("T")

Call = Callable[[ControlClient], Awaitable[T]]
RANK = ".dp"
"""Separator between a server's name and the number of a data-parallel rank."""


class EngineHandle(Protocol):
    """The process of a launched engine: `engine.launch.EngineProcess`, `ray_engines.RayEngine`."""

    @property
    def url(self) -> str: ...
    async def wait(self) -> int: ...
    async def stop(self, timeout_s: float) -> Sequence[int]: ...
    def kill(self) -> None: ...


@dataclass(slots=True, eq=False)
class Member:
    """One engine: its address, control client, properties, process, and last confirmed weights."""

    name: str
    url: str
    control: ControlClient
    info: EngineInfo
    lifecycle: Lifecycle
    weight_version: int
    """The version that it confirmed last."""
    api_key: str | None = field(default=None, repr=False)
    """The key it requires: the fleet's own, or the key of a server that others started."""
    process: EngineHandle | None = None
    """Its process; `None` if others started it."""
    gpus: tuple[str, ...] = ()
    """Its GPUs, kept through restarts; empty: it finds its own."""
    ranks: int = 1
    """Data-parallel ranks that the router addresses one by one; 1: it is one engine."""
    again: Callable[[], Awaitable[Member]] | None = None
    """Restarts it after its death, or joins it again if others started it; None: it stays dead."""
    torn: str | None = None
    """The instance that began to replace its weights and has not confirmed them, so they may mix two versions."""
    foreign: int | None = None
    """`CoreState.foreign` when it was last well; None: not asked since a call of ours that may change it."""
    asleep: frozenset[str] = frozenset()
    """Memory tags that it freed and has not confirmed to have taken back."""

    def adopt_process(self, new: Member) -> None:
        """Take over the address, control client and process of a restarted engine."""
        self.ranks = new.ranks if self.process is None else self.ranks
        self.url, self.control, self.info, self.process = new.url, new.control, new.info, new.process
        self.api_key = new.api_key
        self.weight_version, self.foreign = new.weight_version, None
        if new.process is not None:
            self.torn, self.asleep = None, frozenset()  # it has loaded its weights again

    def entries(self) -> list[EngineEntry]:
        """Return its entries for the router, one for each rank that the router addresses."""
        ranks = [None] if self.ranks == 1 else range(self.ranks)
        return [
            EngineEntry(
                self.name if rank is None else f"{self.name}{RANK}{rank}",
                self.url,
                self.weight_version,
                eligible=self.drain_mode is not Substate.ALL,
                draining=self.state is State.DRAINING,
                dp_rank=rank,
                max_model_len=self.info.max_model_len or None,
                api_key=self.api_key,
            )
            for rank in ranks
        ]

    @property
    def state(self) -> State:
        return self.lifecycle.state

    @property
    def drain_mode(self) -> Substate | None:
        """SESSIONS or ALL while it drains; else None."""
        return self.lifecycle.substate if self.state is State.DRAINING else None

    @property
    def awaiting_weights(self) -> bool:
        return self.lifecycle.substate is Substate.AWAITING_WEIGHTS

    @property
    def is_restarting(self) -> bool:
        """Whether it will serve without an update, so that a call may wait for it."""
        coming = self.state in {State.DEAD, State.LAUNCHING, State.SYNCING}
        return self.lifecycle.restarts and coming and not self.awaiting_weights

    def confirm(self, version: int) -> None:
        """Note that its weights are whole and of this version."""
        self.weight_version, self.torn = version, None

    def has(self, version: int) -> bool:
        """Return whether it has confirmed a version and its weights are not torn."""
        return self.weight_version == version and self.torn is None

    @property
    def updatable(self) -> bool:
        """Whether the next update includes it: it serves, or waits for weights it can take."""
        return self.state in SERVABLE or (self.awaiting_weights and self.info.capabilities.plugin)

    @property
    def layout(self) -> tuple[int, int, int]:
        """TP, PP and DP ranks. Checksums are comparable only among engines of one layout."""
        return self.info.tp, self.info.pp, self.info.dp


def updatable(members: Iterable[Member]) -> list[Member]:
    """Return the members that take part in the next update."""
    return [member for member in members if member.updatable]


def why(members: Iterable[Member]) -> str:
    """Describe the members' states and reasons: `e0, e1 dead: REASON; e2 ...`.

    STOPPED members are left out. A restarting engine has the reason of its death.
    """
    names: dict[tuple[State, str], list[str]] = {}
    for member in members:
        life = member.lifecycle
        returns = member.state in {State.LAUNCHING, State.SYNCING} and not member.awaiting_weights
        reason = life.deaths[-1] if returns and life.deaths else life.reason
        if member.state is not State.STOPPED:
            names.setdefault((member.state, reason), []).append(member.name)
    return "; ".join(f"{', '.join(its)} {state}: {reason}" for (state, reason), its in names.items())


# --- Calls to engines -------------------------------------------------------------------------------------------------


OnFailure = Callable[[Member, PenstockError], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class FanOut(Generic[T]):
    """Each engine's outcome by name, in the members' order; each is in one of the two mappings."""

    results: Mapping[str, T]
    failures: Mapping[str, PenstockError]


async def ask(member: Member, call: Call[T], *, deadline_s: float) -> T:
    """Return one engine's answer to `call`; every failure is a `PenstockError`."""
    try:
        async with asyncio.timeout(deadline_s):
            return await call(member.control)
    except TimeoutError as error:
        late = f"no answer within {deadline_s:g} s"
        raise DeadlineError(late, seconds=deadline_s, engine=member.name) from error
    except PenstockError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"answered something that cannot be read: {error!r}", engine=member.name) from error


async def put(engine: ControlClient, manifest: WeightManifest) -> EngineUpdate:
    """Let an engine take a committed version outside an update."""
    await engine.prepare_weights(manifest)
    return await engine.apply_weights(manifest.version)


async def fan_out(
    members: Sequence[Member], call: Call[T], *, deadline_s: float, on_failure: OnFailure | None = None
) -> FanOut[T]:
    """Make `call` on every member at once, and wait for every result or failure.

    After `deadline_s` seconds, an engine's outcome is a `DeadlineError`. `on_failure` is awaited as soon as an engine
    fails, while others may still work, unless the engine was restarted since it was asked.
    """
    results: dict[str, T] = {}
    failures: dict[str, PenstockError] = {}

    async def outcome(member: Member) -> None:
        control = member.control
        try:
            results[member.name] = await ask(member, call, deadline_s=deadline_s)
        except PenstockError as error:
            failures[member.name] = error
            if on_failure is not None and member.control is control:
                await on_failure(member, error)

    async with asyncio.TaskGroup() as group:
        for member in members:
            group.create_task(outcome(member))
    names = [member.name for member in members]
    return FanOut(
        {name: results[name] for name in names if name in results},
        {name: failures[name] for name in names if name in failures},
    )
