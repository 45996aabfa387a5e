"""Other operations than updates (pause, resume, sleep, wake), and engines that other processes changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.aio import settled
from penstock.checks import LARGEST, reading
from penstock.control_types import KV, CoreState, PauseMode, UpdateReport
from penstock.engine.capabilities import Capability
from penstock.engine.control import ControlClient
from penstock.engine.lacking import require
from penstock.engine.verbs import verbs_of
from penstock.errors import (
    DeadlineError,
    EngineDeadError,
    EngineHTTPError,
    FanOutError,
    PenstockError,
    StateError,
    UserError,
)
from penstock.fleet.attach import foreign_to, wrong_weights
from penstock.fleet.lifecycle import SERVABLE, State
from penstock.fleet.member import Call, FanOut, Member, ask, fan_out, why
from penstock.fleet.roster import Roster
from penstock.fleet.stores import Stores
from penstock.fleet.update import Operations
from penstock.rooms import plugged_in
from penstock.settings import FleetConfig
from penstock.weights.manifest import WeightManifest

logger = logging.getLogger(__name__)
T = TypeVar("T")

MEMORY_TAGS = frozenset({"weights", "kv_cache"})
"""Memory that an engine frees when it sleeps, and takes back by tag."""

DROPS_WEIGHTS = 2
"""The sleep level that drops the weights."""


class AllOperations(Operations):
    """Every operation of a fleet, one at a time.

    A pause that waits for requests has a request's deadline, `request_timeout_s`. `rest`: arguments of `Operations`.
    """

    _waiting_pause: _Pause | None = None
    _in_force: _Pause | None = None
    """The last pause that came into force."""
    _undoing: asyncio.Task[None] | None = None
    _passable = False
    _passing = 0

    def __init__(
        self, roster: Roster, store: Stores, fleet: FleetConfig, *, request_timeout_s: float, **rest: Any
    ) -> None:
        super().__init__(roster, store, min_engines=fleet.min_engines, **rest)
        self._request_s = request_timeout_s
        self.native = plugged_in("native")(self, roster, self._control_s)
        self.adapters = plugged_in("adapters")(roster, self.queue, self.check_weights_awake, fleet, self._control_s)

    async def close(self) -> None:
        await super().close()
        self.adapters.close()

    async def update_from(self, manifest: Mapping[str, Any], *, kv: KV = "recompute") -> UpdateReport:
        """Update to weights that another process of this user published and that may end."""
        given = WeightManifest.from_json(manifest)
        return await self._update(lambda _: self._store.adopt(given), given.version, kv)

    async def pause(self, mode: PauseMode | str, *, clear_cache: bool, timeout_s: float | None = None) -> None:
        """Close the gate, then pause every engine.

        While mode `wait` waits for requests, `abort` and `resume` need no turn, and `resume` ends the pause. Cancelling
        the caller undoes a pause of any mode: all engines go on as before. A late engine is dead: in mode `wait` after
        a request's deadline, otherwise after a control call's.

        Raises:
            DeadlineError: it took longer than `timeout_s`; all engines go on as before.
            StateError: generation is already paused, or `resume` ended the pause while it waited.
        """
        mode, timeout_s = PauseMode(mode), seconds(timeout_s)
        if timeout_s == 0:
            raise UserError(f"timeout_s of a pause must be positive, got {timeout_s:g}")
        attempt = _Pause()
        attempt.over.set()
        try:
            await self._pause_in_time(mode, attempt, clear_cache=clear_cache, timeout_s=timeout_s)
        except asyncio.CancelledError:
            attempt.given_up.set()
            self._undoing = asyncio.create_task(self._undo(attempt), name="undo-pause")
            raise

    async def _pause_in_time(
        self, mode: PauseMode, attempt: _Pause, *, clear_cache: bool, timeout_s: float | None
    ) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                # Engines that wait for requests go on with their steps.
                await self.queue.run(lambda: self._pause(mode, attempt, clear_cache=clear_cache), occupies=False)
        except TimeoutError:
            begun = not attempt.over.is_set()
            attempt.given_up.set()
            await attempt.over.wait()
            if attempt.done:
                return
            why = (
                "A pause that waits takes as long as the longest request in flight"
                if begun
                else "It waited for an earlier operation of this fleet, such as an update, and never began"
            )
            raise DeadlineError(
                f"pause ({mode}) took longer than {timeout_s:g} s; every engine goes on as before. {why}",
                seconds=timeout_s or 0.0,
            ) from None
        if not attempt.done:
            raise StateError("the pause was ended while it waited for requests; every engine goes on as before")

    async def _pause(self, mode: PauseMode, attempt: _Pause, *, clear_cache: bool) -> None:
        if self.paused:
            raise StateError("generation is already paused; resume_generation first")
        self._require("pause", "pause_generation")
        attempt.over.clear()
        try:
            async with self._gate_closed():
                pausing = self._pause_engines(mode, clear_cache=clear_cache)
                await (self._wait_for_requests(pausing, attempt) if mode is PauseMode.WAIT else pausing)
                if attempt.given_up.is_set():
                    await self._resume_engines("resume after the pause")
                    return
                self._move_all(State.PAUSED, f"pause_generation ({mode})")
                self.paused, self.kv_stays, attempt.done = True, not clear_cache, True
                self._in_force = attempt
        finally:
            attempt.over.set()

    async def _undo(self, attempt: _Pause) -> None:
        """Resume if a cancelled pause came into force all the same, as in its last call to the router."""

        async def run() -> None:
            if self.paused and self._in_force is attempt:
                self.paused = False
                try:
                    await self._resume_engines("resume after the cancelled pause")
                    self._move_all(State.SERVING, "pause_generation was cancelled")
                finally:  # no need to close it first, for which a hanging router could keep the fleet paused
                    await self._set_gate()

        with suppress(PenstockError):  # no engine is left, or the fleet ends
            await self.queue.run(run)

    async def resume(self) -> None:
        """Resume every engine, then open the gate. StateError: not paused."""

        async def run() -> _Pause | None:
            if (waiting := self._waiting_pause) is not None:
                waiting.given_up.set()
                return waiting
            if not self.paused:
                raise StateError("generation is not paused; pause_generation first")
            async with self._gate_closed():
                self.paused = False
                await self._resume_engines("resume")
                self._move_all(State.SERVING, "resume_generation")
            return None

        while (ended := await self._run_urgently(run)) is not None:
            await ended.over.wait()  # each step of the pause has a deadline
            if not self.paused:  # the pause may have come into force just before
                return

    async def sleep(self, level: int) -> None:
        """Free memory; close the gate until it is back and, at level 2, until an update.

        Requests in flight wait in their engines. Engines without our plugin end them with the finish reason `abort`.
        """
        if level not in (1, DROPS_WEIGHTS):
            raise UserError(f"sleep level must be 1 or 2, got {level}")

        async def run() -> None:
            self._require("sleep", "sleep")
            async with self._gate_closed():
                for member in self._roster.live():
                    member.asleep = MEMORY_TAGS
                await self.refusable(lambda engine: verbs_of(engine).sleep(level), "sleep")
                self.asleep = MEMORY_TAGS
                if level == DROPS_WEIGHTS:
                    self._usable_from = self._roster.version + 1

        await self.queue.run(run)

    async def wake_up(self, tags: Sequence[str] | None) -> None:
        """Take memory back, all or that of `tags`; weights first, since vLLM fills them."""
        with reading("memory tags"):
            if unknown := set(tags or ()) - MEMORY_TAGS:
                raise UserError(f"unknown memory tags {sorted(unknown)}; known: {', '.join(sorted(MEMORY_TAGS))}")

        async def run() -> None:
            self._require("sleep", "wake_up")
            if tags and "weights" in self.asleep - set(tags):
                raise StateError("the weights sleep: wake_up(['weights']) before the KV cache, or both at once")
            # If vLLM is asked for memory that is already there, it takes back none of the rest.
            missing = [tag for tag in tags if tag in self.asleep] if tags and self.asleep else tags
            async with self._gate_closed():
                if missing or not tags:
                    await self.refusable(lambda engine: verbs_of(engine).wake_up(missing), "wake-up")
                self.asleep -= set(tags or MEMORY_TAGS)
                for member in self._roster.live():
                    member.asleep = self.asleep
                if self.paused and not self.asleep:
                    # Engines with our plugin stayed paused. Plain vLLM's wake-up resumes, with no request in flight.
                    await self._pause_engines(PauseMode.KEEP, clear_cache=False)

        await self.queue.run(run)

    async def abort(self) -> None:
        """End every request in flight with its tokens, and thereby the wait of a pause."""
        await self._run_urgently(
            lambda: self.refusable(lambda engine: verbs_of(engine).abort(), "abort", needs="abort")
        )

    async def reset_prefix_cache(self) -> None:

        async def run() -> None:
            await self.refusable(
                lambda engine: verbs_of(engine).reset_prefix_cache(), "reset of the prefix cache", needs="caches"
            )
            self.kv_stays = False

        await self.queue.run(run)

    async def collective_rpc(
        self, method: str, timeout_s: float, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> list[Any]:
        """Call a worker method on every engine, outside the queue; failures kill none.

        Raises:
            EngineDeadError: no engine is left.
            FanOutError: it failed on some engines; of a single engine, its own error.
            MissingCapabilityError: an engine has no such call.
        """
        self._require("rpc", "collective_rpc")
        if seconds(timeout_s) is None:
            raise UserError("timeout_s is None, and this call needs a deadline; leave it out for the default")
        if not (members := self._roster.live()):
            raise EngineDeadError(f"no engine is left now ({why(self._roster.members)})")
        with self._roster.occupation.going_on(), foreign_to(members):
            outcome = await fan_out(
                members,
                lambda engine: verbs_of(engine).collective_rpc(method, timeout_s, args, kwargs),
                # Longer than the engine client's own deadline, so that its message arrives.
                deadline_s=timeout_s + 2.0,
            )
        raise_for(outcome, f"collective_rpc {method!r}")
        return [result for results in outcome.results.values() for result in results]

    async def check(self, member: Member, probe: Awaitable[CoreState | None]) -> None:
        """Await a `probe` of an engine; undo a pause or resume of another process.

        If that process has changed its weights, it is DEAD. No conclusion is possible while an operation runs or the
        fleet sleeps; the next probe repeats the check.
        """
        before, control = self._undisturbed(), member.control
        said = await probe
        if said is None or before is None or before != self._undisturbed() or member.control is not control:
            return
        if member.state not in SERVABLE or not member.info.capabilities.plugin:
            return
        if (wrong := wrong_weights(member, said, self._roster.checksums.get(member.layout, ()))) is not None:
            member.asleep = MEMORY_TAGS if said.asleep else member.asleep
            member.torn = member.info.instance
            await self._roster.mark_dead(member, wrong)
            return
        member.foreign = said.foreign
        if said.paused != self.paused:
            was = "paused" if said.paused else "resumed"
            logger.warning("another process %s engine %s, which is brought back to the fleet's state", was, member.name)
            try:
                await self.queue.run(lambda: self._bring_back(member, control), occupies=False)
            except StateError:
                if not self.queue.closed:
                    raise

    async def _bring_back(self, member: Member, control: ControlClient) -> None:
        """Pause or resume an engine as the fleet is now; one that fails is DEAD."""
        if member.state not in SERVABLE or member.control is not control or self.asleep:
            return

        async def call(engine: ControlClient) -> None:
            await (
                verbs_of(engine).pause(PauseMode.KEEP, clear_cache=False) if self.paused else verbs_of(engine).resume()
            )

        try:
            await ask(member, call, deadline_s=self._control_s)
        except PenstockError as error:
            if member.control is control:
                await self._roster.mark_dead(member, f"it cannot be brought back to the fleet's state: {error}")

    def _undisturbed(self) -> tuple[int, int] | None:
        """Return a value that our calls change; None: one runs, or the fleet sleeps."""
        occupation, stale = self._roster.occupation, self._roster.version < self._usable_from
        if self.queue.turns or occupation.going or self.asleep or stale:
            return None
        return self.queue.changes, occupation.begun

    async def wake(self, member: Member) -> None:
        """Wake a server of others that the fleet took for dead while it slept.

        If the fleet sleeps too and the server needs no weights, it sleeps on, since others may use that memory now. A
        partly sleeping engine is woken wholly, since vLLM can only put a fully awake engine to sleep.
        """
        able = member.info.capabilities
        loads = able.plugin and not member.has(self._roster.version)
        if not able.sleep or ("weights" in self.asleep and self.asleep == member.asleep and not loads):
            return
        for tag in sorted(member.asleep, reverse=True):  # the weights first
            await ask(member, lambda engine, tag=tag: verbs_of(engine).wake_up([tag]), deadline_s=self._control_s)
            member.asleep -= {tag}

    async def bring_to_state(self, member: Member) -> None:
        """Make an engine sleep, pause or run; MissingCapabilityError: it cannot."""

        async def one(call: Call[None]) -> None:
            await ask(member, call, deadline_s=self._control_s)

        asleep, able = self.asleep, member.info.capabilities
        if asleep or self.paused:
            needed: Capability = "sleep" if asleep else "pause"
            require(((member.name, able),), needed, "join a fleet that is paused or sleeps")
        if asleep:
            member.asleep = asleep
            await one(lambda engine: verbs_of(engine).sleep(1))
            if back := sorted(MEMORY_TAGS - asleep):
                await one(lambda engine: verbs_of(engine).wake_up(back))
        elif self.paused:
            # A server of others has KV of its own, which must not outlive a native update.
            await one(lambda engine: verbs_of(engine).pause(PauseMode.KEEP, clear_cache=True))
        elif member.process is None and able.pause:  # its owner paused it, or we did when it was torn
            await one(lambda engine: verbs_of(engine).resume())

    async def _pause_engines(self, mode: PauseMode, *, clear_cache: bool) -> None:
        # Mode `wait` ends with the longest request in flight, the other modes at once.
        deadline_s = self._request_s if mode is PauseMode.WAIT else self._control_s
        await command(
            self._roster,
            lambda engine: verbs_of(engine).pause(mode, clear_cache=clear_cache, timeout_s=deadline_s),
            what=f"pause ({mode})",
            deadline_s=deadline_s,
        )

    async def _resume_engines(self, what: str) -> None:
        await command(self._roster, lambda engine: verbs_of(engine).resume(), what=what, deadline_s=self._control_s)

    async def _wait_for_requests(self, pausing: Coroutine[Any, Any, None], attempt: _Pause) -> None:
        """Run `pausing` until it ends or is given up; `abort` and `resume` may pass it."""
        self._waiting_pause = attempt
        try:
            async with self._let_urgent_pass():
                work = await settled(pausing, attempt.given_up.wait())
        finally:
            self._waiting_pause = None
        if not work.cancelled():
            work.result()

    @asynccontextmanager
    async def _let_urgent_pass(self) -> AsyncGenerator[None]:
        """Let urgent operations run during this block, which waits for them at its end."""
        self._passable = True
        self.queue.notify_all()
        try:
            yield
        finally:
            self._passable = False
            await self.queue.until(lambda: not self._passing)

    async def _run_urgently(self, operation: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run an operation in its turn, or at once while a pause waits."""

        async def run() -> T:
            self._passing += 1
            try:
                return await operation()
            finally:
                self._passing -= 1

        return await self.queue.run(run, early=lambda: self._passable)

    async def refusable(self, call: Call[None], what: str, *, needs: Capability | None = None) -> None:
        """Run a command on every engine that all of them may refuse; see `command`."""
        if needs is not None:
            self._require(needs, what)
        await command(self._roster, call, what=what, deadline_s=self._control_s, refusable=True)

    def _move_all(self, state: State, reason: str) -> None:
        for member in self._roster.live():
            if member.state is not State.DRAINING:  # it did the same as the others, and stays on its way out
                member.lifecycle.to(state, reason)
        self._roster.notify_all()


@dataclass(slots=True)
class _Pause:
    given_up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the pause has to end and every engine has to go on."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Clear while the pause is under way."""
    done: bool = False
    """Whether the pause is in force."""


def seconds(given: Any) -> float | None:
    """Return a caller's `timeout_s`, checked. UserError: it is no number of seconds."""
    if given is not None and not (isinstance(given, (int, float)) and 0 <= given <= LARGEST):
        raise UserError(f"timeout_s is a number of seconds, 0 or more, got {given!r}; leave it out for the default")
    return given


# --- A command to every engine ----------------------------------------------------------------------------------------


async def command(
    roster: Roster,
    call: Call[T],
    *,
    what: str,
    deadline_s: float,
    refusable: bool = False,
    tears: bool = False,
) -> FanOut[T]:
    """Make every live engine change its state; one that fails is dead at once.

    Args:
        roster: the fleet's roster.
        call: the control call.
        what: its name in reasons, such as `pause`.
        deadline_s: seconds for each engine.
        refusable: an engine that answers with an HTTP error is unchanged. It stays if all others refused too; then the
            first refusal is raised.
        tears: a failure may leave weights half written.

    Raises:
        EngineDeadError: no engine is left, or none was there and none is coming back.
        EngineHTTPError: all refused, and it is `refusable`.
    """
    members = roster.live()
    asked = {m.name: m.control for m in members}
    for member in members if tears else ():
        member.torn = member.info.instance

    async def failed(member: Member, error: PenstockError) -> None:
        if not (refusable and isinstance(error, EngineHTTPError)):
            await roster.mark_dead(member, f"{what} failed: {error}")

    outcome = await fan_out(members, call, deadline_s=deadline_s, on_failure=failed)
    for member in members if tears else ():
        if member.name in outcome.results:
            member.torn = None
    # Engines that were spared and not restarted in the call:
    refused = [m for m in members if m.name in outcome.failures and m.state in SERVABLE and m.control is asked[m.name]]
    if refused and not outcome.results:
        raise outcome.failures[refused[0].name]
    for member in refused:  # the others did it, so this engine's state differs from the fleet's
        await roster.mark_dead(member, f"{what} failed: {outcome.failures[member.name]}")
    if members and not roster.live():
        raise EngineDeadError(f"{what}: no engine is left ({why(members)})")
    if not members:
        roster.raise_if_lost()
    return outcome


def raise_for(outcome: FanOut[Any], what: str) -> None:
    """Raise `FanOutError` if one engine failed; for a fan-out to one engine, its own error."""
    results, failures = outcome.results, outcome.failures
    if not results and len(failures) == 1:
        raise next(iter(failures.values()))
    if failures:
        each = "; ".join(f"{name}: {error}" for name, error in failures.items())
        raise FanOutError(
            f"{what} failed on {len(failures)} of {len(failures) + len(results)} engines ({each})",
            failures=failures,
            results=results,
        )
