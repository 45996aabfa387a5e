"""Operations that change all engines, one after another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager, nullcontext
from typing import Any, TypeVar

from penstock.errors import StateError
from penstock.fleet.fan_out import Occupation

T = TypeVar("T")


class OperationQueue:
    """Runs operations one after another. A begun one runs to its end even where its caller is cancelled.

    Args:
        occupation: notes that an operation may keep engines from answering anything else.
    """

    def __init__(self, occupation: Occupation) -> None:
        self.busy = False
        """An operation is under way."""
        self._occupation = occupation
        self._waiting: dict[asyncio.Future[bool], bool] = {}
        """Those that wait for their turn, in order, and whether each is urgent."""
        self._passable = False
        self._passing = 0
        self._passed = asyncio.Event()
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False

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

        Args:
            operation: what to run.
            after: called at the end.
            occupies: an engine that does its part may answer nothing else meanwhile.
            urgent: it does not wait for an operation that is `passable`.
        """
        with ExitStack() as never_began:
            never_began.callback(after)
            end_turn = await self._turn(urgent=urgent)
            never_began.pop_all()

        async def run() -> T:
            self.check_open()
            with self._occupation.going_on() if occupies else nullcontext():
                return await operation()

        def done(task: asyncio.Task[T]) -> None:
            self._running.discard(task)
            end_turn()
            after()
            if not task.cancelled():
                task.exception()  # the caller may be gone; what it did to engines is logged

        task = asyncio.create_task(run())
        self._running.add(task)
        task.add_done_callback(done)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self._closed and task.cancelled():  # by `close`, not by the caller
                raise StateError("this fleet was torn down in the middle of the operation") from None
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
        for waiter, urgent in self._waiting.items():
            if urgent and not waiter.done():
                self._passing += 1
                waiter.set_result(False)
        try:
            yield
        finally:
            self._passable = False
            while self._passing:
                self._passed.clear()
                await self._passed.wait()

    async def _turn(self, *, urgent: bool) -> Callable[[], None]:
        """Wait for the turn, or for leave to pass; returns what ends it."""
        if not self.busy:
            self.busy = True
            return self._release
        if urgent and self._passable:
            self._passing += 1
            return self._end_passing
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = urgent
        try:
            return self._release if await waiter else self._end_passing
        except asyncio.CancelledError:
            if not waiter.cancelled():  # it came just before
                (self._release if waiter.result() else self._end_passing)()
            raise
        finally:
            del self._waiting[waiter]

    def _release(self) -> None:
        next_one = next((waiter for waiter in self._waiting if not waiter.done()), None)
        self.busy = next_one is not None
        if next_one is not None:
            next_one.set_result(True)

    def _end_passing(self) -> None:
        self._passing -= 1
        self._passed.set()
