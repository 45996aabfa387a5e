"""An event loop in a thread of its own, so that blocking code can use what is asynchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from penstock.errors import StateError

T = TypeVar("T")

STOP_S = 10.0
"""How long closing waits for what still runs to take its cancellation."""


class LoopThread:
    """Runs coroutines for other threads until it is closed.

    The thread is a daemon: a program that forgets to close it ends all the same.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work`; cancelling the future cancels it.

        Raises:
            StateError: the thread is closed.
        """
        if self._loop.is_closed() or not self._thread.is_alive():
            work.close()
            raise StateError("it was shut down; make a new one")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for what `work` returns or raises. Whatever interrupts the wait (Ctrl-C) cancels it.

        Raises:
            StateError: the thread is closed, or it is this very thread, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise StateError("a blocking call from the facade's own event loop would wait for itself")
        future = self.submit(work)
        try:
            return future.result()
        finally:
            future.cancel()

    def close(self, last: Coroutine[Any, Any, None] | None = None) -> None:
        """Do a last thing, cancel what runs, and end the thread. Waits for it, but not from that thread itself."""
        ended = self.submit(last if last is not None else asyncio.sleep(0))
        ended.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        if threading.current_thread() is not self._thread:
            try:
                ended.result()
            finally:
                self._thread.join(STOP_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.wait(left, timeout=STOP_S / 2))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
