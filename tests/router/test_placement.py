"""Placement as the router and the discrete-event fleet use it: who may serve, where sessions live, what is counted."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from penstock.prefix_hash import prefix_hashes
from penstock.router.membership import Engine, EngineEntry
from penstock.router.memory import SessionTable
from penstock.router.placement import Placement, Share
from penstock.router.policies import Defer, Hints
from penstock.router_settings import RouterConfig


class NamedPlacement:
    """A placement that speaks of engines by name."""

    def __init__(self, config: RouterConfig | None = None) -> None:
        self.own = Placement(config)
        self.shares: dict[Hints, Share] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def place(self, request: Hints, now: float) -> str | Defer | None:
        found = self.own.place(request, self.shares.setdefault(request, Share()), now)
        return found.name if isinstance(found, Engine) else found

    def done(self, request: Hints, name: str, now: float) -> None:
        self.own.done(request, self.shares[request], self.own.engines[name], now)

    def forget_idle(self, now: float) -> None:
        self.own.memory.sessions.expire(now, self.own.config.session_ttl_s)

    def report_kv(self, name: str, **given: Any) -> None:
        self.own.report_kv(self.own.engines[name], **given)


def entries(count: int, **more: object) -> list[EngineEntry]:
    return [EngineEntry(f"e{i}", f"http://h:{i + 1}", **more) for i in range(count)]


def placement(engines: Iterable[EngineEntry], *policies: str, capacity: int = 0, **options: float) -> NamedPlacement:
    made = NamedPlacement(RouterConfig(policy=policies or "bounded-sticky", **options))
    announced = list(engines)
    made.set_engines(announced)
    if capacity:
        for entry in announced:
            made.report_kv(entry.name, kv_usage=0.0, kv_capacity=capacity)
    return made


def turn(
    p: NamedPlacement, session: str | None, now: float = 0.0, tokens: int = 100, **more: object
) -> str | Defer | None:
    """A whole turn."""
    request = Hints(session, prompt_tokens=tokens, **more)
    name = p.place(request, now)
    if isinstance(name, str):
        p.done(request, name, now)
    return name


def resident(p: NamedPlacement) -> dict[str, int]:
    return {name: engine.resident_tokens for name, engine in p.engines.items()}


def test_a_session_stays_and_what_lives_there_is_counted() -> None:
    p = placement(entries(2))
    home = turn(p, "s", tokens=1000)
    assert isinstance(home, str)
    other = {"e0": "e1", "e1": "e0"}[home]
    assert resident(p) == {home: 1000, other: 0}
    request = Hints("s", prompt_tokens=1500, expected_tokens=200)
    assert p.place(request, 1.0) == home
    assert resident(p)[home] == 1700
    assert (p.engines[home].outstanding, p.engines[home].outstanding_tokens) == (1, 1700)
    p.done(request, home, 2.0)
    assert resident(p)[home] == 1500, "what the answer added is known at the next turn"
    assert turn(p, "s", 3.0, tokens=1600) == home
    assert resident(p) == {home: 1600, other: 0}
    assert p.memory.sessions.drop("s")
    assert not p.memory.sessions.drop("s")
    assert resident(p) == {home: 0, other: 0}
    assert +Counter(p.turns) == Counter(opened=1, stayed=2)


def test_without_token_headers_sessions_are_balanced_by_number() -> None:
    p = placement(entries(4))
    homes = Counter(turn(p, f"s{i}", tokens=0) for i in range(40))
    assert set(homes.values()) == {10}


def test_sessions_are_forgotten_after_their_time_and_not_in_mid_turn() -> None:
    p = placement(entries(2), session_ttl_s=100.0)
    long, short = Hints("long", prompt_tokens=10), Hints("short", prompt_tokens=10)
    home = p.place(long, 0.0)
    assert isinstance(home, str)
    assert turn(p, "short", 0.0) is not None
    for now in range(0, 300, 10):
        p.forget_idle(now)
    assert len(p.memory.sessions) == 1
    assert p.engines[home].sessions == 1
    p.done(long, home, 300.0)
    p.forget_idle(390.0)
    assert len(p.memory.sessions) == 1
    p.forget_idle(401.0)
    assert len(p.memory.sessions) == 0
    assert not p.memory.sessions.drop(short.session_id or "")


def test_a_session_that_pauses_for_long_counts_no_more_until_it_is_back() -> None:
    p = placement(entries(1))
    for i in range(20):  # sessions pause for 10 s
        turn(p, "regular", 10.0 * i)
    turn(p, "over", 200.0, tokens=5000)
    p.forget_idle(225.0)
    assert resident(p)["e0"] >= 5000
    p.forget_idle(235.0)
    assert resident(p)["e0"] < 5000
    assert p.engines["e0"].sessions == 2
    assert turn(p, "over", 240.0, tokens=6000) == "e0"
    assert resident(p)["e0"] >= 6000


def test_what_turns_add_is_learnt() -> None:
    p = placement(entries(1))
    for i in range(1, 50):
        turn(p, "s", float(i), tokens=100 * i, expected_tokens=1000)
    p.forget_idle(50.0)
    request = Hints("s", prompt_tokens=5000, expected_tokens=1000)
    p.place(request, 50.0)
    assert resident(p)["e0"] == pytest.approx(5100, abs=2)
    p.forget_idle(1000.0)  # another share now, and yet what was added is taken back
    p.done(request, "e0", 1000.0)
    p.memory.sessions.drop("s")
    assert resident(p) == {"e0": 0}


def test_where_no_session_comes_back_only_prompts_are_resident() -> None:
    p = placement(entries(1))
    for i in range(64):
        turn(p, f"s{i}", 0.0, tokens=0, expected_tokens=1000)
    p.forget_idle(10.0)
    p.place(Hints("s", prompt_tokens=10, expected_tokens=1000), 10.0)
    assert resident(p)["e0"] == 10


def test_the_session_used_least_recently_gives_way_where_the_table_is_full() -> None:
    p = placement(entries(2))
    p.own.memory.sessions = SessionTable(capacity=2)
    for session in "abac":
        turn(p, session, tokens=10)
    assert [p.memory.sessions.get(session) is not None for session in "abc"] == [True, False, True]
    assert sum(resident(p).values()) == 20


def test_sessions_of_a_lost_engine_are_placed_without_waiting() -> None:
    p = placement(entries(2), capacity=10_000)
    homes = {f"s{i}": turn(p, f"s{i}", tokens=2000) for i in range(8)}
    p.set_engines(entries(1))
    assert {turn(p, s, 1.0, tokens=2000) for s in homes} == {"e0"}
    assert turn(p, "new", 1.0, tokens=2000) is Defer.WAIT


def test_a_context_that_fits_nowhere_gets_an_engine_to_itself() -> None:
    p = placement(entries(2), capacity=10_000)
    assert turn(p, "huge", tokens=50_000) in ("e0", "e1")
    assert turn(p, "huge too", tokens=50_000) in ("e0", "e1")
    assert turn(p, "huge as well", tokens=50_000) is Defer.WAIT


def hashed(token_ids: list[int]) -> Hints:
    header = prefix_hashes(token_ids)
    return Hints(prompt_tokens=len(token_ids), prefix_hashes=header and header.encode())


def test_new_weights_empty_the_caches() -> None:
    p = placement(entries(4), "prefix-aware", "round-robin")
    request = hashed(list(range(4096)))
    first = p.place(request, 0.0)
    assert p.place(request, 0.0) == first
    assert p.rules == {"round-robin": 1, "prefix-aware": 1}
    p.set_engines(entries(4, weight_version=1))
    p.place(request, 0.0)
    assert p.rules == {"round-robin": 2, "prefix-aware": 1}


def test_kv_usage_is_what_the_engine_said_and_what_came_since() -> None:
    p = placement(entries(2), "kv-cache", capacity=1000)
    p.report_kv("e0", kv_usage=0.30, kv_capacity=1000)
    p.report_kv("e1", kv_usage=0.25, kv_capacity=1000)
    request = Hints(prompt_tokens=100)
    assert [p.place(request, 0.0) for _ in range(4)] == ["e1", "e0", "e1", "e0"]
    assert p.engines["e0"].kv_usage == pytest.approx(0.5)
    p.report_kv("e0", kv_usage=0.5, kv_capacity=1000)
    assert p.engines["e0"].kv_usage == pytest.approx(0.5)


def test_groups_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.router.memory.MOST_GROUPS", 2)
    p = placement(entries(2))
    for group in ("a", "b", "a", "a", "c"):
        turn(p, None, group_id=group)
    assert {group: sum(placed.values()) for group, placed in p.memory._groups.items()} == {"a": 3, "c": 1}


@pytest.mark.parametrize("seed", range(10))
def test_few_sessions_move_when_an_engine_joins_and_only_its_own_when_one_leaves(seed: int) -> None:
    rng = random.Random(seed)
    engines, lost = rng.randrange(8, 25), rng.randrange(8)
    tokens = [int(rng.lognormvariate(8, rng.choice([0.1, 0.5, 1]))) for _ in range(rng.randrange(200, 400))]

    def turns(now: float) -> list[str]:
        homes: list[str] = []
        for i, prompt in enumerate(tokens):
            request = Hints(f"s{i}", prompt_tokens=prompt, expected_tokens=100)
            name = p.place(request, now)
            assert isinstance(name, str)
            p.done(request, name, now)
            homes.append(name)
        return homes

    p = NamedPlacement()
    p.set_engines(entries(engines))
    turns(0.0)
    before = turns(0.5)  # by now they live where they want to
    p.set_engines(entries(engines + 1))
    joined = turns(1.0)
    assert sum(a != b for a, b in zip(before, joined, strict=True)) <= 0.15 * len(tokens)
    p.set_engines([e for e in entries(engines + 1) if e.name != f"e{lost}"])
    left = turns(2.0)
    assert all(a == b for a, b in zip(joined, left, strict=True) if a != f"e{lost}")
    heirs = Counter(b for a, b in zip(joined, left, strict=True) if a == f"e{lost}")
    assert sum(heirs.values()) == joined.count(f"e{lost}")
