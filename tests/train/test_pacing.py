"""Groups are spread over the learner's busy time, and start at once when it waits for them."""

from __future__ import annotations

import asyncio

from penstock.train.staleness import STARTS_PER_BATCH, Pacer
from virtual_time import run_virtual

GROUPS = 32


def starts(busy_s: float, hurry_after_s: float | None = None, hurry: range = range(GROUPS)) -> list[float]:
    """Virtual time at which each of the groups got its turn."""

    async def main(_clock) -> list[float]:
        loop = asyncio.get_running_loop()
        pacer = Pacer()
        pacer.busy_s = busy_s
        began = loop.time()

        async def one(group: int) -> float:
            await pacer.turn(group, group, GROUPS)
            return loop.time() - began

        tasks = [asyncio.create_task(one(group)) for group in range(GROUPS)]
        if hurry_after_s is not None:
            await asyncio.sleep(hurry_after_s)
            pacer.hurry(hurry)
        return [await task for task in tasks]

    return run_virtual(main)


def test_portions_are_spread_evenly_and_in_order():
    times = starts(8.0)
    assert times == sorted(times)
    assert sorted(set(times)) == [i + 0.5 for i in range(STARTS_PER_BATCH)]
    assert all(times.count(t) == GROUPS // STARTS_PER_BATCH for t in times)


def test_hurried_groups_start_now_and_later_ones_keep_their_turn():
    times = starts(8.0, hurry_after_s=2.0, hurry=range(16))
    assert max(times[:16]) == 2.0
    assert times[16:] == starts(8.0)[16:]
