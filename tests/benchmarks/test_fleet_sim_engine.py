"""The coarse engine: nothing lost, KV never over capacity, and the fine-grained engine's figures on the same work."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace

import pytest

from fleet_sim.engine import FleetEngine, FleetSequence
from fleet_sim.router import OwnRouter
from fleet_sim.run import START_SPACING_S, FleetRun, FleetSetup
from fleet_sim.speed import EngineLimits, EngineSpeed
from fleet_sim.trace import AgentShape, GroupShape, Lengths, Trajectory, agents, groups
from penstock.router_settings import RouterConfig
from penstock.sim import SimConfig, SimEngine
from penstock.types import SamplingParams
from sim_verify import generate
from virtual_time import VirtualClock, run_virtual

SPEED = EngineSpeed(step_s=0.01, sequence_s=2e-4, context_s=1e-7, prefill_s=2e-5, prefill_context_s=1e-9)


def test_one_sequence_takes_what_its_steps_take() -> None:
    engine = FleetEngine("e", SPEED, EngineLimits(kv_tokens=10_000))
    engine.submit(FleetSequence([("a", 100)], 50), 3.0)
    ended: list[FleetSequence] = []
    while not math.isinf(end := engine.wake):
        at, ended = end, engine.advance(end)
    (sequence,) = ended
    steps = sum(0.01 + 2e-4 + 1e-7 * (100 + i) for i in range(49))
    assert at == pytest.approx(3.0 + 0.01 + 2e-4 + 100 * (2e-5 + 1e-9 * 50) + steps)
    assert sequence.hit == 0
    assert engine.counters.generated == 50


FINE = SimConfig(
    tokens_per_second=100.0,
    sequence_seconds=2e-4,
    prefill_tokens_per_second=50_000.0,
    max_num_seqs=32,
    max_num_batched_tokens=4096,
    kv_blocks=700,
    max_model_len=3200,
)
COARSE = EngineSpeed(step_s=0.01 - 2e-4, sequence_s=2e-4, context_s=0.0, prefill_s=2e-5)


def fine_figures(trace: list[Trajectory], concurrency: int, config: SimConfig) -> tuple[float, float, int]:
    """Makespan, hit rate and preemptions of the same closed loop on the engine that makes every token."""

    async def main(clock: VirtualClock) -> tuple[float, float, int]:
        engine = SimEngine(config)
        supply = iter(trace)

        def tokens_of(key: object, count: int) -> list[int]:
            source = random.Random(str(key))
            return [source.randrange(1, config.vocab_size) for _ in range(count)]

        async def worker(index: int) -> None:
            await asyncio.sleep(index * START_SPACING_S)
            for trajectory in supply:
                prompt = [t for key, count in trajectory.shared for t in tokens_of(key, count)]
                for n, turn in enumerate(trajectory.turns):
                    await asyncio.sleep(turn.delay_s)
                    prompt += tokens_of((trajectory.id, n), turn.new_tokens)
                    params = SamplingParams(max_tokens=turn.output_tokens, ignore_eos=True, detokenize=False, seed=1)
                    prompt += (await generate(engine, prompt, params))[0].token_ids

        await asyncio.gather(*(worker(i) for i in range(concurrency)))
        figures = engine.scheduler.stats
        return clock.now, figures.hits / figures.queries, figures.preemptions

    return run_virtual(main)


def small_agents(count: int, seed: int) -> list[Trajectory]:
    shape = AgentShape(
        system_tokens=200, task=Lengths(100, 0.5, 400), turns=(3, 6), observation=Lengths(150, 0.8, 600),
        output=Lengths(60, 0.7, 300), tool_s=(0.5, 0.8),
    )  # fmt: skip
    return agents(count, shape, seed)


def small_groups(count: int, seed: int) -> list[Trajectory]:
    shape = GroupShape(system_tokens=100, prompt=Lengths(150, 0.5, 600), output=Lengths(120, 0.9, 900), sizes=(4, 8))
    return groups(count, shape, seed)


@pytest.mark.parametrize(
    ("trace", "concurrency", "kv_blocks", "close"),
    [
        pytest.param(small_agents(40, 1), 10, 2000, 0.02, id="agents with room"),
        pytest.param(small_agents(40, 2), 12, 380, 0.05, id="agents that press on KV"),
        pytest.param(small_groups(80, 3), 24, 2000, 0.02, id="groups with room"),
        pytest.param(small_groups(80, 4), 32, 250, 0.05, id="groups that are preempted"),
    ],
)
def test_agrees_with_the_engine_that_makes_every_token(
    trace: list[Trajectory], concurrency: int, kv_blocks: int, close: float
) -> None:
    config = replace(FINE, kv_blocks=kv_blocks, max_model_len=min(3200, kv_blocks * 16))
    limits = EngineLimits(kv_blocks * 16, FINE.max_num_seqs, FINE.max_num_batched_tokens, enable_chunked_prefill=False)
    makespan, hit_rate, preemptions = fine_figures(trace, concurrency, config)
    router = OwnRouter(RouterConfig(policy="round-robin"))
    coarse = FleetRun(router, FleetSetup(1, concurrency, COARSE, limits), trace).run()
    assert coarse.makespan_s == pytest.approx(makespan, rel=close)
    assert coarse.hit_rate == pytest.approx(hit_rate, abs=close)
    assert coarse.preemptions == pytest.approx(preemptions, rel=0.3, abs=3)
