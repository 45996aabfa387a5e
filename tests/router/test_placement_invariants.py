"""What holds for any fleet, any policy and any order of events, against bookkeeping as plain as can be."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from named_placement import NamedPlacement

from penstock.rooms import plugged_as
from penstock.router.memory import EngineEntry
from penstock.router.policies import Defer, Hints
from penstock.settings import RouterConfig

LISTS = [(name,) for name in plugged_as("policy")] + [("prefix-aware", "kv-cache"), ("kv-cache", "bounded-sticky")]
NAMES = [f"e{i}" for i in range(5)]


@dataclass
class State:
    """An engine as it was last told to the placement."""

    eligible: bool = True
    draining: bool = False
    down: bool = False
    version: int = 0


def entry(name: str, state: State) -> EngineEntry:
    url = f"http://h:{NAMES.index(name) + 1}"
    return EngineEntry(name, url, state.version, state.eligible, state.draining)


@dataclass
class Flight:
    request: Hints
    engine: str
    tried: tuple[str, ...] = field(default=())
    left: bool = False
    """That engine has left, even if one of its name is there."""


class Fleet(RuleBasedStateMachine):
    """Engines join, drain, die and come back while requests come and go."""

    @initialize(policies=st.sampled_from(LISTS), count=st.integers(1, 5), capacity=st.sampled_from([0, 3000, 100_000]))
    def begin(self, policies: tuple[str, ...], count: int, capacity: int) -> None:
        self.p = NamedPlacement(RouterConfig(policy=policies, session_ttl_s=500.0, slack_tokens=100))
        self.capacity = capacity
        self.now = 0.0
        self.engines: dict[str, State] = {}
        self.homes: dict[str, str | None] = {}
        self.flights: list[Flight] = []
        self.sticky = any(name == "bounded-sticky" for name in policies)
        self.announce({name: State() for name in NAMES[:count]})

    def announce(self, engines: dict[str, State]) -> None:
        self.p.set_engines([entry(name, state) for name, state in engines.items()])
        for name in set(self.engines) - set(engines):
            self.homes = {s: None if home == name else home for s, home in self.homes.items()}
            for flight in self.flights:
                flight.left |= flight.engine == name
        for name, state in engines.items():
            state.down = name in self.engines and self.engines[name].down
            if name not in self.engines and self.capacity:
                self.p.report_kv(name, kv_usage=0.1, kv_capacity=self.capacity)
        self.engines = engines

    @rule(
        name=st.sampled_from(NAMES), eligible=st.booleans(), draining=st.booleans(), version=st.integers(0, 2),
    )  # fmt: skip
    def change(self, name: str, **announced: object) -> None:
        self.announce({**self.engines, name: State(**announced)})  # pyright: ignore[reportArgumentType]

    @rule(name=st.sampled_from(NAMES))
    def leave(self, name: str) -> None:
        self.announce({other: state for other, state in self.engines.items() if other != name})

    @rule(name=st.sampled_from(NAMES), down=st.booleans())
    def mark(self, name: str, down: bool) -> None:  # noqa: FBT001
        if name in self.engines:
            self.p.mark(name, down=down)
            self.engines[name].down = down

    @rule(seconds=st.sampled_from([0.5, 5.0, 100.0, 600.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.p.expire(self.now)
        if seconds > 500:  # none but those in mid-turn can be known any more
            in_flight = {flight.request.session_id for flight in self.flights}
            self.homes = {s: home for s, home in self.homes.items() if s in in_flight}

    @rule(
        request=st.builds(
            Hints,
            session_id=st.none() | st.sampled_from("stuvw"),
            group_id=st.none() | st.sampled_from("gh"),
            min_weight_version=st.integers(0, 2),
            prompt_tokens=st.integers(0, 3000),
            expected_tokens=st.integers(0, 2000),
            prefix_hashes=st.sampled_from([None, b"64:00112233445566aa", b"nonsense"]),
        )
    )
    def place(self, request: Hints) -> None:
        self.try_place(request, ())

    @precondition(lambda self: self.flights)
    @rule(data=st.data(), ok=st.booleans(), again=st.booleans())
    def end(self, data: st.DataObject, ok: bool, again: bool) -> None:  # noqa: FBT001
        flight = self.flights.pop(data.draw(st.integers(0, len(self.flights) - 1)))
        self.p.done(flight.request, flight.engine, self.now)
        if not ok and again:
            self.try_place(flight.request, (*flight.tried, flight.engine))

    @rule(session=st.sampled_from("stuvw"))
    def finish(self, session: str) -> None:
        known = session in self.homes
        finished = self.p.finish_session(session)
        assert known or not finished
        self.homes.pop(session, None)

    def could(self, name: str, request: Hints) -> bool:
        state = self.engines[name]
        return state.eligible and not state.down and state.version >= request.min_weight_version

    def try_place(self, request: Hints, tried: tuple[str, ...]) -> None:
        session = request.session_id
        home = self.homes.get(session) if session is not None else None
        known = session is not None and self.p.sessions.get(session) is not None
        able = [n for n in self.engines if self.could(n, request) and n not in tried]
        new = [n for n in able if not self.engines[n].draining]
        own = home in able and self.sticky and home not in new and known
        answer = self.p.place(request, self.now, tried)
        if isinstance(answer, str):
            assert answer in new or (own and answer == home), "an engine that may not serve"
            assert answer == home or not own, "a session left an engine that is only draining"
            self.flights.append(Flight(request, answer, tried))
            if session is not None:
                self.homes[session] = answer
        elif answer is Defer.WAIT:
            assert session is not None
            assert not known, "a later turn was made to wait"
            assert all(self.p.views()[n].resident_tokens for n in new), "an empty engine has room"
        else:
            assert answer is None
            assert not new
            assert not own
        if isinstance(answer, str):
            assert self.p.could_serve(request) or own

    @invariant()
    def figures_are_those_of_what_is_under_way(self) -> None:
        if not hasattr(self, "p"):
            return
        for name, view in self.p.views().items():
            there = [flight.request for flight in self.flights if flight.engine == name and not flight.left]
            assert view.outstanding == len(there)
            assert view.outstanding_tokens == sum(r.prompt_tokens + r.expected_tokens for r in there)
            assert view.resident_tokens >= 0
            if not there and not self.p.engines[name].sessions:
                assert view.resident_tokens == 0

    def teardown(self) -> None:
        if not hasattr(self, "p"):
            return
        for flight in self.flights:
            self.p.done(flight.request, flight.engine, self.now)
        for session in "stuvw":
            self.p.finish_session(session)
        assert len(self.p.sessions) == 0
        for view in self.p.views().values():
            assert (view.outstanding, view.outstanding_tokens, view.resident_tokens) == (0, 0, 0)


Fleet.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestFleet = Fleet.TestCase


@pytest.mark.parametrize("seed", range(20))
def test_few_sessions_move_when_an_engine_joins_and_only_its_own_when_one_leaves(seed: int) -> None:
    rng = random.Random(seed)
    engines, lost = rng.randrange(8, 25), rng.randrange(8)
    tokens = [int(rng.lognormvariate(8, rng.choice([0.1, 0.5, 1]))) for _ in range(rng.randrange(200, 400))]

    def announced(count: int) -> list[EngineEntry]:
        return [EngineEntry(f"e{i}", f"http://h:{i + 1}") for i in range(count)]

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
    p.set_engines(announced(engines))
    turns(0.0)
    before = turns(0.5)  # by now they live where they want to
    p.set_engines(announced(engines + 1))
    joined = turns(1.0)
    assert sum(a != b for a, b in zip(before, joined, strict=True)) <= 0.15 * len(tokens)
    p.set_engines([e for e in announced(engines + 1) if e.name != f"e{lost}"])
    left = turns(2.0)
    assert all(a == b for a, b in zip(joined, left, strict=True) if a != f"e{lost}")
    heirs = Counter(b for a, b in zip(joined, left, strict=True) if a == f"e{lost}")
    assert sum(heirs.values()) == joined.count(f"e{lost}")
