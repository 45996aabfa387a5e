"""Operations that change the state of every engine, one at a time; the gate is always put right."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.aio import Changes, in_thread, settled
from penstock.engine.capabilities import Capability, require
from penstock.engine.control import CoreState
from penstock.errors import DeadlineError, EngineDeadError, PenstockError, StateError, UserError
from penstock.fleet.member import SERVABLE, Call, FanOut, Member, State, Substate, fan_out, foreign_to, why
from penstock.fleet.roster import Occupation, Roster
from penstock.fleet.stores import Stores
from penstock.fleet.update import MEMORY_TAGS, Updater, bring_in, check_kv, put_right, wrong_weights
from penstock.rooms import plugged_in
from penstock.settings import FleetConfig
from penstock.types import KV, PauseMode, UpdateReport
from penstock.weights.manifest import WeightManifest

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
T = TypeVar("T")

RECHECK_S = 5.0
"""Between two questions to an engine without our plugin for the weights that its owner gave it."""
DROPS_WEIGHTS = 2
"""The sleep level that does not keep the weights."""


class OperationQueue(Changes):
    """Runs operations one after another. A begun one runs to its end even where its caller is cancelled."""

    def __init__(self, occupation: Occupation) -> None:
        super().__init__()
        self._occupation = occupation
        self.turns: list[object] = []
        """Of the operations in their order; the first is under way, and keeps its place until it has ended."""
        self._passable = False
        self._passing = 0
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
        after: Callable[[], None] = lambda: None,
        *,
        occupies: bool = True,
        urgent: bool = False,
    ) -> T:
        """Run `operation` in its turn, and `after` when it is over or never began.

        An engine may answer nothing else while an operation `occupies` it. An `urgent` one does not wait for one that
        is `passable`.
        """
        begun = False

        async def in_turn() -> T:
            nonlocal begun
            async with self._turn(urgent=urgent):
                self.check_open()
                begun = True
                with self._occupation.going_on() if occupies else nullcontext():
                    return await operation()

        def over(task: asyncio.Task[T]) -> None:
            self._running.discard(task)
            after()

        task = asyncio.create_task(in_turn())
        self._running.add(task)
        task.add_done_callback(over)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self.closed and task.cancelled():  # by `close`, not by the caller
                raise StateError("this fleet was torn down in the middle of the operation") from None
            if not begun:
                task.cancel()
            raise

    @asynccontextmanager
    async def passable(self) -> AsyncGenerator[None]:
        """Let urgent operations run during this block of the present one, which waits for them at its end."""
        self._passable = True
        self.announce()
        try:
            yield
        finally:
            self._passable = False
            await self.until(lambda: not self._passing)

    @asynccontextmanager
    async def _turn(self, *, urgent: bool) -> AsyncGenerator[None]:
        """Wait for the turn, or for leave to pass the operation that is under way."""
        turn = object()
        self.turns.append(turn)
        passes = False
        try:
            await self.until(lambda: self.turns[0] is turn or (urgent and self._passable))
            passes = self.turns[0] is not turn
            self._passing += passes
            yield
        finally:
            self._passing -= passes
            self.turns.remove(turn)
            self.announce()


class Operations:
    """Pause, resume, sleep, wake and update over a roster, and what they leave the fleet in.

    A pause that waits for requests has the deadline of one, `request_timeout_s`. Where too few engines are left, an
    update waits `recovery_timeout_s` for those that restart. `paused`: what the engines are in at first.
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
        """Generation is paused by the user."""
        self.kv_stays = paused
        """The pause in force left the KV caches as they were, as far as is known."""
        self.queue = OperationQueue(roster.occupation)
        self._roster = roster
        self._store = store
        self._min_engines = fleet.min_engines
        self._recovery_s = recovery_timeout_s
        self._control_s = control_timeout_s
        self._request_s = request_timeout_s
        self._updater = Updater(roster, store, self._gate_closed, fleet.min_engines, control_timeout_s)
        self._asleep: frozenset[str] = frozenset()
        self._usable_from = 0
        """Weights older than this version are gone from memory (sleep level 2)."""
        self._updating = False
        self._waiting_pause: _WaitingPause | None = None
        self.native = plugged_in("native")(self, roster, control_timeout_s)
        self.adapters = plugged_in("adapters")(roster, self.queue, self.check_weights_awake, fleet, control_timeout_s)

    async def pause(self, mode: PauseMode, *, clear_cache: bool, timeout_s: float | None = None) -> None:
        """Close the gate, then pause every engine.

        While one of mode `wait` waits for requests, `abort` and `resume` need no turn. `resume` ends it, and so does
        cancelling its caller: all engines go on as before.

        Raises:
            DeadlineError: an engine has not paused within `timeout_s`; all go on as before. Without `timeout_s` it is
                dead after the deadline of a request, for a pause that waits, or of a control call.
            StateError: generation is paused already, or the pause was ended while it waited.
        """
        if timeout_s is not None and timeout_s <= 0:
            raise UserError(f"timeout_s of a pause must be positive, got {timeout_s:g}")
        waiting = _WaitingPause()

        async def run() -> None:
            if self.paused:
                raise StateError("generation is already paused; resume_generation first")
            self._require("pause", "pause_generation")
            async with self._gate_closed():
                pausing = self._pause_engines(mode, clear_cache=clear_cache, timeout_s=timeout_s)
                late = await (self._wait_for_requests(pausing, waiting) if mode is PauseMode.WAIT else pausing)
                if late == ():
                    self._move_all(State.PAUSED, f"pause_generation ({mode})")
                    self.paused, self.kv_stays = True, not clear_cache
                    return
                await self._roster.command(
                    lambda engine: engine.resume(), what="resume after the pause", deadline_s=self._control_s
                )
                if late is None:
                    raise StateError("the pause was ended while it waited for requests; every engine goes on as before")
                raise DeadlineError(
                    f"pause ({mode}): {', '.join(late)} did not pause within {timeout_s:g} s; every engine goes on "
                    "as before. A pause that waits takes as long as the longest request in flight",
                    seconds=timeout_s or 0.0,
                )

        try:
            await self.queue.run(run, waiting.over.set, occupies=False)  # engines that wait go on with their steps
        except asyncio.CancelledError:
            waiting.given_up.set()
            raise

    async def resume(self) -> None:
        """Resume every engine, then open the gate; StateError if not paused."""

        async def run() -> _WaitingPause | None:
            if (waiting := self._waiting_pause) is not None:
                waiting.given_up.set()
                return waiting
            if not self.paused:
                raise StateError("generation is not paused; pause_generation first")
            async with self._gate_closed():
                self.paused = False
                await self._roster.command(lambda engine: engine.resume(), what="resume", deadline_s=self._control_s)
                self._move_all(State.SERVING, "resume_generation")
            return None

        while (ended := await self.queue.run(run, urgent=True)) is not None:
            await ended.over.wait()  # each of its steps has a deadline
            if not self.paused:  # it may have paused the fleet just before
                return

    async def sleep(self, level: int) -> None:
        """Free memory; the gate stays closed until all of it is back, after level 2 also until the next update.

        Requests in flight wait in their engines; those without our plugin end them with the finish reason `abort`.
        """
        if level not in (1, DROPS_WEIGHTS):
            raise UserError(f"sleep level must be 1 or 2, got {level}")

        async def run() -> None:
            self._require("sleep", "sleep")
            async with self._gate_closed():
                for member in self._roster.live():
                    member.asleep = MEMORY_TAGS
                await self.refusable(lambda engine: engine.sleep(level), "sleep")
                self._asleep = MEMORY_TAGS
                if level == DROPS_WEIGHTS:
                    self._usable_from = self._roster.version + 1

        await self.queue.run(run)

    async def wake_up(self, tags: Sequence[str] | None) -> None:
        """Take memory back, all of it or that of `tags`; the weights come first, since vLLM fills them as it wakes."""
        if unknown := set(tags or ()) - MEMORY_TAGS:
            raise UserError(f"unknown memory tags {sorted(unknown)}; known: {', '.join(sorted(MEMORY_TAGS))}")

        async def run() -> None:
            self._require("sleep", "wake_up")
            if tags and "weights" in self._asleep - set(tags):
                raise StateError("the weights sleep: wake_up(['weights']) before the KV cache, or both at once")
            # A vLLM that is asked for memory which is there already takes back none of the rest.
            missing = [tag for tag in tags if tag in self._asleep] if tags and self._asleep else tags
            async with self._gate_closed():
                if missing or not tags:
                    await self.refusable(lambda engine: engine.wake_up(missing), "wake-up")
                self._asleep -= set(tags or MEMORY_TAGS)
                for member in self._roster.live():
                    member.asleep = self._asleep
                if self.paused and not self._asleep:
                    # Engines with our plugin have stayed paused; vLLM's own wake-up resumes, with nothing in flight.
                    await self._pause_engines(PauseMode.KEEP, clear_cache=False)

        await self.queue.run(run)

    async def abort(self) -> None:
        """End every request in flight with what it has; a pause that waits for them ends with it."""
        await self.queue.run(lambda: self.refusable(lambda engine: engine.abort(), "abort", needs="abort"), urgent=True)

    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes."""

        async def run() -> None:
            await self.refusable(
                lambda engine: engine.reset_prefix_cache(), "reset of the prefix cache", needs="caches"
            )
            self.kv_stays = False

        await self.queue.run(run)

    async def collective_rpc(
        self, method: str, timeout_s: float, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> FanOut[list[Any]]:
        """Call a worker method on every engine, outside the queue. What it does is unknown, so a failure kills none.

        Raises:
            EngineDeadError: no engine is left.
            MissingCapabilityError: one of them has no such call.
        """
        self._require("rpc", "collective_rpc")
        if not (members := self._roster.live()):
            raise EngineDeadError(f"no engine is left now ({why(self._roster.members)})")
        with self._roster.occupation.going_on(), foreign_to(members):
            return await fan_out(
                members,
                lambda engine: engine.collective_rpc(method, timeout_s, args, kwargs),
                # Longer than the client's own deadline, so that its message arrives.
                deadline_s=timeout_s + 2.0,
            )

    async def admit(self, member: Member) -> None:
        """Bring an engine that is SYNCING to the fleet's weights and state in its turn, and let it serve.

        Where no process has the bytes of the fleet's version, it waits for the next update and takes part in it.

        Raises:
            EngineError: it failed; it is not admitted.
        """
        plugin = member.info.capabilities.plugin
        while (version := await self.queue.run(lambda: self._admit(member))) is not None:
            try:
                await self._roster.until(
                    lambda: self._roster.version != version, deadline_s=None if plugin else RECHECK_S
                )
            finally:
                if member.awaiting_weights:  # else it died
                    member.lifecycle.stay(None)

    async def mend(self, member: Member, said: CoreState, deadline_s: float) -> None:
        """Put right what another process did to an engine, as its core `said`; see `put_right`.

        Nothing is done while an operation is under way, or the fleet sleeps or ends; the next probe sees it again.
        `deadline_s` is the probe's: operations must not wait longer for a core that hangs.
        """
        stale = self._roster.version < self._usable_from
        restless = bool(self.queue.turns) or self._roster.occupation.going or bool(self._asleep) or stale
        if member.state not in SERVABLE or not member.info.capabilities.plugin or restless:
            return
        unknown = member.foreign is None and said.foreign is not None
        if unknown or said.paused != self.paused or wrong_weights(member, said):
            try:
                await self.queue.run(
                    lambda: put_right(member, self._roster, paused=self.paused, deadline_s=deadline_s), occupies=False
                )
            except StateError:
                if not self.queue.closed:
                    raise

    async def update(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int | None, *, kv: KV = "recompute"
    ) -> UpdateReport:
        """Update the weights once; see `Updater.run`. StateError during another update.

        Where too few engines are left and some restart, it waits for those first.
        """
        return await self._update(lambda number: self._store.publish(number, named_tensors), version, kv)

    async def update_from(self, manifest: WeightManifest, *, kv: KV = "recompute") -> UpdateReport:
        """Update to weights that another process of this user has published; it need not live on."""
        return await self._update(lambda _: self._store.adopt(manifest), manifest.version, kv)

    async def _update(self, publish: Callable[[int], WeightManifest], version: int | None, kv: KV) -> UpdateReport:
        self.queue.check_open()
        check_kv(kv)
        if self._updating:
            raise StateError("a weight update is under way; await it before the next one")
        self._updating = True

        async def run() -> UpdateReport:
            self.check_weights_awake()
            self._require("plugin", "update_weights")
            number = self._roster.highest_version + 1 if version is None else version
            self._roster.check_version(number)
            if kv == "keep_in_flight":
                self._require("kv_in_flight", f"update_weights with kv={kv!r}")
            return await self._updater.run(publish, version=number, kv=kv)

        def over() -> None:
            self._updating = False

        def enough_or_none_to_come() -> bool:
            members = self._roster.members
            return len(self._roster.live()) >= self._min_engines or not any(m.is_restarting for m in members)

        with ExitStack() as never_began:
            never_began.callback(over)
            await self._roster.until(enough_or_none_to_come, deadline_s=self._recovery_s)
            never_began.pop_all()
        return await self.queue.run(run, over)

    async def close(self) -> None:
        """Let no further operation begin, and cancel the one that runs."""
        await self.queue.close()
        self.adapters.close()

    async def _admit(self, member: Member) -> int | None:
        """None: it serves. Else the version that it has to wait to be over, the fleet's in this turn.

        It is marked as waiting within the turn: the next update may begin right after it, and is to take it along.
        """
        if self.adapters.known:
            await self.adapters.give(member)
        roster, paused, asleep = self._roster, self.paused, self._asleep
        stale = member.weight_version != roster.version or member.torn is not None
        current = await self._weights_for(member) if stale else None
        if await bring_in(member, roster, current, paused=paused, asleep=asleep, deadline_s=self._control_s):
            return None
        member.lifecycle.stay(
            Substate.AWAITING_WEIGHTS,
            f"waits for the next update_weights: no process has the fleet's weights of version {roster.version} any "
            "more (broadcast, cuda_ipc and update_named_weights keep no copy; see fleet.weight_host_copy)"
            if member.info.capabilities.plugin
            else f"waits until its owner gives it weight version {roster.version}",
        )
        roster.announce()
        return roster.version

    async def _weights_for(self, member: Member) -> WeightManifest | None:
        """Where an engine can have the fleet's version from; the trainer may be asked for it."""
        version = self._roster.version
        asking = in_thread(lambda: self._store.weights_for(member, version))
        (found,) = await asyncio.gather(asking, return_exceptions=True)  # cancelled, it waits for the thread
        if isinstance(found, BaseException):  # of the trainer's own code: anything
            logger.warning("weight version %d was not given again: %r", version, found)
            return None
        return found

    def check_weights_awake(self) -> None:
        """Raise StateError while the engines' weights sleep."""
        if "weights" in self._asleep:
            raise StateError("the engines sleep; wake_up(['weights']) before an update")

    async def _pause_engines(
        self, mode: PauseMode, *, clear_cache: bool, timeout_s: float | None = None
    ) -> tuple[str, ...]:
        """The names of those that did not pause within `timeout_s`; without one, an engine that is late is dead."""
        # `wait` ends with the longest request in flight, the other modes at once.
        deadline_s = timeout_s or (self._request_s if mode is PauseMode.WAIT else self._control_s)
        outcome = await self._roster.command(
            lambda engine: engine.pause(mode, clear_cache=clear_cache, timeout_s=deadline_s),
            what=f"pause ({mode})",
            deadline_s=deadline_s,
            may_be_late=timeout_s is not None,
        )
        late = (name for name, error in outcome.failures.items() if isinstance(error, DeadlineError))
        return tuple(late) if timeout_s is not None else ()

    async def _wait_for_requests(
        self, pausing: Coroutine[Any, Any, tuple[str, ...]], waiting: _WaitingPause
    ) -> tuple[str, ...] | None:
        """Return what `pausing` does; None where the pause was ended while it waited."""
        self._waiting_pause = waiting
        try:
            async with self.queue.passable():
                work = await settled(pausing, waiting.given_up.wait())
        finally:
            self._waiting_pause = None
        return None if work.cancelled() else work.result()

    async def refusable(self, call: Call[None], what: str, *, needs: Capability | None = None) -> None:
        """Have every engine do what all of them may refuse; see `Roster.command`."""
        if needs is not None:
            self._require(needs, what)
        await self._roster.command(call, what=what, deadline_s=self._control_s, refusable=True)

    def _move_all(self, state: State, reason: str) -> None:
        for member in self._roster.live():
            if member.state is not State.DRAINING:  # it did what the others did, and stays on its way out
                member.lifecycle.to(state, reason)
        self._roster.announce()

    def _require(self, needed: Capability, operation: str) -> None:
        """Refuse what some live engine cannot do, before any is asked to."""
        require(((m.name, m.info.capabilities) for m in self._roster.live()), needed, operation)

    @asynccontextmanager
    async def _gate_closed(self) -> AsyncGenerator[None]:
        """Close the gate; on the way out, however that is, it is where the fleet's state wants it.

        What is said to the router on the way out has the engines' versions too. Where that fails, it is said later
        (`Roster.check_router`): what was done to the engines holds, whatever the router says.
        """
        try:
            await self._roster.gate(closed=True)
            yield
        finally:
            stale = self._roster.version < self._usable_from
            closed = self.paused or bool(self._asleep) or stale
            try:
                await self._roster.gate(closed=closed)
            except PenstockError as error:
                state, version = "closed" if closed else "open", self._roster.version
                message = "the router does not know yet that its gate is %s and its engines serve weight version %d: %s"
                logger.warning(message, state, version, error)


@dataclass(frozen=True, slots=True)
class _WaitingPause:
    given_up: asyncio.Event = field(default_factory=asyncio.Event)
    """It is to end, and every engine to go on."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """It has paused the fleet, or every engine goes on."""
