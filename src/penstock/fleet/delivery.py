"""Weights that travel while the engines take them: the group over which they do, and what is done where it breaks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol, TypeVar, runtime_checkable

from penstock.aio import cancelled, in_thread
from penstock.errors import DeadlineError, EngineHTTPError, PenstockError, TransferError, WeightsError
from penstock.fleet.fan_out import Call, FanOut, OnFailure, fan_out
from penstock.fleet.member import EngineControl, Member, updatable
from penstock.fleet.roster import Roster
from penstock.types import EngineUpdate
from penstock.weights.broadcast import Layout
from penstock.weights.manifest import WeightManifest

T = TypeVar("T")

ANSWER_S = 5.0
"""Who has not said so long after a transfer was cut that it was, hangs; the others wait for it behind the gate."""


@runtime_checkable
class Sender(Protocol):
    """A store that sends what was published; `weights.broadcast.BroadcastStore` is the real one."""

    def invite(self, layouts: Sequence[Layout]) -> list[dict[str, Any]]: ...  # noqa: D102 - as in BroadcastStore, all
    def form(self) -> None: ...  # noqa: D102
    def absent(self, layouts: Sequence[Layout]) -> list[int]: ...  # noqa: D102
    def formed(self) -> bool: ...  # noqa: D102
    def addressed(self, manifest: WeightManifest) -> WeightManifest: ...  # noqa: D102
    def send(self) -> None: ...  # noqa: D102
    def interrupt(self, why: str) -> None: ...  # noqa: D102
    def forget(self) -> None: ...  # noqa: D102


class Delivery:
    """Keeps one group for as long as the same engines are there.

    Args:
        roster: the engines; a death that it is told of cuts the group at once.
        deadline_s: seconds that each engine has for each call.
    """

    def __init__(self, roster: Roster, deadline_s: float) -> None:
        self._roster = roster
        self._deadline_s = deadline_s
        self.fresh = False
        """The last `gather` formed a group, and did not find it."""
        self._joined: tuple[EngineControl, ...] = ()

    def holds(self, sender: Sender, members: Sequence[Member]) -> bool:
        """Whether the group is whole, and of these engines; one that was started anew is another."""
        return sender.formed() and self._joined == tuple(member.control for member in members)

    async def gather(self, sender: Sender, members: Sequence[Member], *, torn: bool = False) -> list[Member]:
        """Form the group of these engines while they generate, unless it is there; who does not come is DEAD.

        Args:
            sender: opens it.
            members: of these.
            torn: they have half of the version that is sent already.

        Returns:
            Those who are in it.

        Raises:
            WeightsError: an engine refuses to join, so it cannot; or nobody can reach the trainer.
        """
        left, self.fresh = updatable(members), False
        while left and not self.holds(sender, left):
            self._joined, self.fresh = (), True
            if await self._form(sender, left, torn=torn):
                self._joined = tuple(member.control for member in left)
            left = updatable(left)
        return left

    async def send(self, sender: Sender, members: Sequence[Member], call: Call[EngineUpdate]) -> FanOut[EngineUpdate]:
        """Send to the group what was published, while `call` makes every engine take it.

        One that fails is DEAD. One whose transfer was cut is torn and paused, its outcome a `TransferError`.

        Raises:
            WeightsError: the tensors are not those that were published, or do not come; all engines are torn.
        """

        async def failed(member: Member, error: PenstockError) -> None:
            if isinstance(error, TransferError):
                sender.interrupt(str(error))  # which names it; the others would wait for it
            else:
                await self._roster.bury(member, f"apply of new weights failed: {error}", torn=True)

        answers = _Answers()
        async with self._cut_by_a_death(sender, members):
            sending = _beside(sender.send)
            sending.add_done_callback(answers.expect)
            whole = False
            try:
                outcome = await self._asked(members, lambda engine: answers.of(call(engine)), failed)
                whole = not outcome.failures
            finally:
                # Who has sent all of it to all is about to see that; whoever else still sends, does so to nobody.
                await asyncio.wait((sending,), timeout=ANSWER_S if whole else 0.0)
                if not sending.done():
                    sender.interrupt("every engine has answered")
                    await asyncio.wait((sending,), timeout=ANSWER_S)
        if not sending.done() and not whole:
            # Nothing interrupts the trainer's own code; its thread ends by itself, with the group, if it ever goes on.
            raise WeightsError("named_tensors has not given its next tensor before the deadline of sending")
        if sending.done() and isinstance(error := sending.exception(), WeightsError):
            raise error
        return outcome

    async def _form(self, sender: Sender, members: Sequence[Member], *, torn: bool) -> bool:
        """One try; False: somebody has left, or did not come."""
        layouts = [member.layout for member in members]
        invited = await in_thread(lambda: sender.invite(layouts))
        bodies: Mapping[EngineControl, Mapping[str, Any]] = dict(
            zip((member.control for member in members), invited, strict=True)
        )

        async def failed(member: Member, error: PenstockError) -> None:
            if isinstance(error, (WeightsError, EngineHTTPError)):
                sender.interrupt(f"somebody does not join: {error}")
            else:
                await self._roster.bury(member, f"did not join the group for new weights: {error}", torn=torn)

        async with self._cut_by_a_death(sender, members):
            forming = asyncio.create_task(in_thread(sender.form), name="form-group")
            try:
                outcome = await self._asked(members, lambda engine: engine.join_group(bodies[engine]), failed)
                await asyncio.wait((forming,))
            except asyncio.CancelledError:
                sender.interrupt("the update was given up")
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
        absent = sender.absent(layouts)
        for index in absent:
            await self._roster.bury(members[index], f"did not join the group for new weights: {problem}", torn=torn)
        if not absent and len(updatable(members)) == len(members):
            raise WeightsError(f"the group for new weights was not formed: {problem}") from problem
        return False

    async def _asked(self, members: Sequence[Member], call: Call[Any], failed: OnFailure) -> FanOut[Any]:
        return await fan_out(members, call, deadline_s=self._deadline_s, on_failure=failed)

    @asynccontextmanager
    async def _cut_by_a_death(self, sender: Sender, members: Sequence[Member]) -> AsyncGenerator[None]:
        """While this lasts, the group is cut as soon as one of the engines is known to be gone, however it is known."""

        async def watch() -> None:
            await self._roster.until(lambda: len(updatable(members)) < len(members))
            gone = ", ".join(member.name for member in members if not member.updatable)
            sender.interrupt(f"{gone} is gone")

        watching = asyncio.create_task(watch(), name="cut-by-a-death")
        try:
            yield
        finally:
            await cancelled(watching)


class _Answers:
    """Engines have as long as they need while bytes are on their way, and `ANSWER_S` once the sending has failed."""

    def __init__(self) -> None:
        self._waits: set[asyncio.Timeout] = set()

    async def of(self, answer: Awaitable[T]) -> T:
        """One engine's answer. Raises DeadlineError where it came too late."""
        wait = asyncio.timeout(None)
        try:
            async with wait:
                self._waits.add(wait)
                try:
                    return await answer
                finally:
                    self._waits.remove(wait)
        except TimeoutError as error:
            if not wait.expired():
                raise
            message = f"no answer within {ANSWER_S:g} s after the transfer was cut"
            raise DeadlineError(message, seconds=ANSWER_S) from error

    def expect(self, sending: asyncio.Future[None]) -> None:
        """The sending is over."""
        if sending.exception() is not None:
            for wait in self._waits:
                wait.reschedule(asyncio.get_running_loop().time() + ANSWER_S)


def _beside(work: Callable[[], None]) -> asyncio.Future[None]:
    """Run `work`, which may never return, in a thread that neither the loop's end nor that of the process waits for."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()

    def tell(error: BaseException | None) -> None:
        if error is None:
            over.set_result(None)
        else:
            over.set_exception(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:  # noqa: BLE001 - it is for who waits
            error = raised
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, error)

    threading.Thread(target=run, name="send-weights", daemon=True).start()
    return over
