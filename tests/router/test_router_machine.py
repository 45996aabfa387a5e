"""Joins, drains, deaths, gates, sessions and requests in any order: no request is lost, doubled or sent astray.

A whole router before scripted engines, in this process. The model knows what the router was told, and judges each
placement at the moment it is made; in the end every request must have its one answer and every counter add up.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from router_world import NAMES, World

from patience import WAIT_S, eventually
from penstock.rooms import plugged_as
from penstock.router.backend import Backend
from penstock.router.exchange import Exchange
from penstock.router.other_calls import finish_session, state_of

NAMES_OF_SESSIONS = ("s0", "s1", "s2", "s3", "s4", "s5")
SESSIONS = st.sampled_from([None, *NAMES_OF_SESSIONS])
ENTRIES = st.fixed_dictionaries(
    {
        "weight_version": st.integers(0, 2),
        "eligible": st.sampled_from([True, True, True, False]),
        "draining": st.sampled_from([False, False, True]),
    }
)
MORE = st.sampled_from(
    ["", "", "X-Group-ID: g\r\n", "X-Prefix-Hashes: 1:00112233445566aa\r\n", "X-Prefix-Hashes: no\r\n"]
)
REQUESTS = st.tuples(SESSIONS, st.sampled_from([0, 0, 1, 2]), st.sampled_from([0, 60, 60, 60]), MORE)
POLICIES = ["bounded-sticky"] * 4 + [*plugged_as("policy"), "prefix-aware,kv-cache", "kv-cache,bounded-sticky"]
CAPACITIES = st.sampled_from([0, 100, 100])
"""Tokens: of the sessions that ask for 60, one fits."""
VERDICTS = st.sampled_from(["answer", "answer", "answer", "error", "break", "hang up"])
PICK = st.integers(0, 10**6)


class RouterMachine(RuleBasedStateMachine):
    """Rules are what clients, engines and the fleet do; after each the router comes to rest."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.world = World()
        world, placed = self.world, Exchange.placed

        def judged(exchange: Exchange, backend: Backend) -> None:
            world.judge(exchange, backend)
            placed(exchange, backend)

        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(Exchange, "placed", judged)

    def run(self, act: Any) -> None:
        async def acting() -> None:
            await act
            await self.world.settle()

        self.runner.run(acting())

    @initialize(
        policy=st.sampled_from(POLICIES),
        capacity=CAPACITIES,
    )
    def start(self, policy: str, capacity: int) -> None:
        self.runner.run(self.world.start(policy))
        self.announce({name: {} for name in NAMES})
        for pick in range(len(NAMES)):
            self.say_how_full(pick, capacity)

    # --- clients -----------------------------------------------------------------------------------------------------

    @rule(wanted=st.lists(REQUESTS, min_size=1, max_size=4))
    def ask(self, wanted: list[tuple[str | None, int, int, str]]) -> None:
        async def act() -> None:
            for one in wanted:
                await self.world.ask(*one)

        self.run(act())

    # No precondition looks at requests: where they are just now is not the same in every run.
    @rule(pick=PICK)
    def leave(self, pick: int) -> None:
        async def act() -> None:
            world = self.world
            if not world.asked:
                return
            number = list(world.asked)[pick % len(world.asked)]
            asked = world.asked.pop(number)
            asked.reading.cancel()
            asked.client.close()
            world.over["cancelled"] += 1
            await eventually(lambda: world.router.metrics.cancelled == world.over["cancelled"])

        self.run(act())

    @rule(session=SESSIONS.filter(bool))
    def finish(self, session: str) -> None:
        async def act() -> None:
            self.world.homes.pop(session, None)
            finish_session(self.world.dispatcher, session)

        self.run(act())

    # --- engines -----------------------------------------------------------------------------------------------------

    @rule(picks=st.lists(PICK, min_size=1, max_size=4), verdict=VERDICTS)
    def decide(self, picks: list[int], verdict: str) -> None:
        async def act() -> None:
            for pick in picks[: len(self.world.pending)]:
                pending = self.world.pending.pop(pick % len(self.world.pending))
                pending.verdict.set_result(verdict)
                if verdict != "hang up":
                    reading = self.world.asked[pending.number].reading
                    await asyncio.wait([reading], timeout=WAIT_S)

        self.run(act())

    @rule(name=st.sampled_from(NAMES))
    def die_or_return(self, name: str) -> None:
        async def act() -> None:
            if name in self.world.alive:
                self.world.alive.remove(name)
                await self.world.backends[name].stop()
                await eventually(lambda: all(pending.engine != name for pending in self.world.pending))
            else:
                self.world.alive.add(name)
                await self.world.backends[name].start()

        self.run(act())

    @precondition(lambda self: self.world.entries)
    @rule(pick=PICK, capacity=CAPACITIES)
    def say_how_full(self, pick: int, capacity: int) -> None:
        async def act() -> None:
            dispatcher = self.world.dispatcher
            name = list(self.world.entries)[pick % len(self.world.entries)]
            dispatcher.placement.report_kv(dispatcher.placement.engines[name], kv_usage=0.5, kv_capacity=capacity)
            dispatcher.gate.room()

        self.run(act())

    # --- the fleet ---------------------------------------------------------------------------------------------------

    @rule(entries=st.dictionaries(st.sampled_from(NAMES), ENTRIES))
    def announce(self, entries: dict[str, dict[str, Any]]) -> None:
        async def act() -> None:
            world = self.world
            world.entries = {name: world.backends[name].entry(**given) for name, given in entries.items()}
            world.announce()

        self.run(act())

    @rule(closed=st.booleans())
    def gate(self, *, closed: bool) -> None:
        async def act() -> None:
            self.world.closed = closed
            self.world.announce()

        self.run(act())

    # --- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def nothing_went_astray(self) -> None:
        assert self.world.wrong == []

    @invariant()
    def the_gate_is_busy_only_while_it_holds_requests(self) -> None:
        if hasattr(self.world, "dispatcher"):
            gate = self.world.dispatcher.gate
            assert gate.busy == (gate.closed or len(gate) > 0)

    def teardown(self) -> None:
        try:
            if hasattr(self.world, "dispatcher"):
                self.runner.run(self.wind_up())
        finally:
            self.runner.run(self.world.stop())
            self.runner.close()
            self.patch.undo()

    async def wind_up(self) -> None:
        """Everything is well again: every request that is left must come to its answer."""
        world, dispatcher = self.world, self.world.dispatcher
        for name in set(NAMES) - world.alive:
            await world.backends[name].start()
        world.entries = {name: world.backends[name].entry(weight_version=2) for name in NAMES}
        world.closed = False
        world.announce()
        await eventually(lambda: not any(backend.down for backend in dispatcher.backends.values()))
        await world.settle()
        for _ in range(len(world.asked) + 1):  # with each round of sessions that finish, others find room
            while world.pending:
                world.pending.pop().verdict.set_result("answer")
                await world.settle()
            for session in NAMES_OF_SESSIONS:
                finish_session(dispatcher, session)
            await world.settle()
        assert not world.asked, (dispatcher.gate.held_by(), state_of(dispatcher).engines)
        assert world.wrong == []
        metrics = world.router.metrics
        assert (metrics.answered, sum(metrics.errors.values()), metrics.broken, metrics.cancelled) == tuple(
            world.over[kind] for kind in ("answered", "error", "broken", "cancelled")
        )
        assert metrics.requests == world.count == sum(world.over.values())
        assert (len(dispatcher.gate), dispatcher.gate.held_bytes) == (0, 0)
        for engine in dispatcher.backends.values():
            assert (engine.outstanding, engine.outstanding_tokens, engine.resident_tokens) == (0, 0, 0)


def test_nothing_is_lost_whatever_happens() -> None:
    run_state_machine_as_test(
        RouterMachine,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
