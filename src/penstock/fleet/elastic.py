"""Engines that come and go while the others serve (add, attach, drain, remove), their load, and the policy."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from penstock.checks import whole_number
from penstock.control_types import TokenLoss
from penstock.engine.verbs import EngineStats, verbs_of
from penstock.errors import DeadlineError, EngineDeadError, EngineStartError, PenstockError, StateError, UserError
from penstock.fleet.attach import AttachedServers, check_beside, place_of, specs_of
from penstock.fleet.engines import LaunchedEngines
from penstock.fleet.lifecycle import SERVABLE, Lifecycle, State, Substate
from penstock.fleet.member import Member, fan_out, why
from penstock.fleet.pausing import seconds
from penstock.fleet.roster import Roster
from penstock.fleet.supervise import Supervisor
from penstock.fleet.update import Operations
from penstock.options import validate
from penstock.router.state import Admin
from penstock.router_settings import RouterConfig
from penstock.settings import MOST_ENGINES, FleetConfig, ServerSpec

logger = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")

STATS_S = 10.0
"""Deadline of reading an engine's metrics, or the tokens that an update lost once that is known."""
POLL_INTERVAL_S, LONGEST_POLL_INTERVAL_S = 0.05, 1.0
"""Shortest and longest seconds between two questions to the router for an engine's load. The router sends no event,
since that would burden every request for a rare drain."""

REMOVED = "is being removed; it takes no new request, and leaves when its requests end or their time is over"


def _until_closed(
    method: Callable[Concatenate[Elastic, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Elastic, P], Coroutine[Any, Any, T]]:
    """Let the caller or `Elastic.close` cancel a call; the latter: StateError."""

    @wraps(method)
    async def call(self: Elastic, *args: P.args, **kwargs: P.kwargs) -> T:
        if self.closed:
            raise StateError("this fleet was torn down")
        work = asyncio.create_task(method(self, *args, **kwargs))
        self.calls.add(work)
        work.add_done_callback(self.calls.discard)
        try:
            await asyncio.wait((work,))
        except asyncio.CancelledError:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            raise
        if work.cancelled():
            raise StateError("this fleet was torn down in the middle of the call")
        return work.result()

    return call


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine as `penstock status` shows it."""

    name: str
    url: str
    state: State
    reason: str
    """Reason of its state."""
    weight_version: int
    stats: EngineStats | None
    """Its load; `None` if it did not answer or was not asked."""


class Elastic:
    """Changes the number of engines without disturbing other engines, requests or updates.

    `engines` starts new ones (None: others started these); `attached` joins servers of others.
    """

    def __init__(
        self,
        roster: Roster,
        operations: Operations,
        supervisor: Supervisor,
        fleet: FleetConfig,
        *,
        engines: LaunchedEngines | None,
        start_timeout_s: float,
        attached: AttachedServers,
    ) -> None:
        self._roster = roster
        self._operations = operations
        self._supervisor = supervisor
        self._min_engines = fleet.min_engines
        self.drain_timeout_s = fleet.drain_timeout_s
        self._engines = engines
        self._start_s = start_timeout_s
        self._attached = attached
        self._numbers = itertools.count(1 + max((int(member.name[1:]) for member in roster.members), default=-1))
        self._placed: dict[Lifecycle, tuple[str, ...]] = {}
        """GPUs of engines that are starting and are not yet members."""
        self._departures: dict[Member, asyncio.Task[None]] = {}
        """Engines that are being ended."""
        self.calls: set[asyncio.Task[Any]] = set()
        """Calls under way."""
        self.closed = False

    async def close(self) -> None:
        """Begin no further call, cancel those under way, and finish ending engines."""
        self.closed = True
        for call in self.calls:
            call.cancel()
        if under_way := (*self.calls, *self._departures.values()):
            await asyncio.wait(under_way)

    def find(self, engine: str | int) -> Member:
        """Return an engine by name or index. UserError: there is none."""
        members = self._roster.members
        if isinstance(engine, int) and not isinstance(engine, bool) and 0 <= engine < len(members):
            return members[engine]
        for member in members:
            if member.name == engine:
                return member
        there = ", ".join(m.name for m in members if m.state is not State.STOPPED)
        raise UserError(f"there is no engine {engine!r}; the fleet has {there or 'none'}")

    @property
    def starting(self) -> tuple[str, ...]:
        return tuple(life.engine for life in self._placed)

    async def set_policy(self, changes: Mapping[str, Any]) -> None:
        """Place requests by other policies from now on; see `Fleet.set_policy`."""
        if not self._roster.by_rank:
            raise UserError("vllm-router has no placement that can be changed; keep router.kind=penstock")
        before, wanted = self._roster.policy, {**self._roster.policy, **changes}
        checked = validate(RouterConfig, wanted).model_dump()
        self._roster.policy = {name: checked[name] for name in wanted}
        try:
            await self._roster.push_membership()
        except UserError:  # every later message would contain it too
            self._roster.policy = before
            raise

    # --- what engines are and do ------------------------------------------------------------------------------------

    async def statuses(self, *, stats: bool) -> tuple[EngineStatus, ...]:
        """Return the status of every engine that ever joined; `stats`: ask them too."""
        roster = self._roster
        asked = await fan_out(
            roster.live() if stats else (), lambda engine: verbs_of(engine).stats(), deadline_s=STATS_S
        )
        return tuple(
            EngineStatus(m.name, m.url, m.state, m.lifecycle.reason, m.weight_version, asked.results.get(m.name))
            for m in roster.members
        )

    async def stats(self, index: int | None) -> tuple[EngineStats, ...]:
        """Return the load of engine `index`, or of all live engines.

        Raises:
            UserError: there is no engine with that index.
            EngineDeadError: it does not serve, or no engine does.
        """
        members = self._roster.live()
        if index is None and not members:
            raise EngineDeadError(f"no engine is left now ({why(self._roster.members)})")
        if index is not None:
            member = self.find(index)
            if member.state not in SERVABLE:
                raise EngineDeadError(f"it is {member.state}: {member.lifecycle.reason}", engine=member.name)
            members = (member,)
        asked = await fan_out(members, lambda engine: verbs_of(engine).stats(), deadline_s=STATS_S)
        for error in asked.failures.values():
            raise error
        return tuple(asked.results.values())

    async def losses(
        self, engines: Sequence[str], version: int, adapter: str | None, timeout_s: float
    ) -> dict[str, TokenLoss | None]:
        """Return the tokens that an update lost, by engine; see `Fleet.recovered`."""
        if seconds(timeout_s) is None:
            raise UserError("timeout_s is None, and recovered needs a deadline; leave it out for the default")
        outcome = await fan_out(
            [member for member in self._roster.live() if member.name in engines],
            lambda engine: verbs_of(engine).token_loss(version, adapter=adapter, timeout_s=timeout_s),
            deadline_s=timeout_s + STATS_S,
        )
        return dict(outcome.results)

    # --- engines that come -------------------------------------------------------------------------------------------

    @_until_closed
    async def add(self, count: int) -> tuple[str, ...]:
        """Start engines; see `Fleet.add_engines`. If cancelled, started ones still join."""
        if (engines := self._engines) is None:
            raise StateError("the engines of this fleet were started by someone else, and so are new ones")
        room = MOST_ENGINES - sum(member.state is not State.STOPPED for member in self._roster.members)
        whole_number(count, "the number of engines to add", least=1, most=max(1, room))
        lives = [Lifecycle(f"e{next(self._numbers)}") for _ in range(count)]
        try:
            for life in lives:
                self._placed[life] = engines.place([*{**self._placed, **engines.taken}.values()])
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

    async def _start(self, engines: LaunchedEngines, life: Lifecycle, gpus: Sequence[str]) -> str:
        async with AsyncExitStack() as failed:
            failed.push_async_callback(self._give_back, engines, life)
            member = await engines.start(life, gpus)
            failed.pop_all()
        # From here on, it joins and restarts as any other engine, even if the caller gives up.
        member.lifecycle.restarts = True
        self._watch(member)
        limit_s = self._start_s
        if not await self._roster.until(lambda: not member.is_restarting, deadline_s=limit_s):
            raise EngineStartError(
                f"it has started and not joined the fleet within {limit_s:g} s (engine.start_timeout_s), and is tried "
                f"again: {member.lifecycle.reason}",
                engine=member.name,
            )
        return self._joined(member)

    async def _give_back(self, engines: LaunchedEngines, life: Lifecycle) -> None:
        """Free the resources of an engine that did not start."""
        try:
            await engines.end(life)
        except PenstockError as error:
            logger.warning("engine %s did not start, and did not end in good order: %s", life.engine, error)

    @_until_closed
    async def attach(self, servers: Iterable[str | ServerSpec]) -> tuple[str, ...]:
        """Attach servers; see `Fleet.attach`. If cancelled, servers that answered join."""
        specs = specs_of(servers)
        here = {place_of(member.url) for member in self._roster.members if member.state is not State.STOPPED}
        if known := [spec.url for spec in specs if place_of(spec.url) in here]:
            raise UserError(f"the server {known[0]} belongs to this fleet already; remove it first")
        joins = [asyncio.create_task(self._attach(spec)) for spec in specs]
        await asyncio.gather(*joins, return_exceptions=True)  # its cancellation cancels them
        return tuple(task.result() for task in joins)

    async def _attach(self, spec: ServerSpec) -> str:
        member = await self._attached.join(Lifecycle(f"e{next(self._numbers)}"), spec)
        try:
            self._watch(member)
        except UserError as error:
            member.lifecycle.to(State.DEAD, f"does not join: {error}")
            await member.control.close()
            raise
        await self._roster.until(lambda: member.awaiting_weights or member.state is not State.SYNCING)
        return self._joined(member)

    def _watch(self, member: Member) -> None:
        if member.process is None:
            check_beside(member, self._roster.members)
        self._roster.add(member)
        self._supervisor.watch(member)

    def _joined(self, member: Member) -> str:
        if member.state is State.DEAD:
            raise EngineStartError(f"it was to join the fleet and died: {member.lifecycle.reason}", engine=member.name)
        if member.awaiting_weights:
            version = self._roster.version
            logger.warning("engine %s waits for weights: no process here has version %d any more", member.name, version)
        return member.name

    # --- engines that leave ------------------------------------------------------------------------------------------

    @_until_closed
    async def drain(self, engine: str | int, timeout_s: float | None = None) -> bool:
        """Send an engine no new session, and wait until it is idle; see `Fleet.drain`."""
        member, timeout_s = self.find(engine), seconds(timeout_s)
        if member.state not in SERVABLE:
            raise StateError(f"engine {member.name} does not serve, it is {member.state}: {member.lifecycle.reason}")
        await self._withdraw(member, Substate.SESSIONS)
        return await self._until_idle(member, timeout_s, sessions=True)

    @_until_closed
    async def remove(self, engine: str | int, timeout_s: float | None = None) -> None:
        """Send an engine no more requests, and end it; see `Fleet.remove`.

        A dead or starting engine leaves at once, unless it restarts and too few others would be left. Once its end has
        begun, it goes on even if this call is cancelled.
        """
        member, timeout_s = self.find(engine), seconds(timeout_s)
        self._check_there(member)
        await self._withdraw(member, Substate.ALL)
        if not await self._until_idle(member, timeout_s, sessions=False):
            logger.warning("engine %s leaves with requests under way, which go on elsewhere", member.name)
        if (departure := self._departures.get(member)) is None:
            self._check_there(member)

            def over(task: asyncio.Task[None]) -> None:
                del self._departures[member]
                if not task.cancelled() and (error := task.exception()) is not None:
                    logger.warning("engine %s did not leave in good order: %s", member.name, error)

            departure = asyncio.create_task(self._depart(member), name=f"end-{member.name}")
            self._departures[member] = departure
            departure.add_done_callback(over)
        await asyncio.shield(departure)  # an interrupted end would leave an engine that no call can end

    async def _until_idle(self, member: Member, timeout_s: float | None, *, sessions: bool) -> bool:
        if not await self._busy(member, sessions=sessions):  # asked once even if there is no time
            return True
        try:
            async with asyncio.timeout(self.drain_timeout_s if timeout_s is None else timeout_s):
                interval_s = POLL_INTERVAL_S
                while await self._busy(member, sessions=sessions):
                    await self._roster.until(lambda: member.state not in SERVABLE, deadline_s=interval_s)
                    interval_s = min(1.5 * interval_s, LONGEST_POLL_INTERVAL_S)
        except TimeoutError:
            return False
        return True

    async def _busy(self, member: Member, *, sessions: bool) -> bool:
        """Return whether a serving engine has requests, or with `sessions` also sessions."""
        if member.state not in SERVABLE:
            return False
        try:
            router = await cast("Admin", self._roster.admin).engines()
        except (DeadlineError, EngineDeadError):
            if not self._roster.router_returns:
                raise
            return True  # unknown until the router is back
        own = {entry.name for entry in member.entries()}
        return any(
            load.outstanding > 0 or (sessions and load.sessions > 0) for load in router.engines if load.name in own
        )

    async def _depart(self, member: Member) -> None:
        async with AsyncExitStack() as steps:  # each step runs, even if an earlier one failed
            steps.push_async_callback(member.control.close)
            if self._engines is not None:
                steps.push_async_callback(self._engines.end, member.lifecycle)
            steps.push_async_callback(self._dismiss, member)
            await self._supervisor.release(member)

    async def _withdraw(self, member: Member, mode: Substate) -> None:
        """Give an engine no new work: a live one is DRAINING, a dead one never returns.

        Raises:
            UserError: fewer than `min_engines` others would be left. For a restarting engine, other restarting ones
                count too, since it serves no more than they do.
        """

        async def run() -> None:
            if member.state is State.DRAINING:
                if mode is Substate.ALL and member.drain_mode is not mode:
                    member.lifecycle.stay(mode, REMOVED)
                await self._roster.push_membership()
            restarting = member.is_restarting
            if not restarting and member.state not in {State.SERVING, State.PAUSED}:
                return
            others = [m for m in self._roster.members if m is not member]
            left = [m for m in others if m.state in {State.SERVING, State.PAUSED} or (restarting and m.is_restarting)]
            if len(left) < self._min_engines:
                raise UserError(
                    f"without engine {member.name} the fleet would have {len(left)} engine{'s' * (len(left) != 1)}, "
                    f"fewer than fleet.min_engines={self._min_engines}; add one first"
                )
            if restarting:  # requests must no longer wait for it; `_dismiss` ends it
                member.lifecycle.restarts = False
                self._roster.notify_all()
                return
            why = REMOVED if mode is Substate.ALL else "takes no new session"
            member.lifecycle.to(State.DRAINING, why, mode)
            self._roster.notify_all()
            await self._roster.push_membership()

        await self._operations.queue.run(run)

    async def _dismiss(self, member: Member) -> None:
        """Take an engine out of the fleet for good: STOPPED, and unknown to the router."""

        async def run() -> None:
            if member.state in {State.LAUNCHING, State.SYNCING}:
                member.lifecycle.to(State.DEAD, "taken out before it served")
            elif member.state in {State.SERVING, State.PAUSED}:  # its admission had begun, and finished
                member.lifecycle.to(State.DRAINING, "taken out as it came back")
            member.lifecycle.to(State.STOPPED, "taken out of the fleet")
            member.lifecycle.restarts = False
            self._roster.notify_all()
            await self._roster.push_or_defer(f"engine {member.name} has left")

        await self._operations.queue.run(run)

    def _check_there(self, member: Member) -> None:
        if member.state is State.STOPPED:
            raise StateError(f"engine {member.name} has left the fleet already")
