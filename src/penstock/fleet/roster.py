"""Who is in the fleet, and the one place that tells the router."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol, TypeVar

from penstock.errors import EngineDeadError, EngineHTTPError, PenstockError, StateError
from penstock.fleet.control import Call, FanOut, fan_out
from penstock.fleet.lifecycle import State
from penstock.fleet.member import SERVABLE, Member
from penstock.router.admin_client import RouterState
from penstock.router.membership import EngineEntry

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Admin(Protocol):
    """The router's side of control; `router.admin_client.RouterAdmin` is the real one."""

    async def set_engines(self, epoch: int, engines: Sequence[EngineEntry]) -> None: ...  # noqa: D102
    async def gate(self, closed: bool) -> None: ...  # noqa: D102, FBT001 - the router's own signature
    async def engines(self) -> RouterState: ...  # noqa: D102


class Roster:
    """The members in the order they joined, and the router's view of them.

    The router always gets the full set under a growing epoch, so that it converges whatever was lost before.
    """

    def __init__(self, admin: Admin, *, version: int = 0, epoch: int = -1) -> None:
        self.members: tuple[Member, ...] = ()
        """Everyone who ever joined, the dead too: an engine keeps its index."""
        self.version = version
        """Weight version of the fleet: that of every engine in the router's set."""
        self._admin = admin
        self._epoch = epoch
        self._pushing = asyncio.Lock()

    def live(self) -> tuple[Member, ...]:
        """A snapshot of those whose weights are confirmed: SERVING or PAUSED."""
        return tuple(m for m in self.members if m.state in SERVABLE)

    def admit(self, member: Member) -> None:
        """Let an engine that is SYNCING serve; the router learns of it with the next `push`.

        Raises:
            StateError: its weights are not of the fleet's version.
        """
        if member.weight_version != self.version:
            raise StateError(
                f"engine {member.name} has weight version {member.weight_version}, the fleet serves {self.version}"
            )
        member.lifecycle.to(State.SERVING, f"weight version {member.weight_version} confirmed")
        if member not in self.members:
            self.members = (*self.members, member)

    def commit(self, version: int) -> None:
        """Every live engine has confirmed `version`: it is the fleet's from now on."""
        self.version = version
        for member in self.live():
            member.weight_version = version

    async def push(self) -> None:
        """Announce the full set to the router."""
        async with self._pushing:
            self._epoch += 1
            entries = [EngineEntry(m.name, m.url, m.weight_version) for m in self.live()]
            try:
                await self._admin.set_engines(self._epoch, entries)
            except StateError:  # another process spoke to this router since; the last word is ours
                self._epoch = (await self._admin.engines()).epoch + 1
                await self._admin.set_engines(self._epoch, entries)

    async def gate(self, *, closed: bool) -> None:
        """Close or open the router's gate; in force when this returns."""
        await self._admin.gate(closed)

    async def bury(self, member: Member, reason: str) -> None:
        """The engine failed: it is DEAD, leaves the router's set, and its process ends. The first reason stays."""
        if member.state in {State.DEAD, State.STOPPED, State.DRAINING}:
            return
        member.lifecycle.to(State.DEAD, reason)
        if member.process is not None:
            member.process.kill()  # it may be half updated or hung: nobody must reach it past the router either
        try:
            await self.push()
        except PenstockError as error:
            # The state holds; the router gets the full set with the next push, and finds the engine gone until then.
            logger.warning("the router was not told that engine %s died: %s", member.name, error)

    async def command(self, call: Call[T], *, what: str, deadline_s: float, refusable: bool = False) -> FanOut[T]:
        """Make every live engine do something that changes its state; one that fails is buried at once.

        Args:
            call: the control call.
            what: names it in reasons, such as `pause`.
            deadline_s: seconds for each engine.
            refusable: an engine that answers with an HTTP error has changed nothing. It stays if all others refused
                too, and then the first refusal is raised.

        Raises:
            EngineDeadError: there were engines, and none is left.
            EngineHTTPError: all refused, and `refusable`.
        """
        members = self.live()

        async def failed(member: Member, error: PenstockError) -> None:
            if not (refusable and isinstance(error, EngineHTTPError)):
                await self.bury(member, f"{what} failed: {error}")

        outcome = await fan_out(members, call, deadline_s=deadline_s, on_failure=failed)
        refused = [m for m in members if m.name in outcome.failures and m.state in SERVABLE]
        if refused and outcome.results:
            for member in refused:  # the others did it: this engine is in another state than the fleet
                await self.bury(member, f"{what} failed: {outcome.failures[member.name]}")
        elif refused:
            raise outcome.failures[refused[0].name]
        if members and not self.live():
            reasons = "; ".join(f"{m.name}: {m.lifecycle.reason}" for m in members)
            raise EngineDeadError(f"{what}: no engine is left ({reasons})")
        return outcome
