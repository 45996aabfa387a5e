"""What the engines of a fleet say of themselves: their state, and how much they have to do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeVar

from penstock.engine.capabilities import Capabilities
from penstock.errors import DeadlineError, EngineDeadError, EngineHTTPError, PenstockError, StateError, UserError
from penstock.fleet.fan_out import Call, FanOut, fan_out
from penstock.fleet.member import SERVABLE, EngineControl, EngineStatus, Member, State, why
from penstock.fleet.probe import Occupation
from penstock.router.admin_client import RouterState
from penstock.router.membership import EngineEntry
from penstock.types import EngineStats

STATS_S = 10.0
"""Deadline of reading an engine's metrics."""


async def statuses(roster: Roster, *, stats: bool = True) -> tuple[EngineStatus, ...]:
    """Every engine that ever joined, the dead too, in order; without `stats` none of them is asked."""
    asked = await fan_out(roster.live() if stats else (), lambda engine: engine.stats(), deadline_s=STATS_S)
    return tuple(
        EngineStatus(m.name, m.url, m.state, m.lifecycle.reason, m.weight_version, asked.results.get(m.name))
        for m in roster.members
    )


async def loads(roster: Roster, index: int | None) -> list[EngineStats]:
    """Of engine `index`, or of all that are alive.

    Raises:
        UserError: there is no engine of that index; `EngineDeadError`: it does not serve, or none does.
    """
    asked = await fan_out(_chosen(roster, index), lambda engine: engine.stats(), deadline_s=STATS_S)
    asked.raise_first()
    return list(asked.results.values())


def _chosen(roster: Roster, index: int | None) -> tuple[Member, ...]:
    members = roster.members
    if index is None:
        if not (live := roster.live()):
            raise EngineDeadError(f"no engine is left now ({why(members)})")
        return live
    if not 0 <= index < len(members):
        raise UserError(f"there is no engine {index}; the fleet has engines 0 to {len(members) - 1}")
    member = members[index]
    if member.state not in SERVABLE:
        raise EngineDeadError(f"it is {member.state}: {member.lifecycle.reason}", engine=member.name)
    return (member,)


logger = logging.getLogger(__name__)
T = TypeVar("T")

ROUTER_BACK_S = 30.0
"""How long a call waits for a router that is being restarted, which takes a fraction of a second on an idle machine."""

SILENCING_S = 2.0
"""How long an engine with torn weights, which somebody else started, has for being paused."""


class Admin(Protocol):
    """The router's side of control; `router.admin_client.RouterAdmin` is the real one."""

    async def set_engines(self, epoch: int, engines: Sequence[EngineEntry], cut: Sequence[str] = ()) -> None: ...  # noqa: D102
    async def gate(self, closed: bool) -> None: ...  # noqa: D102, FBT001 - the router's own signature
    async def engines(self) -> RouterState: ...  # noqa: D102


class Roster:
    """The members in the order they joined, and the router's view of them.

    The router always gets the full set under a growing epoch, so that it converges whatever was lost before.
    """

    def __init__(
        self,
        admin: Admin,
        *,
        version: int = 0,
        epoch: int = -1,
        closed: bool = False,
        by_rank: bool = True,
        gated: bool = True,
    ) -> None:
        self.by_rank = by_rank
        """The router can address data-parallel ranks of one server one by one."""
        self.members: tuple[Member, ...] = ()
        """Everyone who ever joined, the dead too: an engine keeps its index."""
        self.version = version
        """Weight version of the fleet: that of every engine in the router's set."""
        self.used = version
        """The greatest version under which a token may have been made: what did not commit has its number for good."""
        self.kept: frozenset[int] = frozenset()
        """Versions that were put in force with the KV cache kept."""
        self.checksums: Mapping[tuple[int, int, int], Collection[str]] = {}
        """What engines of a layout have said of the fleet's weights; empty where nobody has."""
        self.changes = 0
        """Grows with each change that was announced."""
        self.router_returns = False
        """Somebody starts the router anew when it ends, and calls `restore`."""
        self.in_doubt = False
        """A call to the router has failed, and may come into force late or not at all, until `restore` was heard."""
        self.occupation = Occupation()
        """Calls under way that may keep engines from answering others."""
        self.admin = admin
        self._gated = gated
        """The router has a gate."""
        self._tearing: set[EngineControl] = set()
        self._closed = closed
        self._confirmed: bool | None = None
        """What the router has said last of its gate; None: it was told, and has not answered."""
        self._epoch = epoch
        self._announced = False
        self._ended = False
        self._restored = 0
        self._said = 0
        self._telling = asyncio.Lock()
        self._news = asyncio.Event()

    def live(self) -> tuple[Member, ...]:
        """A snapshot of those whose weights are confirmed: SERVING, PAUSED or DRAINING."""
        return tuple(m for m in self.members if m.state in SERVABLE)

    def asked(self) -> list[tuple[str, Capabilities]]:
        """Engines that get requests, or may soon."""
        return [(m.name, m.info.capabilities) for m in self.members if m.state not in {State.DEAD, State.STOPPED}]

    def hopeless(self) -> bool:
        """Whether no engine is left and none is coming back, or the fleet ends."""
        return self._ended or (not self.live() and not any(m.coming for m in self.members))

    def check_hope(self) -> None:
        """Raise EngineDeadError where no engine is left and none is coming back, StateError where the fleet ends."""
        if self.hopeless():
            raise self.no_hope()

    def no_hope(self) -> PenstockError:
        """What `check_hope` raises."""
        if self._ended:
            return StateError("this fleet was torn down")
        return EngineDeadError(f"no engine is left, and none is coming back ({why(self.members)})")

    def end(self) -> None:
        """The fleet ends: nobody need wait for an engine any more."""
        self._ended = True
        self.announce()

    def keep_kv(self, version: int) -> None:
        """This version comes into force with the KV caches kept: tokens made under it say so."""
        self.kept |= {version}
        self.announce()  # clients in other processes label what they get by it, from the first token on

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
        member.leaving = False  # it died as it was to leave, and whoever wanted that has given it up
        if member.info.kv_kept:  # by who held it before
            self.kept |= {member.info.weight_version}
        self.enlist(member)
        self.announce()

    def enlist(self, member: Member) -> None:
        """It belongs to the fleet from now on, at the next index; what it may do is said by its state."""
        if member not in self.members:
            self.members = (*self.members, member)

    def commit(self, version: int, checksums: Mapping[tuple[int, int, int], Collection[str]] | None = None) -> None:
        """Every live engine has confirmed `version`: it is the fleet's from now on."""
        self.version = version
        self.used = max(self.used, version)
        self.checksums = checksums or {}
        for member in self.live():
            member.weight_version = version
        self.announce()

    def note_asleep(self, tags: frozenset[str]) -> None:
        """Every live engine is told to give back this memory, or has taken back all other."""
        for member in self.live():
            member.asleep = tags

    def announce(self) -> None:
        """Something changed that somebody may wait for with `until`."""
        self.changes += 1
        self._news.set()
        self._news = asyncio.Event()

    async def until(self, reached: Callable[[], bool], *, deadline_s: float | None = None) -> bool:
        """Wait until `reached()` is so; it is looked at after each change. False: it was not within the deadline."""
        try:
            async with asyncio.timeout(deadline_s):
                while not reached():
                    await self._news.wait()
        except TimeoutError:
            return False
        return True

    # --- the router --------------------------------------------------------------------------------------------------

    async def push(self) -> None:
        """Announce the full set to the router."""
        await self._tell(self._push)

    async def pass_on(self, what: str) -> None:
        """`push` what holds whatever the router says to it: where it fails, the router gets it from `check_router`."""
        try:
            await self.push()
        except PenstockError as error:
            logger.warning("the router was not told that %s: %s", what, error)

    async def gate(self, *, closed: bool) -> None:
        """Close or open the router's gate; in force when this returns."""
        self._closed = closed

        async def say() -> None:
            # An engine that is held would wait for the answer, behind all that the router has to pass on. One that
            # others keep up may have been started anew, with its gate open, and nobody here would know.
            known = self.router_returns and not self.in_doubt and self._confirmed is closed
            if not known:
                await self._say_gate(closed=closed)

        await self._tell(say)

    async def restore(self) -> None:
        """Bring a router, such as one that was started anew, to where the fleet has it; it opens its gate last."""
        async with self._telling:
            self._said += 1
            if closed := self._closed:
                await self._say_gate(closed=True)
            await self._push()
            if not closed:
                await self._say_gate(closed=False)
            self._restored += 1
            self.in_doubt = False
        self.announce()

    async def check_router(self, answer_s: float | None = None) -> RouterState:
        """What the router has, where it says so within `answer_s`; it is told again what it does not have as it should.

        Raises as `Admin.engines`, or TimeoutError. Where it cannot be told, the doubt stays.
        """
        quiet, said = not self._telling.locked(), self._said
        async with asyncio.timeout(answer_s):
            state = await self.admin.engines()
        same_gate = state.gate_closed == self._closed or not self._gated
        as_told = state.in_step and same_gate and state.epoch == self._epoch
        if (self.in_doubt or not as_told) and quiet and said == self._said:
            self.in_doubt = True
            try:
                await self.restore()
            except PenstockError as error:
                logger.debug("the router cannot be told its gate and engines again: %s", error)
            else:
                logger.info("the router was told its gate and engines again: it had not heard it, or had heard another")
        return state

    async def router_back(self) -> bool:
        """Wait until a router that could not be reached answers; False: nobody starts it anew, or it takes too long."""
        try:
            async with asyncio.timeout(ROUTER_BACK_S):
                while self.router_returns:
                    seen = self.changes
                    try:
                        await self.admin.engines()
                    except PenstockError:
                        await self.until(lambda since=seen: self.changes != since)
                    else:
                        return True
        except TimeoutError:
            pass
        return False

    async def _say_gate(self, *, closed: bool) -> None:
        self._confirmed = None
        await self.admin.gate(closed)
        self._confirmed = closed

    async def _push(self) -> None:
        self._epoch += 1
        entries = [entry for member in self.live() for entry in member.entries()]
        # A stopped process keeps its connections, and nobody may be able to end it: the router breaks them off.
        left = (m for m in self.members if m.state in {State.DEAD, State.STOPPED})
        cut = [entry.name for member in left for entry in member.entries()]
        try:
            await self.admin.set_engines(self._epoch, entries, cut)
        except StateError:  # somebody else spoke to this router since; the last word is ours
            if self._announced:
                logger.warning(
                    "somebody else has told this fleet's router its engines: two that update the same engines give "
                    "one version number to different weights; have one process hold the fleet, and others adopt it"
                )
            self._epoch = (await self.admin.engines()).epoch + 1
            await self.admin.set_engines(self._epoch, entries, cut)
        self._announced = True

    async def _tell(self, call: Callable[[], Awaitable[None]]) -> None:
        """Make a call to the router; where it is gone and comes back, `restore` has said it instead."""
        restored = self._restored
        try:
            async with self._telling:
                restored = self._restored  # one that was under way has said what was before this
                self._said += 1
                await call()
        except BaseException as error:
            self.in_doubt = True
            self.announce()
            if not self.router_returns or not isinstance(error, (DeadlineError, EngineDeadError)):
                raise
            await self.until(lambda: self._restored > restored or not self.router_returns, deadline_s=ROUTER_BACK_S)
            if self._restored == restored:
                raise

    # --- the engines -------------------------------------------------------------------------------------------------

    async def bury(self, member: Member, reason: str, *, torn: bool = False) -> None:
        """The engine failed: it is DEAD, leaves the router's set, and its process ends. The first reason stays.

        That its weights are torn may be learned from a later caller than the first.

        Args:
            member: it.
            reason: why.
            torn: nobody knows what weights it has. Where it is not ours to end, it is at least told to make no more
                tokens, for those who do not come by this router.
        """
        torn = torn or member.control in self._tearing
        if torn and member.torn is None:
            member.torn = member.info.instance
        if member.state not in {State.DEAD, State.LAUNCHING, State.STOPPED}:  # LAUNCHING, it has died, and starts anew
            await self._bury(member, reason)
        elif member.state is State.STOPPED:
            return
        if torn and member.process is None:
            told = await fan_out((member,), lambda engine: engine.release(), deadline_s=SILENCING_S)
            for error in told.failures.values():
                logger.warning("engine %s may make tokens of weights that nobody has confirmed: %s", member.name, error)

    async def _bury(self, member: Member, reason: str) -> None:
        member.lifecycle.to(State.DEAD, reason)
        if member.process is not None:
            member.process.kill()  # it may be half updated or hung: nobody must reach it past the router either
        self.announce()
        await self.pass_on(f"engine {member.name} died")  # it finds the engine gone until it is told

    def tears(self, call: Call[T]) -> Call[T]:
        """`call`, which exchanges an engine's weights: whoever buries the engine meanwhile, they are torn."""

        async def tearing(engine: EngineControl) -> T:
            self._tearing.add(engine)
            try:
                return await call(engine)
            finally:
                self._tearing.discard(engine)

        return tearing

    async def command(
        self,
        call: Call[T],
        *,
        what: str,
        deadline_s: float,
        refusable: bool = False,
        may_be_late: bool = False,
        tears: bool = False,
    ) -> FanOut[T]:
        """Make every live engine do something that changes its state; one that fails is buried at once.

        Args:
            call: the control call.
            what: names it in reasons, such as `pause`.
            deadline_s: seconds for each engine.
            refusable: an engine that answers with an HTTP error has changed nothing. It stays if all others refused
                too, and then the first refusal is raised.
            may_be_late: one that does not answer in time stays as well; what it has done, the caller undoes.
            tears: nobody knows what weights one that fails has.

        Raises:
            EngineDeadError: none is left, or was there, and none is coming back.
            EngineHTTPError: all refused, and `refusable`.
        """
        members = self.live()

        async def failed(member: Member, error: PenstockError) -> None:
            spared = (refusable and isinstance(error, EngineHTTPError)) or (
                may_be_late and isinstance(error, DeadlineError)
            )
            if not spared:
                await self.bury(member, f"{what} failed: {error}", torn=tears)

        made = self.tears(call) if tears else call
        asked = {m.name: m.control for m in members}
        outcome = await fan_out(members, made, deadline_s=deadline_s, on_failure=failed)
        same = (m for m in members if m.control is asked[m.name])  # others have been started anew
        failed_alive = [m for m in same if m.name in outcome.failures and m.state in SERVABLE]
        refused = [] if may_be_late else failed_alive
        if refused and outcome.results:
            for member in refused:  # the others did it: this engine is in another state than the fleet
                await self.bury(member, f"{what} failed: {outcome.failures[member.name]}")
        elif refused:
            raise outcome.failures[refused[0].name]
        if members and not self.live():
            raise EngineDeadError(f"{what}: no engine is left ({why(members)})")
        if not members:
            self.check_hope()
        return outcome
