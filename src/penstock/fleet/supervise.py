"""How often a dead process is started anew, and how long is waited before.

Pure: the clock is injected, so it is tested in virtual time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.aio import all_or_first_error, cancelled
from penstock.config import FleetConfig, ServerSpec
from penstock.engine.control import CoreState
from penstock.engine.request import ClientState
from penstock.errors import DeadlineError, PenstockError, StateError
from penstock.fleet.fan_out import fan_out
from penstock.fleet.member import SERVABLE, Clock, EngineControl, Engines, Lifecycle, Member, State
from penstock.fleet.probe import CoreSilentError, probe
from penstock.fleet.roster import Roster

MAX_BACKOFF_S = 120.0


@dataclass(slots=True)
class RestartBudget:
    """Restarts of one process: each after twice the wait, and without end unless `max_restarts` is set."""

    max_restarts: int | None
    """So many in any `window_s` seconds."""
    window_s: float
    """After so many seconds without a restart the wait begins anew."""
    backoff_s: float
    """Wait before the first restart."""
    clock: Clock = time.monotonic
    _spent: deque[float] = field(default_factory=deque[float], init=False)
    _last: float = field(default=-math.inf, init=False)
    _wait_s: float = field(default=0.0, init=False)

    def left(self) -> bool:
        """Whether there is a restart to take now."""
        if self.max_restarts is None:
            return True
        while self._spent and self._spent[0] <= self.clock() - self.window_s:
            self._spent.popleft()
        return len(self._spent) < self.max_restarts

    def spend(self) -> float | None:
        """Take one restart; returns the seconds to wait before it, or None where the budget is exhausted."""
        if not self.left():
            return None
        now = self.clock()
        fresh = self._last <= now - self.window_s
        self._wait_s = min(self.backoff_s if fresh else 2 * self._wait_s, MAX_BACKOFF_S)
        self._last = now
        if self.max_restarts is not None:
            self._spent.append(now)
        return self._wait_s


logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""How long an engine has to say that it is well where another has died. Who does not is left to the usual checks."""

WATCHED = SERVABLE | {State.SYNCING}


class Attached(Protocol):
    """Joins servers of others; `attach.AttachedServers` is the real one."""

    async def join(  # noqa: D102
        self, lifecycle: Lifecycle, spec: ServerSpec, beside: Sequence[Member] = ()
    ) -> Member: ...
    def serve(self, client: ClientState, roster: Roster) -> None: ...  # noqa: D102


class Supervisor:
    """Watches every member that it is given, until `release` or `stop`.

    Args:
        roster: where a death is told.
        admit: brings an engine that is SYNCING to the fleet's weights and lets it serve.
        mend: puts right what somebody else did to an engine, given what its core says.
        fleet: intervals and budgets.
        engines: starts dead engines anew; None: they were started by someone else.
        attached: joins those of someone else again that answer; None: they stay dead.
        clock: of the budgets, in seconds.
        sleep: waits before a restart.
    """

    def __init__(
        self,
        roster: Roster,
        *,
        admit: Callable[[Member], Awaitable[None]],
        mend: Callable[[Member, CoreState], Awaitable[None]],
        fleet: FleetConfig,
        engines: Engines | None = None,
        attached: Attached | None = None,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._roster = roster
        self._admit = admit
        self._mend = mend
        self._fleet = fleet
        self._engines = engines
        self._attached = attached
        self._clock = clock
        self._sleep = sleep
        self._guards: dict[Member, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._stopped = False

    def watch(self, member: Member) -> None:
        """Begin to watch an engine: its process where it is ours, its health in any case. SYNCING, it is admitted.

        Raises:
            StateError: nobody is watched any more.
        """
        if self._stopped:
            raise StateError(f"engine {member.name} cannot join: this fleet was torn down")

        def over(guard: asyncio.Task[None]) -> None:
            if not guard.cancelled() and (error := guard.exception()) is not None:
                logger.error("engine %s is watched no more: %r", member.name, error, exc_info=error)
                member.returns = False
                self._roster.announce()

        guard = self._guards[member] = asyncio.create_task(self._guard(member), name=f"guard-{member.name}")
        guard.add_done_callback(over)

    async def release(self, member: Member) -> None:
        """Stop watching an engine: whatever happens to it now is meant."""
        if (guard := self._guards.pop(member, None)) is not None:
            await cancelled(guard)

    async def look(self) -> None:
        """Ask every engine now whether it is well, where a request has seen one die; returns when that is known.

        A vLLM whose core has died answers requests with errors for up to a second, at once: to a router it is the least
        busy of all, and each request would meet it several times. So the core is asked too.
        """
        if self._stopped:
            return
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="look-at-engines")
        await asyncio.shield(self._looking)

    async def stop(self) -> None:
        """Stop watching, for good. Raises what broke a watch, if something did."""
        self._stopped = True
        if self._looking is not None:
            await cancelled(self._looking)
        guards = tuple(self._guards.values())
        self._guards.clear()
        for guard in guards:
            guard.cancel()
        if guards:
            await asyncio.wait(guards)  # cancelled once more meanwhile, one would leave its own tasks behind
        for guard in guards:
            await cancelled(guard)

    async def _guard(self, member: Member) -> None:
        budget = RestartBudget(
            self._fleet.max_restarts, self._fleet.restart_window_s, self._fleet.restart_backoff_s, self._clock
        )
        while True:
            # What dies has to be known as coming back from its first moment on, or someone would give up in between.
            launched = member.spec is None and self._engines is not None
            member.returns = launched and budget.left()
            await self._until_dead(member)
            if member.spec is not None and self._attached is not None:
                if await self._rejoin(member, member.spec, self._attached, budget):
                    continue
                break
            if not launched or self._engines is None or not await self._start_anew(member, self._engines, budget):
                break
        member.returns = False
        self._roster.announce()
        if self._engines is not None or member.spec is not None:
            logger.error(
                "engine %s stays dead: it died again after %s restarts within %g s (fleet.max_restarts); the last "
                "reason: %s", member.name, self._fleet.max_restarts, self._fleet.restart_window_s,
                member.lifecycle.reason,
            )  # fmt: skip

    # --- death -------------------------------------------------------------------------------------------------------

    async def _until_dead(self, member: Member) -> None:
        """Return when the engine is DEAD, and gone where its process is ours. A watch that breaks is its death."""
        watches: list[Coroutine[Any, Any, None]] = [self._until_gone(member), self._until_unwell(member)]
        if member.state is State.SYNCING:
            watches.append(self._join(member))
        tasks = [asyncio.create_task(watch, name=f"watch-{member.name}") for watch in watches]
        gone, *watching = tasks
        try:
            while not gone.done():
                await asyncio.wait((gone, *watching), return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in watching if task.done()]:
                    watching.remove(task)
                    await self._bury_if_broken(member, task)
            await gone
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in watching:
                await self._bury_if_broken(member, task)

    async def _until_gone(self, member: Member) -> None:
        if member.process is None:
            await self._roster.until(lambda: member.state not in WATCHED)
            return
        status = await member.process.wait()
        await self._roster.bury(member, f"its process exited with status {status}")

    async def _bury_if_broken(self, member: Member, watch: asyncio.Task[None]) -> None:
        if not watch.cancelled() and (error := watch.exception()) is not None:
            logger.error("a watch of engine %s broke: %r", member.name, error, exc_info=error)
            await self._roster.bury(member, f"its watch broke: {error!r}")

    async def _until_unwell(self, member: Member) -> None:
        """Probe an engine now and then, and at once when its core's connection breaks, until it is DEAD."""
        interval_s = self._fleet.health_interval_s
        gone = asyncio.create_task(member.control.core_gone(), name=f"core-{member.name}")
        try:
            while member.state in WATCHED:
                if gone.done():
                    await asyncio.sleep(interval_s)
                else:
                    await asyncio.wait((gone,), timeout=interval_s)
                try:
                    said = await probe(member.control, self._roster.occupation, hang_s=self._fleet.hang_timeout_s)
                except CoreSilentError as error:
                    if member.state in SERVABLE:  # what brings one in that is SYNCING has deadlines of its own
                        await self._roster.bury(member, str(error))
                except PenstockError as error:
                    await self._roster.bury(member, f"health check failed: {error}")
                else:
                    if said is not None:
                        await self._mend(member, said)
        finally:
            await cancelled(gone)

    async def _look(self) -> None:
        async def failed(member: Member, error: PenstockError) -> None:
            if not isinstance(error, DeadlineError):
                await self._roster.bury(member, f"health check failed: {error}")

        async def ask(engine: EngineControl) -> None:
            await all_or_first_error((engine.health(LOOK_S), engine.state()))

        await fan_out(self._roster.live(), ask, deadline_s=LOOK_S, on_failure=failed)

    async def _join(self, member: Member) -> None:
        try:
            await self._admit(member)
        except PenstockError as error:
            await self._roster.bury(member, f"could not join: {error}")

    async def _rejoin(self, member: Member, spec: ServerSpec, attached: Attached, budget: RestartBudget) -> bool:
        """Wait until a DEAD engine of someone else answers, as often as the budget goes; True: it is SYNCING."""
        while (wait_s := budget.spend()) is not None:
            await self._sleep(wait_s)
            while not await self._well(member):
                await self._sleep(self._fleet.health_interval_s)
            member.lifecycle.to(State.LAUNCHING, "answers again")
            try:
                new = await attached.join(member.lifecycle, spec, [member])
            except PenstockError:
                continue
            old = member.control
            member.become(new)
            member.ranks = new.ranks
            self._roster.announce()
            await old.close()
            return True
        return False

    async def _well(self, member: Member) -> bool:
        try:
            await member.control.health(self._fleet.hang_timeout_s)
        except PenstockError:
            return False
        return True

    # --- return ------------------------------------------------------------------------------------------------------

    async def _start_anew(self, member: Member, engines: Engines, budget: RestartBudget) -> bool:
        """Start a DEAD engine, again and again as far as the budget goes; True: it is SYNCING."""
        while (wait_s := budget.spend()) is not None:
            member.returns = True
            logger.info("engine %s is started anew in %g s", member.name, wait_s)
            await self._sleep(wait_s)
            member.lifecycle.to(State.LAUNCHING, "started anew")
            self._roster.announce()
            try:
                new = await engines.start(member.lifecycle, member.gpus)
            except PenstockError as error:
                if member.state is not State.DEAD:
                    member.lifecycle.to(State.DEAD, f"did not start: {error}")
                continue
            old = member.control
            member.become(new)  # with nothing awaited since it answered: who buries the engine buries this one
            self._roster.announce()
            await old.close()
            return True
        return False
