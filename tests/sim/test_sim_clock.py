"""Virtual time: hours pass in milliseconds, the same way every time, and a deadlock is an error."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from penstock.sim import SimConfig, SimEngine
from penstock.types import PauseMode, SamplingParams
from sim_verify import generate, verify
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


async def _fleet_with_updates(clock):
    """Six engines, clients with think time, an update of each every few minutes; the trace of every sample."""
    config = SimConfig(tokens_per_second=50, max_num_seqs=8, kv_blocks=300, eos_share=0.01)
    engines = [SimEngine(config) for _ in range(6)]
    trace = []

    async def client(i):
        dice = random.Random(i)
        for turn in range(4):
            await asyncio.sleep(dice.uniform(0, 300))
            prompt = [1 + i, 1 + turn, *range(dice.randrange(1, 200))]
            params = SamplingParams(max_tokens=dice.randrange(1, 120), seed=i)
            sample = (await generate(dice.choice(engines), prompt, params))[0]
            assert verify(prompt, sample, model=config.model, params=params) == []
            trace.append((round(clock.now, 9), i, turn, sample.spans))

    async def updates():
        for version in range(1, 8):
            await asyncio.sleep(150)
            for engine in engines:
                await engine.pause(PauseMode.KEEP)
                engine.weights.initialised = True
                engine.start_update()
                await engine.update_weights()
                await engine.finish_update(str(version))
                await engine.resume()

    await asyncio.gather(updates(), *(client(i) for i in range(60)))
    return trace


def test_a_quarter_of_an_hour_of_six_engines_is_the_same_every_time():
    begin = time.perf_counter()
    first, second = run_virtual(_fleet_with_updates), run_virtual(_fleet_with_updates)
    assert time.perf_counter() - begin < 120
    assert first == second
    assert len(first) == 240
    assert first[-1][0] > 900
    assert any(len(spans) > 1 for *_, spans in first), "no sample saw an update in its middle"
