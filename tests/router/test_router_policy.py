from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from penstock.errors import ConfigError
from penstock.router.policy import (
    EngineView,
    Random,
    RequestInfo,
    RoundRobin,
    Snapshot,
    StickyLeastLoaded,
    candidates,
    make_policy,
    rendezvous,
)
from penstock.router.sessions import Sessions


def fleet(*outstanding: int) -> tuple[EngineView, ...]:
    return tuple(EngineView(f"e{i}", outstanding=n) for i, n in enumerate(outstanding))


def test_candidates_are_eligible_and_new_enough() -> None:
    engines = (
        EngineView("old", weight_version=2),
        EngineView("new", weight_version=3),
        EngineView("newer", weight_version=4),
        EngineView("out", eligible=False, weight_version=4),
    )
    assert [e.name for e in candidates(engines, RequestInfo())] == ["old", "new", "newer"]
    assert [e.name for e in candidates(engines, RequestInfo(min_weight_version=3))] == ["new", "newer"]
    assert candidates(engines, RequestInfo(min_weight_version=5)) == ()


def test_a_session_stays_however_loaded_its_engine() -> None:
    engines = fleet(9, 0)
    assert StickyLeastLoaded().choose(Snapshot(engines), RequestInfo("s", home="e0")).name == "e0"


def test_a_session_whose_engine_left_goes_to_the_idlest() -> None:
    assert StickyLeastLoaded().choose(Snapshot(fleet(3, 1, 2)), RequestInfo("s", home="gone")).name == "e1"


def test_a_new_session_goes_to_the_idlest() -> None:
    assert StickyLeastLoaded().choose(Snapshot(fleet(3, 1, 2)), RequestInfo("s")).name == "e1"


def test_ties_of_sessions_are_spread_and_repeatable() -> None:
    policy = StickyLeastLoaded()
    first = [policy.choose(Snapshot(fleet(0, 0, 0, 0), placed=i), RequestInfo(f"s{i}")).name for i in range(400)]
    again = [policy.choose(Snapshot(fleet(0, 0, 0, 0)), RequestInfo(f"s{i}")).name for i in range(400)]
    assert first == again
    assert min(Counter(first).values()) > 60


def test_ties_without_a_session_rotate() -> None:
    policy = StickyLeastLoaded()
    chosen = [policy.choose(Snapshot(fleet(1, 0, 0), placed=i), RequestInfo()).name for i in range(4)]
    assert chosen == ["e1", "e2", "e1", "e2"]


def test_one_engine_more_moves_its_share_of_sessions_and_to_it_only() -> None:
    eight, nine = fleet(*[0] * 8), fleet(*[0] * 9)
    before = [rendezvous(f"session-{i}", eight).name for i in range(4000)]
    after = [rendezvous(f"session-{i}", nine).name for i in range(4000)]
    moved = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert 0.08 < len(moved) / 4000 < 0.15
    assert {b for _, b in moved} == {"e8"}


def test_one_engine_less_moves_its_own_sessions_only_and_spreads_them() -> None:
    eight = fleet(*[0] * 8)
    seven = eight[1:]
    before = [rendezvous(f"session-{i}", eight).name for i in range(4000)]
    after = [rendezvous(f"session-{i}", seven).name for i in range(4000)]
    assert all(b == a for b, a in zip(before, after, strict=True) if b != "e0")
    heirs = Counter(a for b, a in zip(before, after, strict=True) if b == "e0")
    assert set(heirs) == {e.name for e in seven}
    assert max(heirs.values()) < 3 * min(heirs.values())


def test_rendezvous_is_the_same_in_every_process() -> None:
    code = (
        "from penstock.router.policy import *; es = tuple(EngineView(f'e{i}') for i in range(8));"
        "print(*[rendezvous(f's{i}', es).name for i in range(50)])"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True, timeout=30
        ).stdout
        for seed in ("1", "2")
    }
    here = " ".join(rendezvous(f"s{i}", fleet(*[0] * 8)).name for i in range(50))
    assert runs == {f"{here}\n".encode()}


def test_round_robin_takes_turns() -> None:
    chosen = [RoundRobin().choose(Snapshot(fleet(0, 5, 0), placed=i), RequestInfo("s")).name for i in range(6)]
    assert chosen == ["e0", "e1", "e2", "e0", "e1", "e2"]


def test_random_reaches_all_and_repeats_with_a_seed() -> None:
    def draw(seed: int) -> list[str]:
        policy = Random(seed)
        return [policy.choose(Snapshot(fleet(0, 0, 0)), RequestInfo()).name for _ in range(60)]

    assert set(draw(1)) == {"e0", "e1", "e2"}
    assert draw(1) == draw(1) != draw(2)


def test_an_unknown_policy_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'least'.*sticky-least-loaded"):
        make_policy("least")


def test_the_session_table_forgets_the_least_recently_used() -> None:
    sessions = Sessions(capacity=2)
    sessions.settle("a", "e0")
    sessions.settle("b", "e1")
    sessions.settle("a", "e0")
    sessions.settle("c", "e1")
    assert (sessions.home("a"), sessions.home("b"), sessions.home("c")) == ("e0", None, "e1")
    assert len(sessions) == 2
