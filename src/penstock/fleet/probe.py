"""One question to an engine: is its server well, what does its core say, and how long may it say nothing.

The server answers health checks by itself. A core that died, was stopped or hangs, in a process of its own, is noticed
by nobody but those who wait for its tokens. A question that the core itself has to answer waits for the step that it is
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
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from penstock.engine.control import CoreState
from penstock.errors import DeadlineError, EngineDeadError, PenstockError
from penstock.fleet.member import EngineControl
from penstock.http import UnreachableError

YOUNG = 10
"""An engine that has made no token yet may be silent for so many times as long."""
TICK_S = 1.0
"""Of one wait for a timer no more than this counts; a loop that stands still makes one wait long."""
BROKEN = 3
"""So many connections to a core that break before it answers mean that it is gone; that it refuses one, says so too."""


class Occupation:
    """Calls of ours under way that may keep engines' cores from answering anything else."""

    def __init__(self) -> None:
        self.begun = 0
        """How many there have been."""
        self._calls = 0
        self._begun = asyncio.Event()
        self._over = asyncio.Event()
        self._over.set()

    @contextmanager
    def going_on(self) -> Generator[None]:
        """While such a call is under way."""
        self._calls += 1
        self.begun += 1
        self._over.clear()
        self._begun.set()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._begun.clear()
                self._over.set()

    @property
    def going(self) -> bool:
        """One is under way."""
        return self._calls > 0

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


class CoreSilentError(DeadlineError):
    """The server is well, and its core has answered nothing."""


async def probe(control: EngineControl, occupation: Occupation, *, hang_s: float) -> CoreState | None:
    """Ask an engine's server and its core at once, and wait for both.

    Args:
        control: of the engine.
        occupation: the calls during which it may be silent.
        hang_s: it hangs after so many seconds without an answer, those of such calls not counted.

    Returns:
        What the core says of itself; None where it is alive and says something else.

    Raises:
        CoreSilentError: its core hangs; DeadlineError: its server does.
        PenstockError: it is gone, or says itself that it is not well.
    """
    server = asyncio.ensure_future(_server(control, hang_s))
    core = asyncio.ensure_future(_core(control, occupation, hang_s))
    try:
        await asyncio.wait((server, core), return_when=asyncio.FIRST_EXCEPTION)
        if server.done() or (core.done() and isinstance(core.exception(), CoreSilentError)):
            await server
        return await core
    finally:
        await _ended(server, core)


async def _server(control: EngineControl, hang_s: float) -> None:
    answer = asyncio.ensure_future(control.health(YOUNG * hang_s))
    silence = asyncio.create_task(_ticks(hang_s))
    try:
        await asyncio.wait((answer, silence), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise DeadlineError(f"no answer to a health check in {hang_s:g} s", seconds=hang_s)
        await answer
    finally:
        await _ended(answer, silence)


async def _core(control: EngineControl, occupation: Occupation, hang_s: float) -> CoreState | None:
    answer = asyncio.ensure_future(_answer(control, occupation))
    silent_s = 0.0
    try:
        for missed in range(1, YOUNG + 1):
            silence = asyncio.create_task(occupation.without(hang_s))
            try:
                await asyncio.wait((answer, silence), return_when=asyncio.FIRST_COMPLETED)
            finally:
                await _ended(silence)
            if answer.done():
                return await answer
            silent_s = missed * hang_s
            if not await _is_young(control, hang_s):
                break
    finally:
        await _ended(answer)
    why = f"its core has answered nothing for {silent_s:g} s, though its server is well"
    raise CoreSilentError(why, seconds=silent_s)


async def _ticks(seconds: float) -> None:
    """Return after so many seconds, of which those in which this event loop stood still do not count."""
    while seconds > 0:
        await asyncio.sleep(min(seconds, TICK_S))
        seconds -= TICK_S


async def _ended(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(control: EngineControl, occupation: Occupation) -> CoreState | None:
    broken = 0
    while True:
        await occupation.over()
        try:
            return await control.state()
        except DeadlineError:  # the call's own
            continue
        except UnreachableError:
            raise
        except EngineDeadError:
            broken += 1
            if broken == BROKEN:
                raise
        except (PenstockError, KeyError, TypeError, ValueError):  # an answer, if not one that can be read
            return None


async def _is_young(control: EngineControl, deadline_s: float) -> bool:
    try:
        async with asyncio.timeout(deadline_s):
            return (await control.stats()).generation_tokens == 0
    except (TimeoutError, PenstockError):
        return False
