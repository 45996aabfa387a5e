"""The health probe of an engine: is its server well, what does its core say, and how long has it said nothing.

The server answers health checks by itself, also when the core has died, was stopped or hangs. So the core is asked too.
Its answer waits for the step that it is at, and for nothing else. A core's longest honest silence is therefore one
step, a fraction of a second even for a full chunk of prefill, with three exceptions:

- A call of the fleet keeps it busy: it loads weights, sleeps, or runs a method of `collective_rpc`. That time does not
  count, since such a call has its own deadline. Time counted before it stays counted, and a question asked before it
  stays open: calls may come more often than a core needs to be found silent.
- It has made no token yet: the first steps compile kernels. `YOUNG` allows for it.
- A later step compiles one more kernel. `hang_timeout_s` has to be longer than that.
"""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.engine.control import ControlClient, CoreState
from penstock.errors import DeadlineError, EngineDeadError, PenstockError
from penstock.fleet.fan_out import TICK_S, Occupation
from penstock.http import UnreachableError

YOUNG = 10
"""An engine that has made no token yet may be silent for so many times as long."""
BROKEN = 3
"""So many connections to a core that break before it answers mean that it is gone."""


class CoreSilentError(DeadlineError):
    """The server is well, and its core has answered nothing."""


async def probe(control: ControlClient, occupation: Occupation, *, hang_s: float) -> CoreState | None:
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


async def _server(control: ControlClient, hang_s: float) -> None:
    answer = asyncio.ensure_future(control.health(YOUNG * hang_s))
    silence = asyncio.create_task(_ticks(hang_s))
    try:
        await asyncio.wait((answer, silence), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise DeadlineError(f"no answer to a health check in {hang_s:g} s", seconds=hang_s)
        await answer
    finally:
        await _ended(answer, silence)


async def _core(control: ControlClient, occupation: Occupation, hang_s: float) -> CoreState | None:
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


async def _answer(control: ControlClient, occupation: Occupation) -> CoreState | None:
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


async def _is_young(control: ControlClient, deadline_s: float) -> bool:
    try:
        async with asyncio.timeout(deadline_s):
            return (await control.stats()).generation_tokens == 0
    except (TimeoutError, PenstockError):
        return False
