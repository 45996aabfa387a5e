"""Notices that an engine's core says nothing any more, though the API server in front of it is well.

The server answers health checks by itself, so a core that was stopped or hangs, in a process of its own, is noticed by
nobody but those who wait for its tokens. A question that the core itself has to answer waits for the step that it is
at, and for nothing else: what is in the queue or in flight does not delay it. So a core's longest honest silence is one
step, a fraction of a second even for a full chunk of prefill, but for three cases:

- A call of ours keeps it busy: it loads weights, sleeps, or runs a method of `collective_rpc`. Such a call has a
  deadline of its own; while it is under way nothing is asked, and the time does not count. What was counted before it
  stays, and so does a question that was put before it, which a core that is well answers by the call's end: calls may
  come more often than a core needs to be found silent, and most are not for this engine at all.
- It has not made a token yet: the first steps compile kernels, for as long as that takes. `YOUNG` allows for it.
- A later step compiles one more kernel. `hang_timeout_s` has to be longer than that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from typing import Any

from penstock.errors import DeadlineError, PenstockError
from penstock.fleet.member import EngineControl

QUESTIONS = 10
"""So often within the time in which an answer must come is a core asked; each question costs it microseconds."""
YOUNG = 10
"""An engine that has made no token yet may be silent for so many times as long."""
TICK_S = 1.0
"""Of one wait for a timer no more than this counts; a loop that stands still makes one wait long."""


class Occupation:
    """Calls of ours under way that may keep engines' cores from answering anything else."""

    def __init__(self) -> None:
        self._calls = 0
        self._begun = asyncio.Event()
        self._over = asyncio.Event()
        self._over.set()

    @contextmanager
    def going_on(self) -> Generator[None]:
        """While such a call is under way."""
        self._calls += 1
        self._over.clear()
        self._begun.set()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._begun.clear()
                self._over.set()

    async def over(self) -> None:
        """Return when there is none."""
        await self._over.wait()

    async def without(self, seconds: float) -> None:
        """Return when there has been none for so many seconds in all, from now on.

        Seconds in which this event loop stood still do not count: a trainer may compute in the thread that runs it, and
        an answer that came meanwhile has not been read.
        """
        now = asyncio.get_running_loop().time
        while seconds > 0:
            await self.over()
            since, at_most = now(), min(seconds, TICK_S)
            try:
                async with asyncio.timeout(at_most):
                    await self._begun.wait()
            except TimeoutError:
                seconds -= at_most
            else:
                seconds -= min(now() - since, at_most)


async def until_silent(control: EngineControl, occupation: Occupation, *, hang_s: float, interval_s: float) -> float:
    """Ask an engine's core now and then; return when it is silent, with the seconds for which it was.

    Args:
        control: of the engine. Any answer will do, also an error: whether the engine is well is another's question.
        occupation: the calls during which it may be silent.
        hang_s: it hangs after so many seconds without an answer, those of such calls not counted.
        interval_s: seconds between an answer and the next question.
    """
    missed = 0
    while True:
        if not missed:
            await asyncio.sleep(interval_s)
        if await _first(_answers(control, occupation, interval_s), _in_vain(occupation, hang_s)):
            missed = 0
            continue
        missed += 1
        if missed == YOUNG or not await _is_young(control, hang_s):
            return missed * hang_s


async def _answers(control: EngineControl, occupation: Occupation, pause_s: float) -> bool:
    while True:
        await occupation.over()
        try:
            await control.is_paused()
        except DeadlineError:  # the call's own
            await asyncio.sleep(pause_s)
        except (PenstockError, KeyError, TypeError, ValueError):  # an answer, if not one that can be read
            return True
        else:
            return True


async def _in_vain(occupation: Occupation, seconds: float) -> bool:
    await occupation.without(seconds)
    return False


async def _is_young(control: EngineControl, deadline_s: float) -> bool:
    try:
        async with asyncio.timeout(deadline_s):
            return (await control.stats()).generation_tokens == 0
    except (TimeoutError, PenstockError):
        return False


async def _first(*coroutines: Coroutine[Any, Any, bool]) -> bool:
    """What the first of them to end returns; the others are cancelled."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return any(task.result() for task in done)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
