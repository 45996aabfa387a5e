"""Operations that change every engine's state, one at a time: the queue, updates, and joining engines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.aio import Changes
from penstock.control_types import KV, UpdateReport
from penstock.engine.capabilities import Capability, require
from penstock.errors import PenstockError, StateError
from penstock.fleet.member import Member
from penstock.fleet.roster import Occupation, Roster
from penstock.fleet.stores import Stores
from penstock.fleet.update import Updater, check_kv
from penstock.rooms import plugged_in
from penstock.settings import FleetConfig
from penstock.weights.manifest import WeightManifest

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
T = TypeVar("T")

MEMORY_TAGS = frozenset({"weights", "kv_cache"})
"""Memory that an engine frees when it sleeps, and takes back by tag."""


class OperationQueue(Changes):
    """Runs operations one after another. A started one runs to its end even if its caller is cancelled."""

    def __init__(self, occupation: Occupation) -> None:
        super().__init__()
        self._occupation = occupation
        self.turns: list[object] = []
        """One token for each operation, in order; the first one runs and keeps its place until its end."""
        self._running: set[asyncio.Task[Any]] = set()
        self.closed = False

    def check_open(self) -> None:
        """Raise StateError after `close`."""
        if self.closed:
            raise StateError("this fleet was torn down")

    async def close(self) -> None:
        """Let no further operation begin, and cancel the one that runs."""
        self.closed = True
        if running := set(self._running):
            for task in running:
                task.cancel()
            await asyncio.wait(running)

    async def run(
        self,
        operation: Callable[[], Coroutine[Any, Any, T]],
        *,
        occupies: bool = True,
        early: Callable[[], bool] = bool,
    ) -> T:
        """Run `operation` in its turn.

        An operation that `occupies` engines may keep them from answering other calls. It may begin `early`, beside
        another, once that is true after a change.
        """
        begun = False

        async def in_turn() -> T:
            nonlocal begun
            async with self._turn(early):
                self.check_open()
                begun = True
                with self._occupation.going_on() if occupies else nullcontext():
                    return await operation()

        task = asyncio.create_task(in_turn())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self.closed and task.cancelled():  # by `close`, not by the caller
                raise StateError("this fleet was torn down in the middle of the operation") from None
            if not begun:
                task.cancel()
            raise

    @asynccontextmanager
    async def _turn(self, early: Callable[[], bool]) -> AsyncGenerator[None]:
        turn = object()
        self.turns.append(turn)
        try:
            await self.until(lambda: self.turns[0] is turn or early())
            yield
        finally:
            self.turns.remove(turn)
            self.announce()


class Operations:
    """Updates over a roster, joining engines, and the fleet's state; `fleet/pausing.py` extends it.

    A pause that waits for requests has a request's deadline, `request_timeout_s`. With too few engines, an update waits
    `recovery_timeout_s` for restarting ones. `paused`: the engines' initial state.
    """

    def __init__(
        self,
        roster: Roster,
        store: Stores,
        fleet: FleetConfig,
        *,
        control_timeout_s: float,
        request_timeout_s: float,
        recovery_timeout_s: float = 0.0,
        paused: bool = False,
    ) -> None:
        self.paused = paused
        """Whether the user has paused generation."""
        self.kv_stays = paused
        """Whether the pause in force may have left the KV caches as they were."""
        self.queue = OperationQueue(roster.occupation)
        self._roster = roster
        self._store = store
        self._min_engines = fleet.min_engines
        self._recovery_s = recovery_timeout_s
        self._control_s = control_timeout_s
        self._request_s = request_timeout_s
        self._updater = Updater(roster, store, self._gate_closed, fleet.min_engines, control_timeout_s)
        self.asleep: frozenset[str] = frozenset()
        self._usable_from = 0
        """Oldest version that can serve; sleep level 2 dropped older weights from memory."""
        self._updating = False
        self.native = plugged_in("native")(self, roster, control_timeout_s)
        self.adapters = plugged_in("adapters")(roster, self.queue, self.check_weights_awake, fleet, control_timeout_s)

    async def update(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int | None, *, kv: KV = "recompute"
    ) -> UpdateReport:
        """Update the weights once; see `Updater.run`. StateError: another update runs.

        If too few engines are left and some restart, it waits for those first.
        """
        return await self._update(lambda number: self._store.publish(number, named_tensors), version, kv)

    async def _update(self, publish: Callable[[int], WeightManifest], version: int | None, kv: KV) -> UpdateReport:
        self.queue.check_open()
        check_kv(kv)
        if self._updating:
            raise StateError("a weight update is under way; await it before the next one")

        async def run() -> UpdateReport:
            nonlocal begun
            begun = True
            try:
                self.check_weights_awake()
                self._require("plugin", "update_weights")
                number = self._roster.highest_version + 1 if version is None else version
                self._roster.check_version(number)
                if kv == "keep_in_flight":
                    self._require("kv_in_flight", f"update_weights with kv={kv!r}")
                return await self._updater.run(publish, version=number, kv=kv)
            finally:
                self._updating = False

        def enough_or_none_to_come() -> bool:
            members = self._roster.members
            return len(self._roster.live()) >= self._min_engines or not any(m.is_restarting for m in members)

        self._updating, begun = True, False
        try:
            await self._roster.until(enough_or_none_to_come, deadline_s=self._recovery_s)
            return await self.queue.run(run)
        finally:  # an update that has begun goes on without its cancelled caller
            if not begun:
                self._updating = False

    async def close(self) -> None:
        """Let no further operation begin, and cancel the one that runs."""
        await self.queue.close()
        self.adapters.close()

    def check_weights_awake(self) -> None:
        """Raise StateError while the engines' weights sleep."""
        if "weights" in self.asleep:
            raise StateError("the engines sleep; wake_up(['weights']) before an update")

    def _require(self, needed: Capability, operation: str) -> None:
        """Refuse an operation that some live engine cannot do, before asking any."""
        require(((m.name, m.info.capabilities) for m in self._roster.live()), needed, operation)

    @asynccontextmanager
    async def _gate_closed(self) -> AsyncGenerator[None]:
        """Close the gate for this block; then set it as the fleet's state requires."""
        try:
            await self._roster.gate(closed=True)
            yield
        finally:
            await self._set_gate()

    async def _set_gate(self) -> None:
        """Set the gate as the fleet's state requires, and send the engines' versions.

        If it fails, `Roster.check_router` sends them later: changes of the engines hold even if the router fails.
        """
        stale = self._roster.version < self._usable_from
        closed = self.paused or bool(self.asleep) or stale
        try:
            await self._roster.gate(closed=closed)
        except PenstockError as error:
            state, version = "closed" if closed else "open", self._roster.version
            message = "the router does not know yet that its gate is %s and its engines serve weight version %d: %s"
            logger.warning(message, state, version, error)

    async def wake(self, member: Member) -> None:
        """Wake a joining engine that sleeps and has to load weights or serve."""
        raise NotImplementedError

    async def bring_to_state(self, member: Member) -> None:
        """Make a joining engine sleep, pause or run; MissingCapabilityError: it cannot."""
        raise NotImplementedError
