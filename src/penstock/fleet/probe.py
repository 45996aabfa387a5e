"""The health probe of one engine, of its server and its core."""

from __future__ import annotations

import asyncio

from penstock.aio import all_or_first_error, settled
from penstock.engine.control import ControlClient, CoreState
from penstock.errors import DeadlineError, EngineDeadError, PenstockError
from penstock.fleet.roster import Occupation
from penstock.http import UnreachableError

# The server answers health checks by itself, also when the core has died, was stopped or hangs. So the probe asks the
# core too. Its answer waits only for the present step. A healthy core's longest silence is therefore one step, a
# fraction of a second even for a full chunk of prefill, with three exceptions:
#
# - A call of the fleet keeps it busy: it loads weights, sleeps, or runs a method of `collective_rpc`. The time of the
#   call does not count, since it has its own deadline. Time counted before it stays counted, and an open question stays
#   open: calls may come more often than a core needs to be found silent.
# - It has made no token yet: the first steps compile kernels. `YOUNG` allows for it.
# - A later step compiles one more kernel. `hang_timeout_s` has to be longer than that.

YOUNG = 10
"""Multiple of `hang_timeout_s` for which an engine that has made no token may be silent."""
BROKEN = 3
"""Connections to a core that break before an answer until it counts as gone."""


class CoreSilentError(DeadlineError):
    """The server is well, but its core has not answered."""


async def probe(control: ControlClient, occupation: Occupation, *, hang_s: float) -> CoreState | None:
    """Probe an engine's server and core; None: the core's answer is unreadable.

    It hangs after `hang_s` seconds without an answer; the time of calls in `occupation` does not count.

    Raises:
        CoreSilentError: its core hangs; DeadlineError: its server hangs.
        PenstockError: it is gone, or reports that it is not well.
    """
    _, said = await all_or_first_error((_server(control, hang_s), _core(control, occupation, hang_s)))
    return said


async def _server(control: ControlClient, hang_s: float) -> None:
    answer = await settled(control.health(YOUNG * hang_s), Occupation().without(hang_s))
    if answer.cancelled():
        raise DeadlineError(f"no answer to a health check in {hang_s:g} s", seconds=hang_s)
    answer.result()


async def _core(control: ControlClient, occupation: Occupation, hang_s: float) -> CoreState | None:
    missed = 0

    async def too_long() -> None:
        nonlocal missed
        while not missed or (missed < YOUNG and await _is_young(control, hang_s)):
            await occupation.without(hang_s)
            missed += 1

    answer = await settled(_state(control, occupation), too_long())
    if not answer.cancelled():
        return answer.result()
    await control.health(hang_s)  # otherwise the server is silent
    silent_s = missed * hang_s
    why = f"its core has answered nothing for {silent_s:g} s, though its server is well"
    raise CoreSilentError(why, seconds=silent_s)


async def _state(control: ControlClient, occupation: Occupation) -> CoreState | None:
    broken = 0
    while True:
        await occupation.over()
        try:
            return await control.state()
        except DeadlineError:  # the call's own deadline, not the probe's
            continue
        except UnreachableError:
            raise
        except EngineDeadError:
            broken += 1
            if broken == BROKEN:
                raise
        except (PenstockError, KeyError, TypeError, ValueError):  # an answer, though unreadable
            return None


async def _is_young(control: ControlClient, deadline_s: float) -> bool:
    try:
        async with asyncio.timeout(deadline_s):
            return (await control.verbs.stats()).generation_tokens == 0
    except (TimeoutError, PenstockError):
        return False
