"""Run a coroutine that SIGINT, SIGTERM and SIGHUP end in good order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

SAME_S = 0.5
"""Signals so close are one: a terminal's Ctrl-C comes again from a parent such as `timeout`, which passes it on."""


class Interrupted(BaseException):
    """A signal ended the coroutine. `exit_status` is the shell's convention, 128 + the signal's number."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.exit_status = 128 + number


def run_until_signal(main: Coroutine[Any, Any, T]) -> T:
    """Run `main`; the first SIGINT, SIGTERM or SIGHUP cancels it, so its context managers end what it started.

    SIGHUP, of a terminal that closes, goes unheard where it was ignored before, as under `nohup`.

    A second signal, `SAME_S` later or more, ends this process at once; children then end by their lifelines. A `main`
    that catches the cancellation and returns has its value returned.

    Raises:
        Interrupted: `main` was cancelled by a signal.
    """
    return asyncio.run(_cancel_on_signal(main))


async def _cancel_on_signal(main: Coroutine[Any, Any, T]) -> T:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(main)
    received: list[signal.Signals] = []
    watched = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        watched.append(signal.SIGHUP)

    def on_signal(number: signal.Signals) -> None:
        received.append(number)
        if len(received) == 1:
            task.cancel()
            loop.call_later(SAME_S, let_go)

    def let_go() -> None:
        for number in watched:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)  # Python's own for SIGINT cancels whatever is ending the rest

    for number in watched:
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await task
    except asyncio.CancelledError:
        if received:
            raise Interrupted(received[0]) from None
        raise
    finally:
        for number in watched:
            loop.remove_signal_handler(number)
