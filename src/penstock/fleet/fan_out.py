"""One control call to many engines at once, each with its own outcome; and the queue of operations, one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from penstock.aio import Changes
from penstock.engine.control import ControlClient
from penstock.errors import DeadlineError, EngineError, FanOutError, PenstockError, StateError
from penstock.fleet.member import Member

T = TypeVar("T")
Call = Callable[[ControlClient], Awaitable[T]]
OnFailure = Callable[[Member, PenstockError], Awaitable[None]]

TICK_S = 1.0
"""At most so much of one wait for a timer counts; an event loop that stands still makes one wait long."""


@dataclass(frozen=True, slots=True)
class FanOut(Generic[T]):
    """What each engine of a snapshot answered, by name and in the snapshot's order; each is in one of the two."""

    results: Mapping[str, T]
    failures: Mapping[str, PenstockError]

    def raise_for(self, what: str) -> None:
        """Raise `FanOutError` with every failure, if one engine failed; of a single engine, its own error."""
        if not self.results and len(self.failures) == 1:
            self.raise_first()
        if self.failures:
            each = "; ".join(f"{name}: {error}" for name, error in self.failures.items())
            count = len(self.failures) + len(self.results)
            raise FanOutError(
                f"{what} failed on {len(self.failures)} of {count} engines ({each})",
                failures=self.failures,
                results=self.results,
            )

    def raise_first(self) -> None:
        """Raise the failure of the first engine that failed, if one did."""
        for error in self.failures.values():
            raise error


async def ask(member: Member, call: Call[T], *, deadline_s: float) -> T:
    """Return what one engine answers to `call`. Whatever goes wrong is a `PenstockError`."""
    try:
        async with asyncio.timeout(deadline_s):
            return await call(member.control)
    except TimeoutError as error:
        late = f"no answer within {deadline_s:g} s"
        raise DeadlineError(late, seconds=deadline_s, engine=member.name) from error
    except PenstockError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"answered something that cannot be read: {error!r}", engine=member.name) from error


async def fan_out(
    members: Sequence[Member], call: Call[T], *, deadline_s: float, on_failure: OnFailure | None = None
) -> FanOut[T]:
    """Make `call` on every member at once and wait for every outcome; a failure of one does not touch the others.

    Each has `deadline_s` seconds; then its outcome is a `DeadlineError`. `on_failure` is awaited as soon as an engine
    has failed, while others may still be at work, unless it has been restarted since it was asked.
    """
    results: dict[str, T] = {}
    failures: dict[str, PenstockError] = {}

    async def outcome(member: Member) -> None:
        control = member.control
        try:
            results[member.name] = await ask(member, call, deadline_s=deadline_s)
        except PenstockError as error:
            failures[member.name] = error
            if on_failure is not None and member.control is control:
                await on_failure(member, error)

    async with asyncio.TaskGroup() as group:
        for member in members:
            group.create_task(outcome(member))
    names = [member.name for member in members]
    return FanOut(
        {name: results[name] for name in names if name in results},
        {name: failures[name] for name in names if name in failures},
    )


class Occupation(Changes):
    """Calls of ours under way that may keep engines' cores from answering anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = 0
        """How many there have been."""
        self._calls = 0

    @contextmanager
    def going_on(self) -> Generator[None]:
        """While such a call is under way."""
        self._calls += 1
        self.begun += 1
        self.announce()
        try:
            yield
        finally:
            self._calls -= 1
            self.announce()

    @property
    def going(self) -> bool:
        """One is under way."""
        return self._calls > 0

    async def over(self) -> None:
        """Return when there is none."""
        await self.until(lambda: not self.going)

    async def without(self, seconds: float) -> None:
        """Return when there has been none for so many seconds in all, from now on.

        Seconds in which this event loop stood still do not count: a trainer may compute in the thread that runs it, and
        an answer that came meanwhile has not been read.
        """
        now = asyncio.get_running_loop().time
        while seconds > 0:
            await self.over()
            since, at_most = now(), min(seconds, TICK_S)
            interrupted = await self.until(lambda: self.going, deadline_s=at_most)
            seconds -= min(now() - since, at_most) if interrupted else at_most


class OperationQueue(Changes):
    """Runs operations one after another. A begun one runs to its end even where its caller is cancelled."""

    def __init__(self, occupation: Occupation) -> None:
        super().__init__()
        self._occupation = occupation
        self._turns: list[object] = []
        """Of the operations in their order; the first is under way, and keeps its place until it has ended."""
        self._passable = False
        self._passing = 0
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def busy(self) -> bool:
        """An operation is under way."""
        return bool(self._turns)

    def check_open(self) -> None:
        """Raise StateError after `close`."""
        if self._closed:
            raise StateError("this fleet was torn down")

    async def close(self) -> None:
        """Let no further operation begin, and cancel the one that runs."""
        self._closed = True
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
            if self._closed and task.cancelled():  # by `close`, not by the caller
                raise StateError("this fleet was torn down in the middle of the operation") from None
            if not begun:
                task.cancel()
            raise

    async def run_unless_closed(self, operation: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """`run` what may be left out: `close`, before it or in its middle, is no error. It occupies no engine."""
        try:
            await self.run(operation, occupies=False)
        except StateError:
            if not self._closed:
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
        self._turns.append(turn)
        passes = False
        try:
            await self.until(lambda: self._turns[0] is turn or (urgent and self._passable))
            passes = self._turns[0] is not turn
            self._passing += passes
            yield
        finally:
            self._passing -= passes
            self._turns.remove(turn)
            self.announce()
