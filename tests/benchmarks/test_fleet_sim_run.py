"""The fleet in virtual time: every turn is answered whatever happens to engines, and a seed says it all."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest
from fleet_sim_routers import RoundRobin

from fleet_sim.router import FleetRequest
from fleet_sim.run import FleetRun, FleetSetup, Incident
from fleet_sim.speed import EngineLimits, EngineSpeed
from fleet_sim.trace import AgentShape, GroupShape, Lengths, agents, groups
from penstock.errors import StateError
from penstock.router.policies import Defer

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


def test_a_new_engine_takes_its_part_and_a_slow_one_is_slow() -> None:
    router = RoundRobin()
    base = FleetRun(RoundRobin(), SETUP, TRACE).run()
    added = FleetRun(router, replace(SETUP, incidents=(Incident(5.0, "add", 4),)), TRACE).run()
    assert router.placed.count("engine-4") > 20
    assert added.delivered_tokens == ASKED
    slow = FleetRun(RoundRobin(), replace(SETUP, incidents=(Incident(0.0, "slow", 2, 3.0),)), TRACE).run()
    assert slow.makespan_s > 1.3 * base.makespan_s
    assert slow.load_max_to_mean > base.load_max_to_mean


class Admitting(RoundRobin):
    """Lets a new session in while fewer than `most` are under way."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.inside: set[str | None] = set()
        self.peak = 0

    def place(self, request: FleetRequest, now: float, tried: Collection[str] = ()) -> str | Defer | None:
        if request.session_id not in self.inside and len(self.inside) >= self.most:
            return Defer.WAIT
        self.inside.add(request.session_id)
        self.peak = max(self.peak, len(self.inside))
        return super().place(request, now, tried)

    def finish_session(self, session_id: str) -> bool:
        self.inside.discard(session_id)
        return super().finish_session(session_id)


def test_requests_that_must_wait_are_held_in_order() -> None:
    router = Admitting(most=5)
    figures = FleetRun(router, SETUP, TRACE).run()
    assert router.peak == 5
    assert figures.delivered_tokens == ASKED
    with pytest.raises(StateError, match="requests are held"):
        FleetRun(Admitting(most=0), replace(SETUP, figures_interval_s=60.0), TRACE).run()


def test_samples_of_a_group_share_their_prompt() -> None:
    trace = groups(64, GroupShape(sizes=(8,)), seed=1)
    assert len({sample.shared for sample in trace}) == 8
    assert not any(sample.session for sample in trace)
    figures = FleetRun(RoundRobin(), replace(SETUP, engines=1), trace).run()
    assert figures.hit_rate > 0.8
    assert figures.sessions_moved == 0


def test_prefix_hashes_are_equal_as_far_as_prompts_are() -> None:
    def hashes(*chain: tuple[str, int]) -> tuple[int, list[bytes]]:
        request = FleetRequest(chain, session_id=None, group_id=None, expected_tokens=1)
        stride, _, rest = (request.prefix_hashes or b"").partition(b":")
        return int(stride), rest.split(b",")

    stride, first = hashes(("system", 640), ("a", 360))
    assert (stride, len(first)) == (1, 15)
    _, second = hashes(("system", 640), ("b", 360))
    assert first[:10] == second[:10]
    assert not set(first[10:]) & set(second)
    stride, longer = hashes(("system", 640), ("a", 40_000))
    assert stride == 32
    assert len(longer) == 19
    assert longer[0] not in first  # its first boundary, 2048 tokens, is beyond the shorter prompt
    coarse, fine = hashes(("system", 640), ("a", 4300)), hashes(("system", 640), ("a", 1408))
    assert (coarse[0], fine[0]) == (4, 1)
    assert coarse[1][:8] == fine[1][3:32:4]
    assert FleetRequest([("a", 100)], session_id=None, group_id=None, expected_tokens=1).prefix_hashes is None
