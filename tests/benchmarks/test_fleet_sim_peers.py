"""Models of other routers do what their sources and the measurements of them say."""

from __future__ import annotations

from collections import Counter

import pytest

from fleet_sim.peers import PEERS, PeerRouter, VllmCacheAware, VllmConsistentHash
from fleet_sim.router import FleetRequest, FleetRouter, OwnRouter
from fleet_sim.run import FleetRun, FleetSetup, Incident
from fleet_sim.speed import EngineLimits, EngineSpeed
from fleet_sim.trace import AgentShape, Lengths, agents
from penstock.rooms import plugged_as
from penstock.router.membership import EngineEntry
from penstock.router_settings import RouterConfig


def entries(count: int) -> list[EngineEntry]:
    return [EngineEntry(f"engine-{i}", f"http://127.0.0.1:{i + 1}") for i in range(count)]


def turn(session: int | None, tokens: int = 500, task: str = "task") -> FleetRequest:
    name = None if session is None else str(session)
    chain = [("system", 1000), (task, 400), (name, tokens)]
    return FleetRequest(chain, session_id=name, group_id=None, expected_tokens=100)


def homes(router: PeerRouter, sessions: range) -> dict[int, str]:
    placed: dict[int, str] = {}
    for session in sessions:
        request = turn(session, task=f"task {session}")
        name = router.place(request, 0.0)
        assert isinstance(name, str)
        router.done(request, name, 0.0)
        placed[session] = name
    return placed


def test_a_ring_moves_few_sessions_but_spreads_them_badly_and_a_dead_workers_all_go_to_the_first() -> None:
    router = VllmConsistentHash()
    router.set_engines(entries(8))
    before = homes(router, range(2000))
    few = Counter(homes(router, range(64)).values())
    assert max(few.values()) / 8 > 1.3
    router.set_engines(entries(9))
    after = homes(router, range(2000))
    moved = [s for s in before if before[s] != after[s]]
    assert 0.05 < len(moved) / 2000 < 0.2
    assert {after[s] for s in moved} == {"engine-8"}
    router.set_engines(entries(8))
    router.mark("engine-3", down=True)
    assert {name for s, name in homes(router, range(2000)).items() if before[s] == "engine-3"} == {"engine-0"}


def test_cache_aware_follows_the_system_prompt_until_loads_differ_by_64() -> None:
    router = VllmCacheAware()
    router.set_engines(entries(4))
    placed = Counter(router.place(turn(session), 0.0) for session in range(66))
    assert len(placed) == 2  # one has 65 and then the others are less loaded
    assert max(placed.values()) == 65
    assert router.place(turn(0, 900), 0.0) != router.place(turn(1, 900), 0.0)  # even known sessions are sent away


@pytest.mark.parametrize("name", [*plugged_as("policy"), *PEERS])
def test_every_router_gets_a_fleet_through_a_death_and_a_birth(name: str) -> None:
    router: FleetRouter = PEERS[name]() if name in PEERS else OwnRouter(RouterConfig(policy=name))
    shape = AgentShape(turns=(2, 4), observation=Lengths(500, 0.8, 3000), output=Lengths(100, 0.8, 800))
    trace = agents(48, shape, seed=5)
    setup = FleetSetup(
        4, 32, EngineSpeed(0.01, 1e-5, 5e-8, 3e-5), EngineLimits(kv_tokens=40_000), max_tokens=800,
        incidents=(Incident(4.0, "kill", 1), Incident(8.0, "add", 4)),
    )  # fmt: skip
    figures = FleetRun(router, setup, trace).run()
    assert figures.delivered_tokens == sum(t.output_tokens for trajectory in trace for t in trajectory.turns)
