"""Run coroutines together, work in a thread, and waits for changes; cancel tasks without losing what they raised."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")


async def all_or_first_error(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results in order, or raise the first failure; nothing is left running either way."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in tasks]


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread. A cancellation takes effect when the thread has ended: until then it uses our data."""
    thread = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        await asyncio.wait((thread,))
        raise


async def abandonable(work: Callable[[], T]) -> T:
    """Run `work` in a thread of its own. A cancellation leaves it behind, and the process ends without it.

    For work that changes nothing and may take for ever, such as a user's code.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # a cancellation is the caller's alone

    def run() -> None:
        with _Outcome(done):
            done.set_result(work())

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(done)


class _Outcome(Generic[T]):
    """Hands an error of the block to a future, whatever its type, as an executor does."""

    def __init__(self, done: Future[T]) -> None:
        self._done = done

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is not None:
            self._done.set_exception(error)
        return True


async def settled(work: Awaitable[T], event: Coroutine[Any, Any, object]) -> asyncio.Future[T]:
    """Run `work` to its end, or until `event` returns; returns its future, which is cancelled in the latter case.

    What `event` raises in that time ends `work` too, and is raised.
    """
    working, watching = asyncio.ensure_future(work), asyncio.create_task(event)
    tasks = (working, watching)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    if working.cancelled() and not watching.cancelled():
        watching.result()
    return working


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task, wait for its end, and raise what broke it before that, if something did."""
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


class Changes:
    """Wakes each wait for a condition whenever the state behind it changes."""

    def __init__(self) -> None:
        self.changes = 0
        """How many there have been."""
        self._changed = asyncio.Event()

    def announce(self) -> None:
        """Wake every `until`: something changed."""
        self.changes += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, reached: Callable[[], bool], *, deadline_s: float | None = None) -> bool:
        """Wait until `reached()`, evaluated after each change. False: it was not within the deadline."""
        try:
            async with asyncio.timeout(deadline_s):
                while not reached():
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True
