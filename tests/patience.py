"""How long tests wait for what must happen, and how."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import psutil
import pytest

T = TypeVar("T")

WAIT_S = 120.0
"""A test that passes never waits it out, so it is long: the machine may be busy with other things."""

HANG_S = 30.0
"""`hang_timeout_s` where a hang must be noticed: within `WAIT_S`, and longer than a busy machine stands still."""


async def eventually(holds: Callable[[], bool], seconds: float = WAIT_S) -> None:
    """Wait for what another process, or a socket, will bring about without an event of its own."""
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110 - there is none
            await asyncio.sleep(0.005)


async def asked(ask: Callable[[], Awaitable[T]], holds: Callable[[T], bool], seconds: float = WAIT_S) -> T:
    """Return the first answer that `holds`, of what sends no event."""
    answer: object = "none"
    try:
        async with asyncio.timeout(seconds):
            while not holds(answer := await ask()):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            return answer
    except TimeoutError:
        raise AssertionError(f"it did not get there; its last answer: {answer}") from None


async def give_up(call: asyncio.Task[Any]) -> None:
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


def alive(pid: int) -> bool:
    """Whether a process is there, and not only its status for a parent that has not asked for it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
