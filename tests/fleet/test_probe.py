"""When a core is silent, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.control_types import CoreState
from penstock.fleet.roster import Occupation
from penstock.fleet.supervise import YOUNG, CoreSilentError, probe
from virtual_time import VirtualClock, run_virtual

HANG_S = 6.0
INTERVAL_S = 0.6


class Core:
    """Does one thing after another, as a core does between and in its steps, unless it hangs."""

    def __init__(self, tokens: int = 10) -> None:
        self.tokens = tokens
        self.verbs = self
        self.hangs = False
        self._turn = asyncio.Lock()

    async def works(self, seconds: float) -> None:
        async with self._turn:
            await asyncio.sleep(seconds)

    async def health(self, timeout_s: float) -> None:
        del timeout_s

    async def state(self) -> CoreState:
        async with self._turn:
            if self.hangs:
                await asyncio.Event().wait()
        return CoreState(paused=False)

    async def stats(self) -> Any:
        return SimpleNamespace(generation_tokens=self.tokens)


async def seconds_until_silent(core: Core, occupation: Occupation) -> float:
    now = asyncio.get_running_loop().time
    since = now()
    while True:
        await asyncio.sleep(INTERVAL_S)
        try:
            await probe(core, occupation, hang_s=HANG_S)  # type: ignore[arg-type]
        except CoreSilentError:
            return now() - since


async def calls(occupation: Occupation, every_s: float, call: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(every_s)
        with occupation.going_on():
            await call()


def beside(task: Callable[[Core, Occupation], Coroutine[Any, Any, None]], core: Callable[[], Core]) -> float:
    """How long it takes until the core is found silent while `task` runs."""

    async def main(_: Any) -> float:
        it, occupation = core(), Occupation()
        running = asyncio.create_task(task(it, occupation))
        try:
            return await asyncio.wait_for(seconds_until_silent(it, occupation), 1000.0)
        finally:
            running.cancel()

    return run_virtual(main)


def hung(tokens: int = 10) -> Core:
    core = Core(tokens)
    core.hangs = True
    return core


@pytest.mark.parametrize(("tokens", "windows"), [(10, 1), (0, YOUNG)])
@pytest.mark.parametrize("every_s", [0.5, 5.0])
def test_calls_that_come_often_do_not_hide_a_core_that_hangs(tokens: int, windows: int, every_s: float) -> None:
    async def joins_of_others(_: Core, occupation: Occupation) -> None:
        await calls(occupation, every_s, lambda: asyncio.sleep(0.5))

    found_s = beside(joins_of_others, lambda: hung(tokens))
    unoccupied = every_s / (every_s + 0.5)
    assert found_s == pytest.approx(INTERVAL_S + windows * HANG_S / unoccupied, abs=1.0)


def test_a_loop_that_stands_still_takes_no_core_for_silent() -> None:
    """As where a trainer computes in the thread of the loop: an answer that came meanwhile is read after it."""

    async def main(clock: VirtualClock) -> float:
        def stand_still() -> None:
            clock.now += 60.0

        class Asked(Core):
            async def state(self) -> CoreState:
                asyncio.get_running_loop().call_later(0.01, stand_still)
                await asyncio.sleep(0.02)
                for _ in range(9):  # from the socket to who has asked
                    await asyncio.sleep(0)
                return CoreState(paused=False)

        return await asyncio.wait_for(seconds_until_silent(Asked(), Occupation()), 3000.0)

    with pytest.raises(TimeoutError):
        run_virtual(main)


def test_steps_before_and_behind_a_call_are_not_one_silence() -> None:
    async def long_steps(core: Core, occupation: Occupation) -> None:
        await calls(occupation, 1.0, lambda: core.works(20.0))

    async def steps(core: Core, occupation: Occupation) -> None:
        calling = asyncio.create_task(long_steps(core, occupation))
        try:
            while True:
                await core.works(0.9 * HANG_S)
        finally:
            calling.cancel()

    with pytest.raises(TimeoutError):
        beside(steps, Core)
