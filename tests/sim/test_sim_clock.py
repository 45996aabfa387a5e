"""Virtual time: hours pass in milliseconds, the same way every time, and a deadlock is an error."""

from __future__ import annotations

import asyncio
import time

import pytest

from virtual_time import DeadlockError, run_virtual


def test_sleeps_and_timeouts_are_virtual():
    async def main(clock):
        begin = time.perf_counter()
        await asyncio.sleep(3600)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 7200)
        return clock.now, time.perf_counter() - begin

    virtual, real = run_virtual(main)
    assert virtual == pytest.approx(3 * 3600)
    assert real < 20


def test_waiting_for_nothing_is_a_deadlock():
    async def main(_clock):
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError):
        run_virtual(main)
