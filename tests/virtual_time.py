"""Virtual time for tests and discrete-event fleets.

Virtual time is a property of the event loop: when nothing is ready to run, the loop's clock jumps to its next timer
instead of waiting for it. So every `asyncio.sleep`, `wait_for` and `timeout` of a program is virtual, and a run is
deterministic because asyncio runs what is ready in order.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlockError(RuntimeError):
    """Under virtual time every task waits and no timer is set, so nothing can happen again."""


class VirtualClock:
    """Virtual time, from 0. `now` only moves when a loop driven by it has nothing else to do."""

    def __init__(self) -> None:
        self.now = 0.0


class _VirtualSelector(selectors.DefaultSelector):
    """Never waits: a timeout that would pass is added to the clock."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise DeadlockError("every task waits for another and no timer is set: nothing can happen any more")
        self._clock.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on a virtual clock. Sockets of other processes have no place in it."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(_VirtualSelector(clock))
        self._virtual_clock = clock

    def time(self) -> float:
        """Virtual seconds."""
        return self._virtual_clock.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # noqa: ARG002
        """Run at once what is given to a thread: virtual time does not wait for threads."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it is raised where the result is asked for
            future.set_exception(error)
        return future


def run_virtual(main: Callable[[VirtualClock], Coroutine[Any, Any, T]]) -> T:
    """Run `main(clock)` to its end in virtual time; the counterpart of `asyncio.run`.

    Raises:
        DeadlockError: the program waits for something that can never happen.
    """
    clock = VirtualClock()
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(clock)) as runner:
        return runner.run(main(clock))


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in virtual time: a machine that stands still ends none of its deadlines."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        run_virtual(lambda _: test(*args, **kwargs))

    return run
