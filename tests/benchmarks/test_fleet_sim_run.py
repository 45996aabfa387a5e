"""The fleet in virtual time: every turn is answered whatever happens to engines, and a seed says it all."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from fleet_sim.router import FleetRequest, OwnRouter
from fleet_sim.run import FleetRun, FleetSetup, Incident
from fleet_sim.speed import EngineLimits, EngineSpeed
from fleet_sim.trace import AgentShape, Lengths, agents
from penstock.router.policies import Defer
from penstock.router_settings import RouterConfig

SPEED = EngineSpeed(step_s=0.01, sequence_s=1e-5, context_s=5e-8, prefill_s=3e-5)
SETUP = FleetSetup(4, 24, SPEED, EngineLimits(kv_tokens=60_000))
SHAPE = AgentShape(turns=(2, 4), observation=Lengths(500, 0.8, 3000), output=Lengths(100, 0.8, 800))
TRACE = agents(60, SHAPE, seed=3)
ASKED = sum(turn.output_tokens for trajectory in TRACE for turn in trajectory.turns)


class RoundRobin(OwnRouter):
    """Our router, which notes what requests had tried."""

    def __init__(self) -> None:
        super().__init__(RouterConfig(policy="round-robin"))
        self.tried: list[tuple[str, ...]] = []

    def place(self, request: FleetRequest, now: float, tried: Collection[str] = ()) -> str | Defer | None:
        self.tried += [tuple(tried)] if tried else []
        return super().place(request, now, tried)


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
    assert router.tried == [("engine-1",)] * figures.retried
    left = router._own.engines.values()
    assert [(engine.name, engine.outstanding) for engine in left] == [(f"engine-{i}", 0) for i in (0, 2, 3)]
    assert len(router._own.memory.sessions) == 0, "every session has ended"
    assert figures.makespan_s > FleetRun(RoundRobin(), SETUP, TRACE).run().makespan_s
