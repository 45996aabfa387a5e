"""The fleet in virtual time: every turn is answered whatever happens to engines, and a seed says it all."""

from __future__ import annotations

from dataclasses import replace

from fleet_sim_routers import RoundRobin

from fleet_sim.run import FleetRun, FleetSetup, Incident
from fleet_sim.speed import EngineLimits, EngineSpeed
from fleet_sim.trace import AgentShape, Lengths, agents

SPEED = EngineSpeed(step_s=0.01, sequence_s=1e-5, context_s=5e-8, prefill_s=3e-5)
SETUP = FleetSetup(4, 24, SPEED, EngineLimits(kv_tokens=60_000))
SHAPE = AgentShape(turns=(2, 4), observation=Lengths(500, 0.8, 3000), output=Lengths(100, 0.8, 800))
TRACE = agents(60, SHAPE, seed=3)
ASKED = sum(turn.output_tokens for trajectory in TRACE for turn in trajectory.turns)


def test_a_seed_says_it_all() -> None:
    assert agents(60, SHAPE, seed=3) == TRACE != agents(60, SHAPE, seed=4)
    first, second = (FleetRun(RoundRobin(), SETUP, TRACE).run() for _ in range(2))
    assert first == second
    assert first.delivered_tokens == ASKED
    assert first.wasted_tokens == first.retried == 0
    assert 0 < first.hit_rate < 1
    assert first.sessions_moved > 60


def test_a_lost_engine_loses_no_turn() -> None:
    router = RoundRobin()
    setup = replace(SETUP, incidents=(Incident(6.0, "kill", 1),))
    run = FleetRun(router, setup, TRACE)
    figures = run.run()
    assert figures.delivered_tokens == ASKED
    assert figures.retried >= 1
    assert figures.wasted_tokens > 0
    assert router.names == ["engine-0", "engine-2", "engine-3"]
    assert [tried for tried in router.tried if tried] == [("engine-1",)] * figures.retried
    assert set(router.outstanding.values()) == {0}
    assert sorted(map(int, router.finished)) == list(range(60))
    assert figures.makespan_s > FleetRun(RoundRobin(), SETUP, TRACE).run().makespan_s
