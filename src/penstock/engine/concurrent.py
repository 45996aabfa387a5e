"""Many coroutines at once, where the first failure cancels the others and is raised as it is; work in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def all_or_first_error(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order. Nothing is left running when this returns or raises."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in tasks]


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread; a cancellation takes effect when it has ended, since until then it uses what is ours."""
    thread = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        await asyncio.wait((thread,))
        raise


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task, wait until it has ended, and raise what broke it before that, if something did."""
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error
