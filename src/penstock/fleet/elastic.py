"""Engines that come and go while the others serve: add, drain, remove, replace."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from penstock.config import MOST_ENGINES, ServerSpec
from penstock.errors import DeadlineError, EngineDeadError, EngineStartError, PenstockError, StateError, UserError
from penstock.fleet.member import SERVABLE, Engines, Lifecycle, Member, State
from penstock.fleet.operations import Operations
from penstock.fleet.options import place_of, seconds
from penstock.fleet.roster import Roster
from penstock.fleet.supervise import Attached, Supervisor
from penstock.parsing import whole_number

logger = logging.getLogger(__name__)
T = TypeVar("T")

LOOK_S, LONGEST_LOOK_S = 0.05, 1.0
"""Seconds between the first two questions to the router for what it has under way on an engine, and between later ones,
at most. The router says it only when asked: a message for each last request would burden every one for a rare drain."""


class Elastic:
    """Changes the number of engines. No other engine, no request and no update is disturbed by it.

    Args:
        roster: the engines.
        operations: admits and withdraws them, in turn with updates.
        supervisor: watches those that joined.
        min_engines: so many stay.
        drain_timeout_s: how long an engine may go on with what it has.
        engines: starts new ones; None: someone else started these.
        attached: joins servers of others; None: there shall be none.
    """

    def __init__(
        self,
        roster: Roster,
        operations: Operations,
        supervisor: Supervisor,
        *,
        min_engines: int,
        drain_timeout_s: float,
        engines: Engines | None,
        attached: Attached | None = None,
    ) -> None:
        self._roster = roster
        self._operations = operations
        self._supervisor = supervisor
        self._min_engines = min_engines
        self._drain_s = drain_timeout_s
        self._engines = engines
        self._attached = attached
        self._numbers = itertools.count(_first_free(roster.members))
        self._placed: dict[Lifecycle, tuple[str, ...]] = {}
        """GPUs of those that start and are no members yet."""
        self._attaching: set[str] = set()
        """URLs of servers that are asked what they are and are no members yet."""
        self._departures: dict[Member, asyncio.Task[None]] = {}
        """Engines that are being ended, whoever waits for it. They have their GPUs until they are gone."""
        self._calls: set[asyncio.Task[Any]] = set()
        """What is under way for a caller."""
        self._closed = False

    async def close(self) -> None:
        """Let nothing further begin, and cut short what is under way; an engine that is being ended is ended."""
        self._closed = True
        for call in self._calls:
            call.cancel()
        if under_way := (*self._calls, *self._departures.values()):
            await asyncio.wait(under_way)

    def find(self, engine: str | int) -> Member:
        """An engine by name or index. Raises UserError where there is none."""
        members = self._roster.members
        if isinstance(engine, int) and not isinstance(engine, bool) and 0 <= engine < len(members):
            return members[engine]
        for member in members:
            if member.name == engine:
                return member
        raise UserError(f"there is no engine {engine!r}; the fleet has {', '.join(m.name for m in members)}")

    @property
    def starting(self) -> tuple[str, ...]:
        """Names of engines that start, and are no members yet."""
        return tuple(life.engine for life in self._placed)

    async def add(self, count: int) -> tuple[str, ...]:
        """Start engines and let them serve, once they have the fleet's weights; returns their names.

        Those that have started join even if this call is cancelled then.

        Raises:
            StateError: the engines of this fleet were started by someone else.
            ConfigError: there is no GPU for them; nothing was started.
            EngineStartError: of the first that did not start; the others serve.
        """
        return await self._until_closed(self._add(count))

    async def _add(self, count: int) -> tuple[str, ...]:
        engines = self._starting()
        room = MOST_ENGINES - sum(member.state is not State.STOPPED for member in self._roster.members)
        whole_number(count, "the number of engines to add", least=1, most=max(1, room))
        lives = [Lifecycle(f"e{next(self._numbers)}") for _ in range(count)]
        try:
            for life in lives:
                self._placed[life] = await self._place(engines)
            started = [asyncio.create_task(self._start(engines, life, self._placed[life])) for life in lives]
            try:
                await asyncio.wait(started)
            finally:
                for task in started:
                    task.cancel()
                await asyncio.gather(*started, return_exceptions=True)
            return tuple(task.result() for task in started)
        finally:
            for life in lives:
                self._placed.pop(life, None)

    async def look(self) -> None:
        """Have every engine asked whether it is well; see `Supervisor.look`."""
        await self._supervisor.look()

    async def attach(self, servers: Sequence[ServerSpec]) -> tuple[str, ...]:
        """Let servers of others serve in this fleet too; returns their names.

        One that has other weights than the fleet gets them, where it has our plugin and they are here; else it waits
        for an update, and serves nothing before. Those that have answered join even if this call is cancelled then.

        Raises:
            UserError: one belongs to this fleet already; nothing was done.
            PenstockError: of the first that does not answer, or is no engine; the others serve.
        """
        return await self._until_closed(self._attach(servers))

    async def _attach(self, servers: Sequence[ServerSpec]) -> tuple[str, ...]:
        if self._attached is None:
            raise StateError("this fleet takes no servers of others")
        here = {place_of(member.url) for member in self._roster.members if member.state is not State.STOPPED}
        if known := [spec.url for spec in servers if place_of(spec.url) in here | self._attaching]:
            raise UserError(f"the server {known[0]} belongs to this fleet already; remove it first")
        urls = {place_of(spec.url) for spec in servers}
        self._attaching |= urls
        joins = [asyncio.create_task(self._join(self._attached, spec)) for spec in servers]
        try:
            await asyncio.gather(*joins, return_exceptions=True)  # cancelled, it cancels them
        finally:
            self._attaching -= urls
        return tuple(task.result() for task in joins)

    async def drain(self, engine: str | int, timeout_s: float | None = None) -> bool:
        """Send an engine no new session, and wait until it has ended what lives there; it stays DRAINING.

        Later turns of sessions that live there still go there, until they finish or `router.session_ttl_s` has passed.

        Args:
            engine: name or index.
            timeout_s: default: `fleet.drain_timeout_s`.

        Returns:
            False where it had some left at the end of that time; they go on.

        Raises:
            UserError: fewer than `min_engines` would be left.
            StateError: it does not serve.
        """
        return await self._until_closed(self._drain(self.find(engine), seconds(timeout_s)))

    async def _drain(self, member: Member, timeout_s: float | None) -> bool:
        if member.state not in SERVABLE:
            raise StateError(f"engine {member.name} does not serve, it is {member.state}: {member.lifecycle.reason}")
        await self._withdraw(member, self._min_engines)
        return await self._until_idle(member, timeout_s, sessions=True)

    async def remove(self, engine: str | int, timeout_s: float | None = None) -> None:
        """Send an engine no request at all, and end it when it has ended those that it has; it is STOPPED.

        Sessions that live there go on elsewhere, and so do requests that are under way after `timeout_s`. One that is
        dead or starting is taken out at once; the last one that is coming back is not. Once its end has begun, it goes
        on to that even if this call is cancelled.

        Raises:
            UserError: fewer than `min_engines` would be left.
            StateError: it has left already.
        """
        await self._until_closed(self._remove(self.find(engine), self._min_engines, seconds(timeout_s)))

    async def replace(self, engine: str | int, timeout_s: float | None = None) -> str:
        """A new engine in the place of one; returns its name.

        The new one serves before the old one leaves, but where it needs the GPUs of the old one.

        Raises:
            StateError: it has left already, or someone else started it.
            EngineStartError: the new one did not start. The old one serves on, unless its GPUs were needed.
        """
        return await self._until_closed(self._replace(self.find(engine), seconds(timeout_s)))

    async def _replace(self, member: Member, timeout_s: float | None) -> str:
        engines = self._starting()
        self._check_there(member)
        if member.spec is not None:  # its GPUs are not ours to give to another
            raise StateError(f"engine {member.name} was started by someone else; add one, then remove it")
        try:
            await self._place(engines)
        except UserError:  # no GPU is free
            logger.info("engine %s leaves before another takes its GPUs", member.name)
            await self._remove(member, 0, timeout_s)
            (name,) = await self._add(1)
            return name
        (name,) = await self._add(1)
        await self._remove(member, 0, timeout_s)
        return name

    async def _until_closed(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns; it is cancelled with its caller. StateError where the fleet ends before it."""
        if self._closed:
            work.close()
            raise StateError("this fleet was torn down")
        call = asyncio.create_task(work)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            await asyncio.wait((call,))
        except asyncio.CancelledError:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            raise
        if call.cancelled():
            raise StateError("this fleet was torn down in the middle of the call")
        return call.result()

    async def _start(self, engines: Engines, life: Lifecycle, gpus: Sequence[str]) -> str:
        try:
            member = await engines.start(life, gpus)
        except BaseException:
            try:
                await engines.end(life)  # what was set aside for it is another's now
            except PenstockError as error:
                logger.warning("engine %s did not start, and did not end in good order: %s", life.engine, error)
            raise
        # From here on it joins, and returns where it dies, as any other; a caller who gives up leaves it to that.
        member.returns = True
        self._roster.enlist(member)
        self._supervisor.watch(member)
        limit_s = engines.config.start_timeout_s
        if not await self._roster.until(lambda: not member.coming, deadline_s=limit_s):
            raise EngineStartError(
                f"it has started and not joined the fleet within {limit_s:g} s (engine.start_timeout_s), and is tried "
                f"again: {member.lifecycle.reason}",
                engine=member.name,
            )
        if member.state is State.DEAD:
            raise EngineStartError(f"it was to join the fleet and died: {member.lifecycle.reason}", engine=member.name)
        if member.state is State.SYNCING:
            logger.warning("engine %s joins with the next weight update: nobody has the present weights", member.name)
        return member.name

    async def _join(self, attached: Attached, spec: ServerSpec) -> str:
        member = await attached.join(Lifecycle(f"e{next(self._numbers)}"), spec, self._roster.members)
        if not self._roster.by_rank:
            member.ranks = 1
        self._roster.enlist(member)
        self._supervisor.watch(member)
        await self._roster.until(lambda: member.waits or member.state is not State.SYNCING)
        if member.state is State.DEAD:
            raise EngineStartError(f"it was to join the fleet and died: {member.lifecycle.reason}", engine=member.name)
        if member.waits:
            logger.warning("engine %s waits for weight version %d", member.name, self._roster.version)
        return member.name

    async def _until_idle(self, member: Member, timeout_s: float | None, *, sessions: bool) -> bool:
        try:
            async with asyncio.timeout(self._drain_s if timeout_s is None else timeout_s):
                look_s = LOOK_S
                while await self._busy(member, sessions=sessions):
                    await self._roster.until(lambda: member.state not in SERVABLE, deadline_s=look_s)
                    look_s = min(1.5 * look_s, LONGEST_LOOK_S)
        except TimeoutError:
            return False
        return True

    async def _busy(self, member: Member, *, sessions: bool) -> bool:
        """Whether requests are under way on an engine, or sessions live there; not so where it serves no longer."""
        if member.state not in SERVABLE:
            return False
        try:
            router = await self._roster.admin.engines()
        except (DeadlineError, EngineDeadError):
            if not self._roster.router_returns:
                raise
            return True  # nobody can say before it is back
        own = {entry.name for entry in member.entries()}
        return any(
            load.outstanding > 0 or (sessions and load.sessions > 0) for load in router.engines if load.name in own
        )

    async def _remove(self, member: Member, least: int, timeout_s: float | None) -> None:
        self._check_there(member)
        await self._withdraw(member, least, wholly=True)
        if not await self._until_idle(member, timeout_s, sessions=False):
            logger.warning("engine %s leaves with requests under way, which go on elsewhere", member.name)
        await self._end(member)

    async def _end(self, member: Member) -> None:
        """Take an engine out and end it. Half of that would leave an engine that nobody can end."""
        if (departure := self._departures.get(member)) is None:
            self._check_there(member)

            def over(task: asyncio.Task[None]) -> None:
                del self._departures[member]
                if not task.cancelled() and (error := task.exception()) is not None:
                    logger.warning("engine %s did not leave in good order: %s", member.name, error)

            departure = asyncio.create_task(self._depart(member), name=f"end-{member.name}")
            self._departures[member] = departure
            departure.add_done_callback(over)
        await asyncio.shield(departure)

    async def _depart(self, member: Member) -> None:
        async with AsyncExitStack() as steps:  # each is taken, whatever became of those before it
            steps.push_async_callback(member.control.close)
            if self._engines is not None:
                steps.push_async_callback(self._engines.end, member.lifecycle)
            steps.push_async_callback(self._dismiss, member)
            await self._supervisor.release(member)

    async def _withdraw(self, member: Member, least: int, *, wholly: bool = False) -> None:
        """Let an engine take nothing new: it is DRAINING, if it was not so already; dead, it is not waited for.

        Args:
            member: it.
            least: so many others must be left.
            wholly: not even later turns of sessions that live there.

        Raises:
            UserError: fewer than `least` others would be left. For one that is being started anew others that are
                count too, since it serves no more than they do.
        """

        async def run() -> None:
            if member.state is State.DRAINING:
                if wholly and not member.leaving:
                    member.leaving = True
                    member.lifecycle.explain("is to leave")
                await self._roster.push()
            returns = member.coming
            if not returns and member.state not in {State.SERVING, State.PAUSED}:
                return
            others = [m for m in self._roster.members if m is not member]
            left = [m for m in others if m.state in {State.SERVING, State.PAUSED} or (returns and m.coming)]
            if len(left) < least:
                raise UserError(
                    f"without engine {member.name} {len(left)} would be left, and min_engines is {least}; add one "
                    "first, or replace it"
                )
            if returns:  # nobody may wait for it any more; whoever dismisses it ends it
                member.returns = False
                self._roster.announce()
                return
            member.lifecycle.to(State.DRAINING, "is to leave" if wholly else "takes no new session")
            member.leaving = wholly
            self._roster.announce()
            await self._roster.push()

        await self._operations.turns.take(run)

    async def _dismiss(self, member: Member) -> None:
        """Take an engine out of the fleet for good: it is STOPPED, and the router does not know it any more."""

        async def run() -> None:
            if member.state in {State.LAUNCHING, State.SYNCING}:
                member.lifecycle.to(State.DEAD, "taken out before it served")
            elif member.state in {State.SERVING, State.PAUSED}:  # its admission had begun, and so came to its end
                member.lifecycle.to(State.DRAINING, "taken out as it came back")
            member.lifecycle.to(State.STOPPED, "taken out of the fleet")
            member.returns = False
            self._roster.announce()
            await self._roster.pass_on(f"engine {member.name} has left")

        await self._operations.turns.take(run)

    def _check_there(self, member: Member) -> None:
        if member.state is State.STOPPED:
            raise StateError(f"engine {member.name} has left the fleet already")

    def _starting(self) -> Engines:
        if self._engines is None:
            raise StateError("the engines of this fleet were started by someone else, and so are new ones")
        return self._engines

    async def _place(self, engines: Engines) -> tuple[str, ...]:
        ours = (m for m in self._roster.members if m.spec is None)  # others have nothing of what we share out
        there = (m for m in ours if m.state is not State.STOPPED or m in self._departures)
        return await engines.place([*(m.gpus for m in there), *self._placed.values()])


def _first_free(members: Iterable[Member]) -> int:
    """The least N so that no engine has the name `eN` or one with a greater number; a router may have given them."""
    numbers = (re.fullmatch(r"e(\d+)", member.name) for member in members)
    return 1 + max((int(match[1]) for match in numbers if match is not None), default=-1)
