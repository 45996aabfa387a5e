"""Requests that end as soon as no engine is left for them, or the fleet ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from penstock.errors import EngineError
from penstock.fleet.roster import Roster

T = TypeVar("T")


async def while_hope(roster: Roster, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; `roster.no_hope` as soon as nobody is left who could do it, and no wait for the router's.

    Requests that find no engine wait in the router, which does not know whether one will come.
    """
    doing = asyncio.create_task(work)
    gone = asyncio.create_task(roster.until(roster.hopeless))
    try:
        await asyncio.wait((doing, gone), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise roster.no_hope()
        return doing.result()
    except EngineError:
        roster.check_hope()
        raise
    finally:
        gone.cancel()
        doing.cancel()
        await asyncio.wait((doing, gone))


async def each_while_hope(roster: Roster, items: AsyncGenerator[T]) -> AsyncGenerator[T]:
    """Each of `items`, none of which is None; raises as `while_hope`.

    Read in the caller's own task, where a task for each item would cost as much as reading it.
    """
    waiting: asyncio.Timeout | None = None

    def give_up(_: asyncio.Task[bool]) -> None:
        if waiting is not None:
            waiting.reschedule(0.0)

    gone = asyncio.create_task(roster.until(roster.hopeless))
    gone.add_done_callback(give_up)
    try:
        async with aclosing(items):
            while True:
                try:
                    async with asyncio.timeout(0.0 if gone.done() else None) as waiting:
                        item = await anext(items, None)
                finally:
                    waiting = None
                if item is None:
                    return
                yield item
    except TimeoutError:
        raise roster.no_hope() from None
    except EngineError:
        roster.check_hope()
        raise
    finally:
        gone.cancel()
