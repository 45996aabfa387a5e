"""An event loop in a thread of its own, so that blocking code can use what is asynchronous."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from penstock.errors import StateError

T = TypeVar("T")

STOP_S = 60.0
"""How long closing waits for what still runs to take its cancellation; a start that is given up ends engines first."""

_ENDED = "it was shut down while this call was under way"


class LoopThread:
    """Runs coroutines for other threads until it is closed; after that every call is a StateError.

    The thread is a daemon: a program that forgets to close it ends all the same.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._changing = threading.RLock()
        self._closing = False
        self._open: set[Future[Any]] = set()
        """Work that has not ended."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work`; cancelling the future cancels it, and closing the thread cancels the future."""
        with self._changing:
            if self._closing:
                work.close()
                raise StateError("it was shut down; make a new one")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for what `work` returns or raises. An interrupt of the wait (Ctrl-C) cancels it.

        StateError also in this very thread, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise StateError("a blocking call from the facade's own event loop would wait for itself")
        future = self.submit(work)
        try:
            return future.result()
        except CancelledError:
            raise StateError(_ENDED) from None  # no one else has the future
        finally:
            future.cancel()

    async def result(self, work: Coroutine[Any, Any, T]) -> T:
        """Await what `work` returns or raises, in an event loop of the caller's."""
        future = self.submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                raise StateError(_ENDED) from None
            raise

    def close(self, last: Coroutine[Any, Any, None] | None = None) -> None:
        """Do a last thing, cancel what runs, and end the thread. Waits for it, but not from that thread itself."""
        with self._changing:
            ended = self.submit(last if last is not None else asyncio.sleep(0))
            self._closing = True
        ended.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        if threading.current_thread() is not self._thread:
            try:
                ended.result()
            finally:
                self._thread.join(STOP_S + 1.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(asyncio.sleep(0))  # what was submitted last becomes a task
            until = time.monotonic() + STOP_S
            while (left := asyncio.all_tasks(self._loop)) and (remaining := until - time.monotonic()) > 0:
                for task in left:
                    task.cancel()
                self._loop.run_until_complete(asyncio.wait(left, timeout=remaining))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
            for future in tuple(self._open):
                future.cancel()  # or its caller would wait for ever
