"""The cells of `policies.py`: what kind of work, what goes wrong, and on how many engines of what speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fleet_sim.peers import PEERS
from fleet_sim.router import FleetRouter, OwnRouter
from fleet_sim.run import FleetFigures, FleetRun, FleetSetup, Incident
from fleet_sim.speed import EngineLimits, EngineSpeed
from fleet_sim.trace import AgentShape, GroupShape, Lengths, Trajectory, agents, groups
from penstock.rooms import plugged_as
from penstock.router_settings import RouterConfig

OURS = "bounded-sticky"

GPU_SPEED = EngineSpeed(
    step_s=7e-3, sequence_s=33e-6, context_s=50e-9, prefill_s=33e-6, prefill_context_s=1.5e-9, request_s=2e-4
)
GPU_LIMITS = EngineLimits(kv_tokens=350_000, max_num_seqs=256, max_num_batched_tokens=8192, block_size=16)
ASSUMPTIONS: Mapping[str, str] = {
    "engine": "an 8B dense model in bf16 (the sizes of Qwen3-8B: 36 layers, 8 KV heads of 128) on one GPU of 80 GB, "
    "3.35 TB/s and 990 TFLOP/s dense bf16 (the H100 SXM data sheet); constants are derived, not measured",
    "step_s": "16.4 GB of weights at 3.35 TB/s is 4.9 ms; 2.1 ms for sampling, scheduling and launches",
    "sequence_s, prefill_s": "2 x 8.2e9 FLOP a token at 500 TFLOP/s, half of the peak",
    "context_s": "147,456 bytes of KV a token (2 x 36 x 8 x 128 x 2) at 88% of 3.35 TB/s",
    "prefill_context_s": "4 x 36 x 4096 FLOP a pair of tokens at 400 TFLOP/s",
    "request_s": "0.2 ms of the engine's loop a request",
    "kv_tokens": "90% of 80 GB less weights and 4 GB of activations, by the bytes of a token",
}

AGENTS = AgentShape(observation=Lengths(2600, 0.9, 16_000))
AGENTS_PER_ENGINE = 12
"""About 0.8 of the KV is context of theirs, where they are spread evenly."""
OVERCOMMITTED_PER_ENGINE = 20
SAMPLES_PER_ENGINE = 64
INCIDENT_S = 60.0
FEW = 16


@dataclass(frozen=True, slots=True)
class Cell:
    """One scenario on one size of fleet."""

    name: str
    engines: int
    per_engine: int
    """Trajectories under way, by engines."""
    waves: float
    """Trajectories in all, by those under way."""
    max_tokens: int
    make: Callable[[int, int], Sequence[Trajectory]]
    """Count and seed to a trace."""
    incidents: tuple[Incident, ...] = ()
    presses_on_kv: bool = False

    @property
    def title(self) -> str:
        """Scenario and size."""
        return f"{self.name}, {self.engines} engines"

    def run(self, router: FleetRouter, seed: int) -> FleetFigures:
        """One run."""
        concurrency = self.per_engine * self.engines
        setup = FleetSetup(
            self.engines, concurrency, GPU_SPEED, GPU_LIMITS, max_tokens=self.max_tokens, incidents=self.incidents
        )
        return FleetRun(router, setup, self.make(round(concurrency * self.waves), seed)).run()


def routers() -> dict[str, Callable[[], FleetRouter]]:
    """Every policy of ours over the router's own placement, and the models of peers; each call makes a fresh one."""

    def placement(policy: str) -> Callable[[], FleetRouter]:
        return lambda: OwnRouter(RouterConfig(policy=policy))

    return {**{policy: placement(policy) for policy in plugged_as("policy")}, **PEERS}


def cells(engines: int, waves: float) -> list[Cell]:
    """The seven scenarios on so many engines."""

    def agent_trace(count: int, seed: int) -> Sequence[Trajectory]:
        return agents(count, AGENTS, seed)

    def group_trace(count: int, seed: int) -> Sequence[Trajectory]:
        return groups(count, GroupShape(), seed)

    def heavy_trace(count: int, seed: int) -> Sequence[Trajectory]:
        return groups(count, GroupShape(output=Lengths(800, 0.7, 32_768), pareto=1.2), seed)

    base = Cell("multi-turn agents", engines, AGENTS_PER_ENGINE, waves, 4096, agent_trace, presses_on_kv=True)
    return [
        base,
        Cell("single-turn groups", engines, SAMPLES_PER_ENGINE, waves, 16_384, group_trace),
        Cell("heavy-tailed lengths", engines, SAMPLES_PER_ENGINE, waves, 32_768, heavy_trace),
        replace(base, name="one slow engine", incidents=(Incident(0.0, "slow", 1, 2.0),)),
        replace(base, name="one killed", incidents=(Incident(INCIDENT_S, "kill", 1),)),
        # The ninth engine's KV takes the pressure off.
        replace(base, name="one added", incidents=(Incident(INCIDENT_S, "add", engines),), presses_on_kv=engines > FEW),
        replace(base, name="KV overcommitted", per_engine=OVERCOMMITTED_PER_ENGINE),
    ]
