"""Work in threads that nothing waits for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


async def abandonable(work: Callable[[], T]) -> T:
    """Run `work` in its own thread, which a cancellation or the process's end leaves.

    It is for work without side effects that may take for ever, such as a user's code.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # a cancellation affects only the caller

    def run() -> None:
        with _Outcome(done):
            done.set_result(work())

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(done)


class _Outcome(Generic[T]):
    """Hands any error of its block to a future, as an executor does."""

    def __init__(self, done: Future[T]) -> None:
        self._done = done

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is not None:
            self._done.set_exception(error)
        return True
