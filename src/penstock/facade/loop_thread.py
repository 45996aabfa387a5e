"""An event loop in its own thread, so that blocking code can use coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from penstock.errors import StateError

T = TypeVar("T")

STOP_S = 60.0
"""Seconds that `close` waits for cancelled work to end. A cancelled start first ends its engines."""


class LoopThread:
    """Runs coroutines for other threads until it is closed. After that, every call raises StateError.

    The thread is a daemon, so a program that forgets to close it still ends.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._changing = threading.RLock()
        self._closing = False
        self._open: set[Future[Any]] = set()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work`. Cancelling the future cancels it; closing cancels the future."""
        with self._changing:
            if self._closing:
                work.close()
                raise StateError("it was shut down; make a new one")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. An interrupt of the wait (Ctrl-C) cancels it.

        Raises StateError in this object's own thread, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise StateError("a blocking call from the facade's own event loop would wait for itself")
        future = self.submit(work)
        try:
            return future.result()
        except CancelledError:
            raise StateError("it was shut down while this call was under way") from None
        finally:
            future.cancel()

    def close(self, last: Coroutine[Any, Any, None] | None = None) -> None:
        """Run `last`, cancel other work and end the thread. Other threads wait for it."""
        with self._changing:
            ended = self.submit(last if last is not None else asyncio.sleep(0))
            self._closing = True
        ended.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._end.set))
        if threading.current_thread() is not self._thread:
            try:
                ended.result()
            finally:
                self._thread.join(STOP_S)
                for future in tuple(self._open):  # a task that cannot be cancelled must not hold its caller
                    future.cancel()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # at its end it cancels all remaining work
            runner.run(self._end.wait())
