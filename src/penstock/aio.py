"""Coroutines run together, work in threads, waits for changes, and cancellation that keeps a task's error."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from typing import Any, TypeVar

logger = logging.getLogger(__name__)
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


async def in_thread(work: Callable[[], T], *, leave_s: float | None = None, asks: str = "") -> T:
    """Run `work` in a thread; a cancellation waits for its end, as it uses our data.

    Python cannot end a thread. If `work` may take for ever, such as a user's code, `leave_s` bounds that wait, and the
    process's end does not wait at all. The log then says what `work` asks for.
    """
    threads = None if leave_s is None else OwnThreads()
    running = asyncio.get_running_loop().run_in_executor(threads, contextvars.copy_context().run, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if not (await asyncio.wait((running,), timeout=leave_s))[0] and asks:
            logger.warning("%s did not come within %g s; the thread that asks for them is left behind", asks, leave_s)
        raise


class OwnThreads(Executor):
    """Runs each call in a daemon thread of its own."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        done: Future[T] = Future()

        def failed(_kind: object, error: BaseException | None, _trace: object) -> bool:
            if isinstance(error, StopIteration):  # no future takes one, so the wait for this one would not end
                error = RuntimeError(f"StopIteration: {error}").with_traceback(error.__traceback__)
            if error is not None:
                done.set_exception(error)
            return True

        def run() -> None:
            with ExitStack() as outcome:
                outcome.push(failed)
                done.set_result(fn(*args, **kwargs))

        threading.Thread(target=run, daemon=True).start()
        return done


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
