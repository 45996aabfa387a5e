"""Coroutines run together, work in threads, waits for changes, and cancellation that keeps a task's error."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def all_or_first_error(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results in order, or raise the first failure after all have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in tasks]


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread; a cancellation waits for its end, as it uses our data."""
    thread = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        await asyncio.wait((thread,))
        raise


async def settled(work: Awaitable[T], event: Coroutine[Any, Any, object]) -> asyncio.Future[T]:
    """Run `work` until it or `event` ends; return its future, cancelled by `event`.

    An error of `event` also ends `work`, and is raised.
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
    """Cancel a task, wait for its end, and raise an error that had broken it."""
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


class Changes:
    """Wakes the waits for a condition whenever the state behind it changes."""

    def __init__(self) -> None:
        self.changes = 0
        """Number of calls of `notify_all` so far."""
        self._changed = asyncio.Event()

    def notify_all(self) -> None:
        """Wake every `until`: something changed."""
        self.changes += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, reached: Callable[[], bool], *, deadline_s: float | None = None) -> bool:
        """Wait until `reached()`, evaluated after each change; False: the deadline passed."""
        try:
            async with asyncio.timeout(deadline_s):
                while not reached():
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True
