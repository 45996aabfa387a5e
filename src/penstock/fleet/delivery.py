"""Weights sent by broadcast: the group of trainer and engines, and its repair when it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from penstock.aio import cancelled, in_thread, settled
from penstock.control_types import EngineUpdate
from penstock.engine.control import ControlClient
from penstock.engine.verbs import verbs_of
from penstock.errors import DeadlineError, EngineHTTPError, PenstockError, TransferError, WeightsError
from penstock.fleet.member import Call, FanOut, Member, fan_out, updatable
from penstock.fleet.roster import Roster
from penstock.fleet.update import Fetching
from penstock.weights.broadcast import BroadcastStore
from penstock.weights.manifest import WeightManifest

T = TypeVar("T")

ANSWER_S = 5.0
"""Seconds without an answer after a cut transfer until an engine counts as hung; the others wait behind the gate."""

SENDINGS = 4
"""Most times that one version is sent. Each repetition follows an engine's death or lost bytes."""


class Delivery(Fetching):
    """Sends versions to the engines, and keeps one group as long as the engines stay the same."""

    def __init__(self, sender: BroadcastStore, roster: Roster, deadline_s: float) -> None:
        super().__init__(roster, deadline_s)
        self.sender = sender
        self._joined: tuple[ControlClient, ...] = ()

    async def ready(
        self, members: Sequence[Member], manifest: WeightManifest
    ) -> tuple[Sequence[Member], Mapping[str, float]]:
        """Form the group and prepare; see `Fetching.ready`. Raises as `gather`."""
        members = await self.gather(members)
        try:
            return members, await self._prepare(members, manifest)
        except WeightsError:
            # An engine may have forgotten the group: the next update forms another one.
            self.sender.interrupt("an engine does not prepare what is to be sent over it")
            raise

    async def apply(
        self, members: Sequence[Member], manifest: WeightManifest, call: Call[EngineUpdate]
    ) -> Mapping[str, EngineUpdate]:
        """Send a version, each time whole, to the engines left until none is torn."""
        results: dict[str, EngineUpdate] = {}
        waiting, problem = list(members), "it was sent too often"
        try:
            for _ in range(SENDINGS):
                if not self.holds(waiting):
                    waiting = await self.gather(waiting)
                    await self._prepare(waiting, manifest)
                    waiting = updatable(waiting)
                if not waiting:
                    break
                outcome = await self.send(waiting, call)
                results |= outcome.results
                cut = {name: error for name, error in outcome.failures.items() if isinstance(error, TransferError)}
                waiting = [m for m in updatable(waiting) if m.name in cut]
                if not waiting:
                    break
                problem = str(cut[waiting[0].name])
        except (PenstockError, RuntimeError, OSError) as error:  # torch's and the system's too: engines are torn by now
            problem = str(error)
        for member in waiting:
            await self.roster.mark_dead(member, f"apply of weight version {manifest.version} failed: {problem}")
        return results

    def forget(self) -> None:
        self.sender.forget()

    async def _prepare(self, members: Sequence[Member], manifest: WeightManifest) -> Mapping[str, float]:
        return await self.prepare(members, self.sender.addressed(manifest))

    def holds(self, members: Sequence[Member]) -> bool:
        """Return whether the group is whole and has exactly these engine instances."""
        return self.sender.formed() and self._joined == tuple(member.control for member in members)

    async def gather(self, members: Sequence[Member]) -> list[Member]:
        """Form the group of these engines while they generate, and return its engines.

        An engine that does not join is DEAD.

        WeightsError: an engine refuses to join, or none can reach the trainer.
        """
        left = updatable(members)
        while left and not self.holds(left):
            self._joined = ()
            if await self._form(left):
                self._joined = tuple(member.control for member in left)
            left = updatable(left)
        return left

    async def send(self, members: Sequence[Member], call: Call[EngineUpdate]) -> FanOut[EngineUpdate]:
        """Send the published version to the group while `call` makes engines take it.

        An engine that fails is DEAD. One whose transfer was cut is torn and paused; its outcome is a `TransferError`.

        Raises:
            WeightsError: the tensors differ from the published ones, or do not come; all engines are torn.
        """

        async def failed(member: Member, error: PenstockError) -> None:
            if isinstance(error, TransferError):
                self.sender.interrupt(str(error))  # it names the engine, for which the others would wait
            else:
                await self.roster.mark_dead(member, f"apply of new weights failed: {error}")

        async with self._cut_by_a_death(members):
            # The sender may never return, so neither the event loop nor the process waits for its thread.
            sending = asyncio.create_task(in_thread(self.sender.send, leave_s=0.0), name="send-weights")

            async def too_late() -> None:
                """Return when an answer is late: some time after the end of the sending."""
                await asyncio.wait((sending,))
                await asyncio.sleep(self.deadline_s if sending.exception() is None else ANSWER_S)

            async def answer(engine: ControlClient) -> EngineUpdate:
                given = await settled(call(engine), too_late())
                if given.cancelled():
                    raise DeadlineError(f"no answer within {ANSWER_S:g} s after the transfer was cut", seconds=ANSWER_S)
                return given.result()

            whole = False
            try:
                outcome = await fan_out(members, answer, deadline_s=self.deadline_s, on_failure=failed)
                whole = not outcome.failures
            finally:
                # If all engines have everything, the sending is about to end; else it sends to lost engines.
                await asyncio.wait((sending,), timeout=ANSWER_S if whole else 0.0)
                if not sending.done():
                    self.sender.interrupt("every engine has answered")
                    await asyncio.wait((sending,), timeout=ANSWER_S)
        if not sending.done() and not whole:
            # The trainer's own code cannot be interrupted; its thread ends by itself once that code goes on.
            raise WeightsError("named_tensors has not given its next tensor before the deadline of sending")
        if sending.done() and isinstance(error := sending.exception(), WeightsError):
            raise error
        return outcome

    async def _form(self, members: Sequence[Member]) -> bool:
        """Try once to form the group; False: an engine has left, or did not join."""
        layouts = [member.layout for member in members]
        invited = await in_thread(lambda: self.sender.invite(layouts))
        bodies: Mapping[ControlClient, Mapping[str, Any]] = dict(
            zip((member.control for member in members), invited, strict=True)
        )

        async def failed(member: Member, error: PenstockError) -> None:
            if isinstance(error, (WeightsError, EngineHTTPError)):
                self.sender.interrupt(f"an engine does not join: {error}")
            else:
                await self.roster.mark_dead(member, f"did not join the group for new weights: {error}")

        async with self._cut_by_a_death(members):
            forming = asyncio.create_task(in_thread(self.sender.form), name="form-group")
            try:
                outcome = await fan_out(
                    members,
                    lambda engine: verbs_of(engine).join_group(bodies[engine]),
                    deadline_s=self.deadline_s,
                    on_failure=failed,
                )
                await asyncio.wait((forming,))
            except asyncio.CancelledError:
                self.sender.interrupt("the update was given up")
                await asyncio.wait((forming,))
                raise
        problem = forming.exception()
        for error in outcome.failures.values():
            if isinstance(error, (WeightsError, EngineHTTPError)):
                raise WeightsError(f"weights cannot go by broadcast: {error}") from error
        if problem is None:
            return True
        if not isinstance(problem, TransferError):
            raise problem
        absent = self.sender.absent(layouts)
        for index in absent:
            await self.roster.mark_dead(members[index], f"did not join the group for new weights: {problem}")
        if not absent and len(updatable(members)) == len(members):
            raise WeightsError(f"the group for new weights was not formed: {problem}") from problem
        return False

    @asynccontextmanager
    async def _cut_by_a_death(self, members: Sequence[Member]) -> AsyncGenerator[None]:
        """Cut the group as soon as any watch finds one of the engines gone."""

        async def watch() -> None:
            await self.roster.until(lambda: len(updatable(members)) < len(members))
            gone = ", ".join(member.name for member in members if not member.updatable)
            self.sender.interrupt(f"{gone} is gone")

        watching = asyncio.create_task(watch(), name="cut-by-a-death")
        try:
            yield
        finally:
            await cancelled(watching)
