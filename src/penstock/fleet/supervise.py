"""Watches engines and restarts those that end: their supervisor, their admission, and the probe of one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.aio import all_or_first_error, cancelled, settled
from penstock.control_types import CoreState
from penstock.engine.control import ControlClient
from penstock.errors import DeadlineError, EngineDeadError, EngineError, PenstockError, StateError
from penstock.fleet.lifecycle import SERVABLE, State, Substate
from penstock.fleet.member import Member, ask, fan_out, put
from penstock.fleet.roster import Occupation, Roster
from penstock.fleet.stores import Stores, tensors_in_thread
from penstock.http import UnreachableError
from penstock.process import RestartBudget, Sleep, keep_running
from penstock.rooms import plugged_in
from penstock.weights.manifest import WeightManifest, differ

logger = logging.getLogger(__name__)

PROBE_ALL_S = 0.5
"""Seconds for an engine's answer after a death. The usual probe judges an engine that is late."""
WATCHED = SERVABLE | {State.SYNCING}


class Supervisor:
    """Watches every member given to `watch`, until `release` or `stop`.

    `admit` brings a SYNCING engine to the fleet's weights and lets it serve. `check` awaits a probe of an engine, and
    makes an engine DEAD that another process has changed. `Member.again` restarts a dead engine within its `budget`;
    for a server of others, as soon as it answers. An engine is probed every `interval_s` seconds, and ended after
    `hang_s` seconds without an answer.
    """

    def __init__(
        self,
        roster: Roster,
        *,
        admit: Callable[[Member], Awaitable[None]],
        check: Callable[[Member, Awaitable[CoreState | None]], Awaitable[None]],
        budget: Callable[[], RestartBudget],
        interval_s: float,
        hang_s: float,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._roster = roster
        self._admit = admit
        self._check = check
        self._budget = budget
        self._interval_s = interval_s
        self._hang_s = hang_s
        self._sleep = sleep
        self._guards: dict[Member, asyncio.Task[None]] = {}
        self._probing: asyncio.Task[None] | None = None
        self._stopped = False

    def watch(self, member: Member) -> None:
        """Watch an engine's health, and its process if it is ours; admit it if SYNCING.

        Raises:
            StateError: the supervisor was stopped.
        """
        if self._stopped:
            raise StateError(f"engine {member.name} cannot join: this fleet was torn down")

        def over(guard: asyncio.Task[None]) -> None:
            member.lifecycle.may_restart = lambda: False
            if not guard.cancelled() and (error := guard.exception()) is not None:
                logger.error("engine %s is watched no more: %r", member.name, error, exc_info=error)
                member.lifecycle.restarts = False
                self._roster.notify_all()

        guard = self._guards[member] = asyncio.create_task(self._guard(member), name=f"guard-{member.name}")
        guard.add_done_callback(over)

    async def release(self, member: Member) -> None:
        """Stop watching an engine, since its end is now intended."""
        if (guard := self._guards.pop(member, None)) is not None:
            await cancelled(guard)

    async def probe_all(self) -> None:
        """Probe every engine, after a request has seen one die. Return when the dead ones are marked.

        A vLLM whose core has died answers with errors at once, for up to a second. The router would see the least busy
        engine of all there, and each request would meet it several times. So the core is probed too.
        """
        if self._stopped:
            return
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe_all(), name="probe-engines")
        await asyncio.shield(self._probing)

    async def stop(self) -> None:
        """Stop watching for good; raise the error that broke a watch, if one did."""
        self._stopped = True
        if self._probing is not None:
            await cancelled(self._probing)
        guards = tuple(self._guards.values())
        self._guards.clear()
        for guard in guards:
            guard.cancel()
        if guards:
            await asyncio.wait(guards)  # a second cancellation would make a guard leave its own tasks behind
        for guard in guards:
            await cancelled(guard)

    async def _guard(self, member: Member) -> None:
        again, budget = member.again, self._budget()
        launched = again is not None and member.process is not None
        member.lifecycle.may_restart = lambda: launched and budget.left()
        member.lifecycle.restarts = launched

        async def wait(seconds: float) -> None:
            if launched:
                member.lifecycle.restarts = True
                logger.info("engine %s is restarted in %g s", member.name, seconds)
            await self._sleep(seconds)

        if again is None:
            await self._until_dead(member)
        else:
            await keep_running(lambda: self._until_dead(member), lambda: self._start_again(member, again), budget, wait)
        member.lifecycle.restarts = False
        self._roster.notify_all()
        if again is not None:
            logger.error(
                "engine %s stays dead: it died again after %s restarts within %g s (fleet.max_restarts); the last "
                "reason: %s", member.name, budget.max_restarts, budget.window_s, member.lifecycle.reason,
            )  # fmt: skip

    # --- death -------------------------------------------------------------------------------------------------------

    async def _until_dead(self, member: Member) -> None:
        """Return when the engine is DEAD and its process killed; a broken watch is its death."""
        watches = [self._until_unwell]
        if member.state is State.SYNCING:
            watches.append(self._admit_or_mark_dead)
        tasks = [asyncio.create_task(self._dead_if_broken(member, watch)) for watch in watches]
        try:
            if member.process is None:
                await self._roster.until(lambda: member.state not in WATCHED)
            else:
                status = await member.process.wait()
                await self._roster.mark_dead(member, f"its process exited with status {status}")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _dead_if_broken(self, member: Member, watch: Callable[[Member], Awaitable[None]]) -> None:
        (error,) = await asyncio.gather(watch(member), return_exceptions=True)
        if error is not None:
            logger.error("a watch of engine %s broke: %r", member.name, error, exc_info=error)
            await self._roster.mark_dead(member, f"its watch broke: {error!r}")

    async def _until_unwell(self, member: Member) -> None:
        """Probe an engine regularly and when its core's connection breaks, until its death."""
        gone = asyncio.create_task(member.control.core_gone(), name=f"core-{member.name}")
        try:
            while member.state in WATCHED:
                if gone.done():
                    await asyncio.sleep(self._interval_s)
                else:
                    await asyncio.wait((gone,), timeout=self._interval_s)
                try:
                    await self._check(member, probe(member.control, self._roster.occupation, hang_s=self._hang_s))
                except CoreSilentError as error:
                    if member.state in SERVABLE:  # the admission of a SYNCING engine has its own deadlines
                        await self._roster.mark_dead(member, str(error))
                except PenstockError as error:
                    await self._roster.mark_dead(member, f"health check failed: {error}")
        finally:
            await cancelled(gone)

    async def _probe_all(self) -> None:
        async def failed(member: Member, error: PenstockError) -> None:
            if not isinstance(error, DeadlineError):
                await self._roster.mark_dead(member, f"health check failed: {error}")

        await fan_out(
            self._roster.live(),
            lambda engine: probe(engine, self._roster.occupation, hang_s=self._hang_s),
            deadline_s=PROBE_ALL_S,
            on_failure=failed,
        )

    # --- return ------------------------------------------------------------------------------------------------------

    async def _admit_or_mark_dead(self, member: Member) -> None:
        try:
            await self._admit(member)
        except PenstockError as error:
            if not self._roster.ended:  # otherwise no engine has failed
                await self._roster.mark_dead(member, f"could not join: {error}")

    async def _start_again(self, member: Member, again: Callable[[], Awaitable[Member]]) -> bool:
        """Restart a DEAD engine, or wait for a server of others; True: it is SYNCING."""
        if member.process is None:
            await plugged_in("attach.answers")(member, self._hang_s, lambda: self._sleep(self._interval_s))
        member.lifecycle.to(State.LAUNCHING, "answers again" if member.process is None else "restarted")
        self._roster.notify_all()
        try:
            new = await again()
        except PenstockError as error:
            if member.state is not State.DEAD:
                member.lifecycle.to(State.DEAD, f"did not start: {error}")
            return False
        old = member.control
        member.adopt_process(new)  # no await since it answered, so a death now is this process's
        self._roster.notify_all()
        await old.close()
        return True


RECHECK_S = 5.0
"""Seconds between two questions for the weight version of an engine without our plugin."""


class Admission:
    """Brings SYNCING engines to the weights and the state of a fleet, in turns of its operations.

    `control_timeout_s`: deadline of a control call.
    """

    def __init__(self, operations: Any, roster: Roster, store: Stores, control_timeout_s: float) -> None:
        self._operations = operations  # `pausing.AllOperations`
        self._roster = roster
        self._store = store
        self._control_s = control_timeout_s

    async def admit(self, member: Member) -> None:
        """Bring a SYNCING engine to the fleet's weights and state, and let it serve.

        If no process has the bytes of the fleet's version, it waits for the next update and takes part in it.

        Raises:
            EngineError: the engine failed and is not admitted.
        """
        plugin = member.info.capabilities.plugin
        while (version := await self._operations.queue.run(lambda: self._try_to_join(member))) is not None:
            try:
                await self._roster.until(
                    lambda: self._roster.version != version, deadline_s=None if plugin else RECHECK_S
                )
            finally:
                if member.awaiting_weights:  # otherwise it died
                    member.lifecycle.stay(None)

    async def _try_to_join(self, member: Member) -> int | None:
        """Try once to let an engine join; return None if it serves, or else the version to wait out.

        It is marked as waiting within the turn, since the next update may follow at once and has to include it.
        """
        operations, control, roster = self._operations, member.control, self._roster
        if operations.adapters.known:
            await operations.adapters.give(member)
        if member.asleep:
            await operations.wake(member)
        if (lacks := await self.bring_to_version(member)) is not None:
            member.lifecycle.stay(Substate.AWAITING_WEIGHTS, lacks)
            roster.notify_all()
            return roster.version
        if operations.paused or operations.asleep or member.process is None:
            await operations.bring_to_state(member)
        if member.control is not control:
            raise StateError(f"engine {member.name} was restarted while it joined")
        if member.process is None:
            plugged_in("attach.check")(member, roster.members)
        start_serving(roster, member)
        if operations.paused:
            member.lifecycle.to(State.PAUSED, "joined a fleet that is paused")
            roster.notify_all()
        await roster.push_or_defer(f"engine {member.name} has joined")
        return None

    async def bring_to_version(self, member: Member) -> str | None:
        """Make a SYNCING engine confirm the fleet's version; loaded weights are version 0.

        Returns:
            None, or what it waits for: no process has the bytes of that version, or the engine has no plugin to take
            them. It can join after the next update, or once its owner has given it that version.

        Raises:
            EngineError: it failed, or its weights differ from its peers'.
        """
        plugin, version = member.info.capabilities.plugin, self._roster.version
        if not plugin:  # its owner may have changed its weights
            await plugged_in("attach.reread")(member, self._control_s)
        if member.has(version):
            return None
        if not plugin:
            return f"waits until its owner gives it weight version {version}"
        if isinstance(weights := await self._weights_for(member), str):
            return (
                f"waits for the next update_weights: no process has the fleet's weights of version {version} any "
                f"more{weights} (broadcast, cuda_ipc and update_named_weights keep no copy; see fleet.weight_host_copy)"
            )
        checksum = (await ask(member, lambda engine: put(engine, weights), deadline_s=2 * self._control_s)).checksum
        for expected in self._roster.checksums.get(member.layout, ()):
            if differ(checksum, expected):
                raise EngineError(
                    f"its weights of version {version} have the checksum {checksum}, its peers' {expected}",
                    engine=member.name,
                )
        member.confirm(version)
        return None

    async def _weights_for(self, member: Member) -> WeightManifest | str:
        """Return the source of the fleet's version for an engine, which may be the trainer, or why there is none."""
        version = self._roster.version
        asking = tensors_in_thread(lambda: self._store.for_engine(member, version), f"weight version {version}")
        (found,) = await asyncio.gather(asking, return_exceptions=True)  # if cancelled, it waits a while for the thread
        return f": {found!r}" if isinstance(found, BaseException) else found or ""  # the trainer's can raise anything


def start_serving(roster: Roster, member: Member) -> None:
    """Let a SYNCING engine serve; the next `push_membership` announces it.

    Raises:
        StateError: it has another weight version than the fleet.
    """
    if member.weight_version != roster.version:
        raise StateError(
            f"engine {member.name} has weight version {member.weight_version}, the fleet serves {roster.version}"
        )
    member.lifecycle.to(State.SERVING, f"weight version {member.weight_version} confirmed")
    if member.info.kv_kept:  # by an earlier owner
        roster.kv_kept_versions |= {member.info.weight_version}
    roster.notify_all()


# --- The probe of one engine, of its server and its core --------------------------------------------------------------

# The server answers health checks by itself, also when the core has died, was stopped or hangs. So the probe asks the
# core too. Its answer waits only for the present step. A healthy core's longest silence is therefore one step, a
# fraction of a second even for a full chunk of prefill, with three exceptions:
#
# - A call of the fleet keeps it busy: it loads weights, sleeps, or runs a method of `collective_rpc`. The time of the
#   call does not count, since it has its own deadline. Time counted before it stays counted, and an open question stays
#   open: calls may come more often than a core needs to be found silent.
# - It has made no token yet: the first steps compile kernels. `YOUNG` allows for it.
# - A later step compiles one more kernel. `hang_timeout_s` has to be longer than that.

YOUNG = 10
"""Multiple of `hang_timeout_s` for which an engine that has made no token may be silent."""
BROKEN = 3
"""Connections to a core that break before an answer until it counts as gone."""


class CoreSilentError(DeadlineError):
    """The server is well, but its core has not answered."""


async def probe(control: ControlClient, occupation: Occupation, *, hang_s: float) -> CoreState | None:
    """Probe an engine's server and core; None: the core's answer is unreadable.

    It hangs after `hang_s` seconds without an answer; the time of calls in `occupation` does not count.

    Raises:
        CoreSilentError: its core hangs; DeadlineError: its server hangs.
        PenstockError: it is gone, or reports that it is not well.
    """
    _, said = await all_or_first_error((_server(control, hang_s), _core(control, occupation, hang_s)))
    return said


async def _server(control: ControlClient, hang_s: float) -> None:
    answer = await settled(control.health(YOUNG * hang_s), Occupation().without(hang_s))
    if answer.cancelled():
        raise DeadlineError(f"no answer to a health check in {hang_s:g} s", seconds=hang_s)
    answer.result()


async def _core(control: ControlClient, occupation: Occupation, hang_s: float) -> CoreState | None:
    missed = 0

    async def too_long() -> None:
        nonlocal missed
        while not missed or (missed < YOUNG and await _is_young(control, hang_s)):
            await occupation.without(hang_s)
            missed += 1

    answer = await settled(_state(control, occupation), too_long())
    if not answer.cancelled():
        return answer.result()
    await control.health(hang_s)  # otherwise the server is silent
    silent_s = missed * hang_s
    why = f"its core has answered nothing for {silent_s:g} s, though its server is well"
    raise CoreSilentError(why, seconds=silent_s)


async def _state(control: ControlClient, occupation: Occupation) -> CoreState | None:
    broken = 0
    while True:
        await occupation.over()
        try:
            return await control.state()
        except DeadlineError:  # the call's own deadline, not the probe's
            continue
        except UnreachableError:
            raise
        except EngineDeadError:
            broken += 1
            if broken == BROKEN:
                raise
        except (PenstockError, KeyError, TypeError, ValueError):  # an answer, though unreadable
            return None


async def _is_young(control: ControlClient, deadline_s: float) -> bool:
    try:
        async with asyncio.timeout(deadline_s):
            return (await control.verbs.stats()).generation_tokens == 0
    except (TimeoutError, PenstockError):
        return False
