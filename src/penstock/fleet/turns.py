"""Operations one after another: a begun one runs to its end even where its caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from typing import Any, TypeVar

from penstock.errors import StateError
from penstock.fleet.probe import Occupation

T = TypeVar("T")


class Turns:
    """Whose turn it is. What is begun is not cut short by its caller, so that no engine is left in between.

    Args:
        occupation: where it is noted that an operation may keep engines from answering anything else.
    """

    def __init__(self, occupation: Occupation) -> None:
        self._occupation = occupation
        self._turn = asyncio.Lock()
        self._running: asyncio.Task[Any] | None = None
        self._closed = False

    @property
    def taken(self) -> bool:
        """An operation is under way."""
        return self._turn.locked()

    def check_open(self) -> None:
        """Raise StateError after `close`."""
        if self._closed:
            raise StateError("this fleet was torn down")

    async def close(self) -> None:
        """Let no further operation begin, and cut short the one that runs."""
        self._closed = True
        if self._running is not None and not self._running.done():
            self._running.cancel()
            await asyncio.wait((self._running,))

    async def take(
        self,
        operation: Callable[[], Coroutine[Any, Any, T]],
        after: Callable[[], None] = lambda: None,
        *,
        occupies: bool = True,
    ) -> T:
        """Run `operation` in its turn, and `after` when it is over or never began.

        `occupies`: an engine that does its part may answer nothing else meanwhile.
        """
        try:
            await self._turn.acquire()
        except BaseException:
            after()
            raise

        def done(task: asyncio.Task[T]) -> None:
            self._turn.release()
            after()
            if not task.cancelled():
                task.exception()  # where the caller has gone, nobody else asks; what it did to engines is logged

        async def run() -> T:
            self.check_open()
            with self._occupation.going_on() if occupies else nullcontext():
                return await operation()

        self._running = task = asyncio.create_task(run())
        task.add_done_callback(done)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self._closed and task.cancelled():  # it is `close` that cut it short, not whoever waits here
                raise StateError("this fleet was torn down in the middle of the operation") from None
            raise

    async def take_unless_closed(self, operation: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """`take` what may be left out: `close`, before it or in its middle, is no error. It occupies no engine."""
        try:
            await self.take(operation, occupies=False)
        except StateError:
            if not self._closed:
                raise
