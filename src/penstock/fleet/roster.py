"""The engines of a fleet, the operations on them in turn, and their announcements to the router."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Generator, Iterable, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

from penstock.aio import Changes
from penstock.errors import DeadlineError, EngineDeadError, PenstockError, StateError
from penstock.fleet.lifecycle import SERVABLE, State
from penstock.fleet.member import Member, updatable, why
from penstock.rooms import plugged_in
from penstock.router.admin_client import Announcer
from penstock.router.membership import Membership

logger = logging.getLogger(__name__)
T = TypeVar("T")
Checksums = Mapping[tuple[int, int, int], Collection[str]]
"""Checksums of weights by engine layout."""

ROUTER_BACK_S = 30.0
"""Seconds that a call waits for a restarting router, which takes a fraction of a second on an idle machine."""

TICK_S = 1.0
"""Most seconds that count of one timer wait, since a blocked event loop makes a wait long."""


class Occupation(Changes):
    """Calls of ours under way that may keep engines' cores from answering others."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = 0
        """Number of calls begun so far."""
        self._calls = 0

    @contextmanager
    def going_on(self) -> Generator[None]:
        self._calls += 1
        self.begun += 1
        self.notify_all()
        try:
            yield
        finally:
            self._calls -= 1
            self.notify_all()

    @property
    def going(self) -> bool:
        return self._calls > 0

    async def over(self) -> None:
        await self.until(lambda: not self.going)

    async def without(self, seconds: float) -> None:
        """Return when `seconds` without such calls have passed, in total from now on.

        Seconds in which this event loop was blocked do not count: a trainer may compute in its thread, and answers that
        arrived in that time have not been read.
        """
        now = asyncio.get_running_loop().time
        while seconds > 0:
            await self.over()
            since, at_most = now(), min(seconds, TICK_S)
            interrupted = await self.until(lambda: self.going, deadline_s=at_most)
            seconds -= min(now() - since, at_most) if interrupted else at_most


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
            self.notify_all()


class Roster(Changes):
    """The members, and the router's view of them.

    The router always gets the full set under a growing epoch, so that it converges after any lost message.
    """

    def __init__(self, admin: Announcer, *, version: int = 0, closed: bool = False, by_rank: bool = True) -> None:
        super().__init__()
        self.by_rank = by_rank
        """Whether the router is ours, so that it can address data-parallel ranks of one server one by one."""
        self.members: tuple[Member, ...] = ()
        """Every engine that ever joined, dead ones included: an engine keeps its index."""
        self.version = version
        """Weight version of the fleet and of every engine in the router's set."""
        self.highest_version = version
        """Highest version under which a token may have been made, uncommitted updates included."""
        self.kv_kept_versions: frozenset[int] = frozenset()
        """Versions that came into force with the KV cache kept."""
        self.checksums: Checksums = {}
        """Those of the fleet's weights; empty if no engine has reported any."""
        self.router_returns = False
        """Whether a supervisor restarts the router when it ends, and calls `restore`."""
        self.occupation = Occupation()
        """Calls under way that may keep engines from answering others."""
        self.admin = admin
        self._closed = closed
        self.policy: Mapping[str, Any] = {}
        """Policy options that override the router's own."""
        self.epoch = -1
        """Epoch of the set that was sent last."""
        self.router_uncertain = True
        """Whether the last call to the router may or may not be in force: it failed, or is under way."""
        self.ended = False
        self.all_lost = asyncio.Event()
        """Set while no engine is left or coming back, or the fleet ends, so that requests wait in vain."""
        self.calling = asyncio.Lock()
        """Held during a call to the router."""

    def notify_all(self) -> None:
        if self.is_lost():
            self.all_lost.set()
        else:
            self.all_lost.clear()
        super().notify_all()

    def live(self) -> tuple[Member, ...]:
        """Return the members with confirmed weights: SERVING, PAUSED or DRAINING."""
        return tuple(m for m in self.members if m.state in SERVABLE)

    def updatable(self) -> list[Member]:
        return updatable(self.members)

    def is_lost(self) -> bool:
        """Return whether no engine is left or coming back, or the fleet ends."""
        return self.ended or (not self.live() and not any(m.is_restarting for m in self.members))

    def raise_if_lost(self) -> None:
        """Raise `lost_error` if no engine is left or coming back, or the fleet ends."""
        if self.is_lost():
            raise self.lost_error()

    def lost_error(self) -> PenstockError:
        """Return a request's EngineDeadError or, if the fleet ends, StateError."""
        if self.ended:
            return StateError("this fleet was torn down")
        return EngineDeadError(f"no engine is left, and none is coming back ({why(self.members)})")

    def end(self) -> None:
        """End every wait for an engine, since the fleet ends."""
        self.ended = True
        self.notify_all()

    def keep_kv(self, version: int) -> None:
        """Note that this version keeps the KV caches, so that its tokens are labelled."""
        self.kv_kept_versions |= {version}
        self.notify_all()  # clients in other processes need it to label tokens from the first one on

    def add(self, member: Member) -> None:
        """Give an engine the fleet's next index if it has none."""
        if member not in self.members:
            member.ranks = member.ranks if self.by_rank else 1  # a vllm-router sees it as one engine
            self.members = (*self.members, member)
            self.notify_all()

    def commit(self, version: int, confirmed: Iterable[Member], checksums: Checksums | None = None) -> None:
        """Make `version` the fleet's, after the engines `confirmed`, among them all live ones, have loaded it."""
        self.version = version
        self.highest_version = max(self.highest_version, version)
        self.checksums = checksums or {}
        for member in confirmed:
            member.confirm(version)
        self.notify_all()

    # --- the router --------------------------------------------------------------------------------------------------

    async def push_membership(self) -> None:
        """Put the full set, the gate and the policy in force at the router.

        If the router is gone and comes back, `restore` does it instead.
        """
        try:
            await self.restore()
        except (DeadlineError, EngineDeadError):
            await self.until(lambda: not self.router_uncertain or not self.router_returns, deadline_s=ROUTER_BACK_S)
            if self.router_uncertain:
                raise

    async def push_or_defer(self, what: str) -> None:
        """Push the membership; on failure log `what`, and `router_process.keep_in_step` repeats it."""
        try:
            await self.push_membership()
        except PenstockError as error:
            logger.warning("the router does not know yet that %s: %s", what, error)

    async def gate(self, *, closed: bool) -> None:
        """Close or open the router's gate; in force when this returns."""
        self._closed = closed
        await self.push_membership()

    async def restore(self) -> None:
        """Bring a router, such as a restarted one, to the fleet's state."""
        async with self.calling:
            known, self.router_uncertain = self.epoch >= 0, True
            self.epoch += 1
            wanted = self._membership(self.epoch)
            try:
                try:
                    await self.admin.announce(wanted)
                except StateError:  # another process has sent a newer set; this fleet's set must win
                    if known:
                        logger.warning(
                            "another process has sent this fleet's router its engines. Two processes that update the "
                            "same engines give one version number to different weights: let one own the fleet, and "
                            "others connect"
                        )
                    self.epoch = max(await self.admin.epochs()) + 1
                    await self.admin.announce(replace(wanted, epoch=self.epoch))
                self.router_uncertain = False
            finally:
                self.notify_all()

    def _membership(self, epoch: int) -> Membership:
        entries = tuple(entry for member in self.live() for entry in member.entries())
        # A stopped process keeps its connections and may not be ours to end, so the router breaks them.
        left = (m for m in self.members if m.state in {State.DEAD, State.STOPPED})
        cut = tuple(entry.name for member in left for entry in member.entries())
        return Membership(epoch, entries, self._closed, self.policy, cut)

    # --- the engines -------------------------------------------------------------------------------------------------

    async def mark_dead(self, member: Member, reason: str) -> None:
        """Make a failed engine DEAD, take it from the router, and kill its process.

        The first reason stays. A torn server of others is at least paused, for clients that do not use this router.
        """
        if member.state is State.STOPPED:
            return
        if member.state not in {State.DEAD, State.LAUNCHING}:  # LAUNCHING: it has died, and is being restarted
            member.lifecycle.to(State.DEAD, reason)
            if member.process is not None:
                member.process.kill()  # half updated or hung, it must not serve direct clients either
            self.notify_all()
            await self.push_or_defer(f"engine {member.name} died")
        if member.torn is not None and member.process is None:
            await plugged_in("attach.silence")(member)
