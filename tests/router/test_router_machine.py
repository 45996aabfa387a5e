"""Joins, drains, deaths, gates, sessions and requests in any order: no request is lost, doubled or sent astray.

A whole router before scripted engines, in this process. The model knows what the router was told, and judges each
placement at the moment it is made; in the end every request must have its one answer and every counter add up.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
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
from router_rig import Backend, RawClient, Seen, eventually, read_body, reply, request

from penstock.config import RouterConfig
from penstock.router.engine import Engine
from penstock.router.exchange import Exchange
from penstock.router.membership import EngineEntry
from penstock.router.server import Router

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
NAMES = ("e0", "e1", "e2")
NAMES_OF_SESSIONS = ("s0", "s1", "s2", "s3", "s4", "s5")
SESSIONS = st.sampled_from([None, *NAMES_OF_SESSIONS])
ADAPTERS = st.sampled_from([None, None, "code"])
ENTRIES = st.fixed_dictionaries(
    {
        "weight_version": st.integers(0, 2),
        "eligible": st.sampled_from([True, True, True, False]),
        "draining": st.sampled_from([False, False, True]),
        "adapters": st.sampled_from([None, (), ("code",)]),
    }
)
REQUESTS = st.tuples(SESSIONS, ADAPTERS, st.sampled_from([0, 0, 1, 2]), st.sampled_from([0, 60, 60, 60]))
POLICIES = st.sampled_from(["bounded-sticky"] * 4 + ["round-robin", "consistent-hash"])
CAPACITIES = st.sampled_from([0, 100, 100])
"""Tokens: of the sessions that ask for 60, one fits."""
VERDICTS = st.sampled_from(["answer", "answer", "answer", "error", "break", "hang up"])
PICK = st.integers(0, 10**6)


@dataclass
class Asked:
    """A request of a client."""

    number: int
    session: str | None
    adapter: str | None
    version: int
    client: RawClient
    reading: asyncio.Task[tuple[int, bytes]]
    engines: list[str] = field(default_factory=list)
    """Where it was placed, one after another."""


@dataclass
class Pending:
    """A request that an engine has, and what it is to do with it."""

    number: int
    engine: str
    verdict: asyncio.Future[str]


async def read_answer(client: RawClient) -> tuple[int, bytes]:
    """Status and body; status 0: the answer broke off, or there was none."""
    try:
        status, headers = await client.head()
        return status, await read_body(client.reader, headers)
    except (asyncio.IncompleteReadError, ConnectionError):
        return 0, b""


class World:
    """The router, its engines and its clients."""

    def __init__(self) -> None:
        self.backends = {name: Backend(self.serve, name) for name in NAMES}
        self.alive = set(NAMES)
        self.pending: list[Pending] = []
        self.asked: dict[int, Asked] = {}
        self.over: Counter[str] = Counter()
        """Requests that are over, by what their clients saw."""
        self.entries: dict[str, EngineEntry] = {}
        self.homes: dict[str, str] = {}
        self.closed = False
        self.closed_adapter = False
        self.closed_engines: set[str] = set()
        self.wrong: list[str] = []
        self.epoch = self.count = 0

    async def start(self, policy: str) -> None:
        for backend in self.backends.values():
            await backend.start()
        self.router = Router(RouterConfig(policy=policy, max_held=20, max_hold_s=60, engine_metrics_interval_s=0))
        await self.router.start("127.0.0.1", 0)
        self.dispatcher = self.router.dispatcher

    async def stop(self) -> None:
        await self.router.close()
        for backend in self.backends.values():
            await backend.stop()
        for asked in self.asked.values():
            asked.reading.cancel()
            asked.client.close()

    async def ask(self, session: str | None, adapter: str | None, version: int, tokens: int) -> None:
        self.count += 1
        client = await RawClient.connect(self.router.url)
        reading = asyncio.ensure_future(read_answer(client))
        self.asked[self.count] = Asked(self.count, session, adapter, version, client, reading)
        named = {"X-Session-ID": session, "X-Adapter": adapter, "X-Weight-Version": version, "X-Prompt-Tokens": tokens}
        headers = "".join(f"{name}: {given}\r\n" for name, given in named.items() if given)
        await client.send(request(f"/r/{self.count}", b"body", headers))
        await eventually(lambda: self.router.metrics.requests == self.count)

    async def serve(self, backend: Backend, seen: Seen, reader: Reader, writer: Writer) -> None:
        pending = Pending(int(seen.line.split()[1][3:]), backend.name, asyncio.get_running_loop().create_future())
        self.pending.append(pending)
        closed = asyncio.ensure_future(reader.read(1))
        await asyncio.wait([pending.verdict, closed], return_when=asyncio.FIRST_COMPLETED)
        if pending in self.pending:  # the router has closed the connection, or this engine was killed
            self.pending.remove(pending)
            return
        closed.cancel()
        await asyncio.wait([closed])
        match pending.verdict.result():
            case "answer":
                writer.write(reply(f"{backend.name} {pending.number}".encode()))
            case "error":
                writer.write(reply(f"{backend.name} {pending.number}".encode(), "500 Internal Server Error"))
            case "break":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\npart")
                writer.close()
            case _:
                writer.close()

    def judge(self, exchange: Exchange, engine: Engine) -> None:
        """Note what is wrong with a placement, by what the router has been told."""
        asked = self.asked[int(exchange.request.target[3:])]
        entry = self.entries.get(engine.name)
        session = asked.session
        wrong = [
            what
            for what, so in {
                "not in the set": entry is None,
                "down": engine.down,
                "gate closed": self.closed,
                "gate of its adapter closed": asked.adapter is not None and self.closed_adapter,
                "gate of the engine closed": engine.name in self.closed_engines,
                "tried before": engine.name in exchange.tried,
            }.items()
            if so
        ]
        if entry is not None:
            here = session is not None and self.homes.get(session) == engine.name
            if not entry.eligible or (entry.draining and not here):
                wrong.append("not eligible, or draining and the session lives elsewhere")
            if entry.weight_version < asked.version:
                wrong.append("weights too old")
            if asked.adapter is not None and entry.adapters is not None and asked.adapter not in entry.adapters:
                wrong.append("without the adapter")
        if wrong:
            self.wrong.append(f"request {asked.number} on {engine.name}: {', '.join(wrong)}")
        asked.engines.append(engine.name)
        if session is not None:
            self.homes[session] = engine.name

    async def settle(self) -> None:
        """Until everyone asked is with an engine, held or answered, and the router knows of each engine what it has."""

        def quiet() -> bool:
            self.collect()
            have = Counter(pending.engine for pending in self.pending)
            known = {name: view.outstanding for name, view in self.dispatcher.placement.views().items()}
            told = all(have[name] == outstanding for name, outstanding in known.items())
            return told and len(self.asked) == len(self.pending) + len(self.dispatcher.gate)

        for _ in range(3):  # what was only put off to the next turn of the loop
            await asyncio.sleep(0)
        await eventually(quiet, 10)

    def collect(self) -> None:
        for asked in [asked for asked in self.asked.values() if asked.reading.done()]:
            del self.asked[asked.number]
            status, body = asked.reading.result()
            asked.client.close()
            if status in {200, 500}:
                name, number = body.decode().split()
                if int(number) != asked.number or name != asked.engines[-1]:
                    self.wrong.append(f"request {asked.number}, last on {asked.engines}, was answered {body!r}")
                self.over["answered"] += 1
            else:
                self.over["error" if status else "broken"] += 1


class RouterMachine(RuleBasedStateMachine):
    """Rules are what clients, engines and the fleet do; after each the router comes to rest."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.world = World()
        world, place = self.world, Exchange.place

        def judged(exchange: Exchange, engine: Engine) -> None:
            world.judge(exchange, engine)
            place(exchange, engine)

        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(Exchange, "place", judged)

    def run(self, act: Any) -> None:
        async def acting() -> None:
            await act
            await self.world.settle()

        self.runner.run(acting())

    @initialize(
        policy=st.sampled_from(["bounded-sticky", "bounded-sticky", "round-robin", "consistent-hash"]),
        capacity=CAPACITIES,
    )
    def start(self, policy: str, capacity: int) -> None:
        self.runner.run(self.world.start(policy))
        self.announce({name: {} for name in NAMES})
        for pick in range(len(NAMES)):
            self.say_how_full(pick, capacity)

    # --- clients -----------------------------------------------------------------------------------------------------

    @rule(wanted=st.lists(REQUESTS, min_size=1, max_size=4))
    def ask(self, wanted: list[tuple[str | None, str | None, int, int]]) -> None:
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
            self.world.dispatcher.finish_session(session)

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
                    await asyncio.wait([reading], timeout=10)

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
            dispatcher.placement.figures(name, kv_usage=0.5, kv_capacity=capacity)
            dispatcher.gate.room()

        self.run(act())

    # --- the fleet ---------------------------------------------------------------------------------------------------

    @rule(entries=st.dictionaries(st.sampled_from(NAMES), ENTRIES))
    def announce(self, entries: dict[str, dict[str, Any]]) -> None:
        async def act() -> None:
            world = self.world
            world.epoch += 1
            world.entries = {name: world.backends[name].entry(**given) for name, given in entries.items()}
            world.closed_engines &= set(entries)
            world.dispatcher.set_engines(world.epoch, list(world.entries.values()))

        self.run(act())

    @rule(closed=st.booleans())
    def gate(self, *, closed: bool) -> None:
        async def act() -> None:
            self.world.closed = closed
            self.world.dispatcher.set_gate(closed=closed)

        self.run(act())

    @rule(closed=st.booleans())
    def gate_of_an_adapter(self, *, closed: bool) -> None:
        async def act() -> None:
            self.world.closed_adapter = closed
            self.world.dispatcher.set_gate(closed=closed, adapter="code")

        self.run(act())

    @precondition(lambda self: self.world.entries)
    @rule(pick=PICK, closed=st.booleans())
    def gate_of_an_engine(self, pick: int, *, closed: bool) -> None:
        async def act() -> None:
            name = list(self.world.entries)[pick % len(self.world.entries)]
            (self.world.closed_engines.add if closed else self.world.closed_engines.discard)(name)
            self.world.dispatcher.set_gate(closed=closed, engine=name)

        self.run(act())

    # --- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def nothing_went_astray(self) -> None:
        assert self.world.wrong == []

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
        world.epoch += 1
        world.entries = {name: world.backends[name].entry(weight_version=2) for name in NAMES}
        world.closed = world.closed_adapter = False
        world.closed_engines.clear()
        dispatcher.set_gate(closed=False)
        dispatcher.set_gate(closed=False, adapter="code")
        for name in NAMES:
            dispatcher.set_gate(closed=False, engine=name)
        dispatcher.set_engines(world.epoch, list(world.entries.values()))
        await world.settle()
        for _ in range(len(world.asked) + 1):  # with each round of sessions that finish, others find room
            while world.pending:
                world.pending.pop().verdict.set_result("answer")
                await world.settle()
            for session in NAMES_OF_SESSIONS:
                dispatcher.finish_session(session)
            await world.settle()
        assert not world.asked, (dispatcher.gate.held_by(), dispatcher.placement.views())
        assert world.wrong == []
        metrics = world.router.metrics
        assert (metrics.answered, sum(metrics.errors.values()), metrics.broken, metrics.cancelled) == tuple(
            world.over[kind] for kind in ("answered", "error", "broken", "cancelled")
        )
        assert metrics.requests == world.count == sum(world.over.values())
        assert (len(dispatcher.gate), dispatcher.gate.held_bytes) == (0, 0)
        for view in dispatcher.placement.views().values():
            assert (view.outstanding, view.outstanding_tokens, view.resident_tokens) == (0, 0, 0)


def test_nothing_is_lost_whatever_happens() -> None:
    run_state_machine_as_test(
        RouterMachine,
        settings=settings(
            max_examples=30,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
