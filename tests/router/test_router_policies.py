"""Policies as pure functions: what each chooses, what its options change, and that nothing is kept between calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import get_args

import pytest

from penstock.config import load_config
from penstock.errors import ConfigError
from penstock.options import validate
from penstock.rooms import plugged_as, plugged_in
from penstock.router.membership import Engine, EngineEntry
from penstock.router.other_policies import rendezvous
from penstock.router.policies import Defer, Policies, Policy, RequestView
from penstock.router_settings import PolicyName, RouterConfig


def fleet(*outstanding: int, kv_usage: Sequence[float] = (), **columns: Sequence[float]) -> list[Engine]:
    """Engines e0, e1, ... with so many requests; columns give other figures."""
    engines = [Engine(EngineEntry(f"e{i}", f"http://h:{i + 1}")) for i in range(len(outstanding))]
    for engine, usage in zip(engines, kv_usage, strict=False):
        engine.kv_reported = usage
    for name, values in {**columns, "outstanding": outstanding}.items():
        for engine, value in zip(engines, values, strict=True):
            setattr(engine, name, value)
    return engines


def resident(*tokens: int, **columns: Sequence[float]) -> list[Engine]:
    return fleet(*[0] * len(tokens), resident_tokens=tokens, **columns)


def policy(name: str, **options: float) -> Policy:
    return plugged_in(f"policy.{name}")(RouterConfig(**options))


def choose(
    name: str, engines: Sequence[Engine], request: RequestView | None = None, placed: int = 0, **options: float
) -> str | Defer:
    answer = policy(name, **options).choose(engines, (request or RequestView())._replace(placed=placed))
    return answer if isinstance(answer, Defer) else answer.name


def chosen(
    name: str, engines: Sequence[Engine], request: Callable[[int], RequestView] | None, times: int, **options: float
) -> list[str | Defer]:
    return [choose(name, engines, request and request(i), i, **options) for i in range(times)]


def test_round_robin_takes_turns() -> None:
    assert chosen("round-robin", fleet(0, 5, 0), None, 6) == ["e0", "e1", "e2", "e0", "e1", "e2"]


def test_requests_goes_where_fewest_are_and_ties_rotate() -> None:
    assert choose("requests", fleet(3, 1, 2)) == "e1"
    assert chosen("requests", fleet(1, 0, 0), None, 4) == ["e1", "e2", "e1", "e2"]


@pytest.mark.parametrize(
    ("usage", "outstanding", "expected"),
    [
        ((0.5, 0.2, 0.9), (0, 9, 0), "e1"),
        ((-1, 0.9, 0.95), (0, 0, 0), "e1"),
        ((0.3, 0.3, 0.3), (4, 2, 3), "e1"),
        ((-1, -1, -1), (4, 2, 3), Defer.PASS),
    ],
)
def test_kv_cache(usage: Sequence[float], outstanding: Sequence[int], expected: str | Defer) -> None:
    assert choose("kv-cache", fleet(*outstanding, kv_usage=usage)) == expected


# --- by prefix -------------------------------------------------------------------------------------------------------

HELD = {"e2": 8192, "e1": 4096, "e0": 1024}


@pytest.mark.parametrize(
    ("outstanding", "options", "expected"),
    [
        ((2, 2, 2), {}, "e2"),
        ((2, 2, 8), {}, "e1"),  # 8 is more than 1.5 times the mean of 4
        ((2, 2, 8), {"overload_threshold": 2.0}, "e2"),
        ((0, 9, 9), {"overload_threshold": 1.2}, Defer.PASS),
        ((2, 2, 2), {"prefix_length": 9000}, Defer.PASS),
        ((0, 9, 9), {"overload_threshold": 1.2, "prefix_length": 1024}, "e0"),
        ((0, 0, 1), {}, "e2"),  # one request on an idle fleet is no overload
    ],
)
def test_prefix_aware(outstanding: Sequence[int], options: dict[str, float], expected: str | Defer) -> None:
    assert choose("prefix-aware", fleet(*outstanding), RequestView(prefixes=HELD), **options) == expected


def test_prefix_aware_takes_the_idlest_of_equal_holders_and_none_that_may_not_serve() -> None:
    equal = {"gone": 9999, "e0": 4096, "e1": 4096}
    assert choose("prefix-aware", fleet(3, 2, 1), RequestView(prefixes=equal)) == "e1"
    assert choose("prefix-aware", fleet(3, 2, 1), RequestView()) is Defer.PASS


def test_hashes_are_fixed() -> None:
    engines = fleet(*[0] * 8)
    assert [rendezvous(f"session-{i}".encode(), engines).name for i in range(8)] == FIXED


FIXED = ["e2", "e1", "e5", "e5", "e5", "e1", "e2", "e1"]


# --- bounded-sticky --------------------------------------------------------------------------------------------------

BOUNDED = "bounded-sticky"
TIGHT = {"slack_tokens": 1000}


def later(home: Engine, tokens: int = 1000) -> RequestView:
    return RequestView("s", home, tokens, known=True, prompt_tokens=tokens, expected_tokens=100)


def test_a_new_session_goes_where_the_least_context_lives() -> None:
    assert choose(BOUNDED, resident(500, 400, 600), RequestView("s")) == "e1"
    assert choose(BOUNDED, fleet(3, 2, 1, resident_tokens=(5, 4, 4)), RequestView("s")) == "e2"
    tied = chosen(BOUNDED, resident(0, 0, 0, 0), lambda i: RequestView(f"s{i}"), 400)
    assert min(Counter(tied).values()) > 60


def test_requests_without_a_session_rotate_over_equals() -> None:
    assert chosen(BOUNDED, resident(9, 0, 0), None, 4) == ["e1", "e2", "e1", "e2"]


@pytest.mark.parametrize(
    ("tokens", "context", "options", "expected"),
    [
        ((100_000, 40_000, 40_000, 40_000), 1000, TIGHT, "e0"),  # over the bound, but not twice the mean
        ((200_000, 40_000, 30_000, 40_000), 1000, TIGHT, "e2"),
        ((200_000, 40_000, 30_000, 40_000), 1000, {"slack_tokens": 170_000}, "e0"),
        ((200_000, 40_000, 30_000, 40_000), 1000, {**TIGHT, "balance_factor": 3.0}, "e0"),
        ((200_000, 40_000, 30_000, 40_000), 56_000, TIGHT, "e2"),  # 170000 tokens less, against three times the context
        ((200_000, 40_000, 30_000, 40_000), 57_000, TIGHT, "e0"),
    ],
)
def test_a_later_turn_stays_unless_moving_clearly_beats_it(
    tokens: Sequence[int], context: int, options: dict[str, float], expected: str
) -> None:
    engines = resident(*tokens)
    assert choose(BOUNDED, engines, later(engines[0], context), **options) == expected


def test_where_home_is_over_its_cache_moving_costs_nothing_more() -> None:
    def outcome(capacity: int, other: int = 40_000) -> str | Defer:
        engines = resident(100_000, other, kv_capacity=(capacity, 0))
        return choose(BOUNDED, engines, later(engines[0], 30_000), **TIGHT)

    assert outcome(110_000) == "e0"
    assert outcome(90_000) == "e1"
    assert outcome(90_000, other=69_500) == "e0", "the load would go to and fro"
    full = resident(100_000, 40_000, kv_capacity=(90_000, 50_000))
    assert choose(BOUNDED, full, later(full[0], 30_000), **TIGHT) == "e0", "it has no room"


def test_a_move_does_not_call_for_its_return() -> None:
    for context in range(1000, 60_000, 1000):
        engines = resident(200_000, 50_000, 120_000, kv_capacity=(150_000, 0, 0))
        assert choose(BOUNDED, engines, later(engines[0], context), **TIGHT) == "e1"
        moved = resident(200_000 - context, 50_000 + context, 120_000, kv_capacity=(150_000, 150_000, 0))
        assert choose(BOUNDED, moved, later(moved[1], context), **TIGHT) == "e1"


@pytest.mark.parametrize(
    ("request_", "options", "expected"),
    [
        (RequestView(prompt_tokens=5000, prefixes={"e2": 4096}), {}, "e2"),
        (RequestView(prompt_tokens=5000, prefixes={"e2": 1024}), {}, "e0"),
        (RequestView(prompt_tokens=5000, prefixes={"e2": 2500}), {"prefix_length": 2600}, "e0"),
        (RequestView(prompt_tokens=9000, prefixes={"e2": 4096}), {}, "e0"),  # less than half
        (RequestView(prompt_tokens=5000, prefixes={"e1": 4096}), {}, "e0"),  # over the bound
        (
            RequestView(prompt_tokens=5000, prefixes={"e1": 4096, "e2": 2560}),
            {},
            "e2",
        ),
        (RequestView(prompt_tokens=5000, prefixes={"gone": 4096}), {}, "e0"),
    ],
)
def test_a_shared_beginning_restricts_to_its_holders(
    request_: RequestView, options: dict[str, float], expected: str
) -> None:
    assert choose(BOUNDED, resident(10_000, 30_000, 15_000), request_, **{**TIGHT, **options}) == expected


def test_samples_of_a_group_are_spread_before_they_share_a_prompt() -> None:
    group = {"e0": 2, "e1": 1}
    engines = resident(100, 200, 300)
    assert choose(BOUNDED, engines, RequestView(group=group)) == "e2"
    held = {"e0": 4096}
    assert choose(BOUNDED, engines, RequestView(group=group, prompt_tokens=4096, prefixes=held)) == "e2"
    everywhere = {"e0": 4096, "e1": 4096}
    evened = RequestView(group={"e0": 1, "e1": 1, "e2": 1}, prompt_tokens=4096, prefixes=everywhere)
    assert choose(BOUNDED, engines, evened) == "e0"
    far = resident(100, 200, 300_000)
    assert choose(BOUNDED, far, RequestView(group=group), **TIGHT) == "e1", "spread within the bound only"
    uneven, once = resident(50_000, 50_500, 54_000), RequestView(group={"e0": 1, "e1": 1})
    assert choose(BOUNDED, uneven, once) == "e2"
    assert choose(BOUNDED, uneven, once, **TIGHT) == "e0", "a group breaks near ties, no more"


FULL = resident(90_000, 91_000, kv_capacity=(100_000, 100_000))


@pytest.mark.parametrize(
    ("request_", "options", "expected"),
    [
        (RequestView("s", prompt_tokens=1000, expected_tokens=2000), {}, Defer.WAIT),
        (RequestView("s", prompt_tokens=1000, expected_tokens=500), {}, "e0"),
        (RequestView("s", prompt_tokens=1000, expected_tokens=2000), {"kv_admission": 0.95}, "e0"),
        (RequestView("s", prompt_tokens=1000, expected_tokens=2000, known=True), {}, "e0"),  # its engine was lost
        (RequestView(prompt_tokens=1000, expected_tokens=2000), {}, "e0"),  # no session
        (later(FULL[1], 50_000), {}, "e1"),
    ],
)
def test_new_sessions_wait_while_caches_are_full_and_nobody_else(
    request_: RequestView, options: dict[str, float], expected: str | Defer
) -> None:
    assert choose(BOUNDED, FULL, request_, **options) == expected


def test_an_engine_with_room_takes_a_session_that_the_least_loaded_has_not() -> None:
    engines = resident(50_000, 120_000, kv_capacity=(52_000, 1_000_000))
    assert choose(BOUNDED, engines, RequestView("s", prompt_tokens=5000)) == "e1"


def test_an_empty_engine_and_one_that_has_not_said_always_have_room() -> None:
    huge = RequestView("s", prompt_tokens=1_000_000)
    assert choose(BOUNDED, resident(5000, 0, kv_capacity=(100_000, 100_000)), huge) == "e1"
    assert choose(BOUNDED, resident(5000, 9000, kv_capacity=(100_000, 0)), huge) == "e1"


# --- all of them, and lists ------------------------------------------------------------------------------------------


def test_a_list_asks_the_next_where_one_has_no_opinion() -> None:
    listed = Policies(RouterConfig(policy="prefix-aware,kv-cache"))
    by_usage, silent = fleet(0, 5, 0, kv_usage=(0.9, 0.1, 0.9)), fleet(7, 5, 6)
    held = RequestView(prefixes={"e2": 4096})
    chosen_by: Counter[str] = Counter()
    assert listed.ask(by_usage, held, chosen_by) == by_usage[2]
    assert listed.ask(by_usage, RequestView(), chosen_by) == by_usage[1]
    assert listed.ask(silent, RequestView(), chosen_by) == silent[1]
    assert chosen_by == {"prefix-aware": 1, "kv-cache": 1, "requests": 1}


def test_configured_names_are_those_of_the_registry() -> None:
    assert set(get_args(PolicyName)) == set(plugged_as("policy"))
    assert RouterConfig(policy=["prefix-aware", " requests"]).policy == "prefix-aware,requests"
    for text in ("router.policy=prefix-aware,requests", "router.policy=[prefix-aware, requests]"):
        assert load_config(None, ["engine.model=m", text]).router.policy == "prefix-aware,requests"
    for wrong, message in (
        ("bounded-stick", "did you mean 'bounded-sticky'"),
        ("requests,requests", "twice"),
        ([], "list"),
    ):
        with pytest.raises(ConfigError, match=message):
            validate(RouterConfig, {"policy": wrong})
