"""Invariants 1 to 3 over thousands of histories: requests, pauses, updates, deaths and engines that come and go.

Each history runs in virtual time over the whole of `Fleet` as `launch` puts it together (client, retries, control
plane, updates, supervisor, elastic) and the router's dispatcher (placement, gate); see `virtual_fleet.py` for what is
simulated. Operations overlap as they like: a rule begins one and lets a drawn time pass. A failing history is printed
by hypothesis with the seed that brings it back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from virtual_fleet import Network, Node, VirtualEngines, open_fleet, virtual_time, without_sockets

from penstock import Fleet, GenerateOutput, PauseMode, SamplingParams
from penstock.errors import (
    DeadlineError,
    EngineDeadError,
    EngineHTTPError,
    EngineStartError,
    PenstockError,
    StateError,
    UpdateError,
    UserError,
)
from penstock.fleet.member import State
from penstock.fleet.supervise import YOUNG
from penstock.sim import Fault, FaultKind, SimConfig
from penstock.sim import Phase as SimPhase
from sim_fleets import CONTEXT, check

CONFIG = SimConfig(tokens_per_second=250, max_model_len=CONTEXT, max_num_seqs=6, kv_blocks=64)
"""Four milliseconds a token, and so little room that requests queue and are preempted."""
FLEET = {"health_interval_s": 2.0, "hang_timeout_s": 6.0, "drain_timeout_s": 4.0, "restart_backoff_s": 0.2}
LIVES = 4
"""A request is given up after this many deaths under it and one more (`client.RETRY_S`): so many are dealt."""
ENDLESS_S = 7200.0
"""Virtual: what takes longer hangs."""
NOTICED_S = (YOUNG + 2) * FLEET["hang_timeout_s"]
"""An engine that hangs is found out by then, one too that has made no token yet."""
OPEN = 3
"""Batches in flight, at least, when something happens."""
MILLISECONDS = st.sampled_from([0, 1, 3, 10, 40, 150, 700, 3000])
WHICH = st.integers(0, 5)
FAULTS = {
    SimPhase.PREPARE: (FaultKind.REFUSE, FaultKind.HANG, FaultKind.EXIT),
    SimPhase.PAUSE: (FaultKind.REFUSE, FaultKind.EXIT),
    SimPhase.LOAD: (FaultKind.REFUSE, FaultKind.HANG, FaultKind.EXIT, FaultKind.CORE_DEATH),
    SimPhase.RESUME: (FaultKind.REFUSE, FaultKind.HANG, FaultKind.EXIT),
}
"""A pause that hangs is not among them: one that waits for requests may take as long as a request, and they with it."""
FAULT = st.sampled_from([(phase, kind) for phase, kinds in FAULTS.items() for kind in kinds])
REFUSALS: dict[str, tuple[type[PenstockError], ...]] = {
    "pause": (StateError, EngineDeadError, DeadlineError),
    "resume": (StateError, EngineDeadError),
    "abort": (EngineDeadError, EngineHTTPError),
    "reset": (EngineDeadError, EngineHTTPError),
    "update": (StateError, UpdateError),
    "add": (EngineStartError,),
    "drain": (StateError, UserError),
    "remove": (StateError, UserError),
}
"""What an operation may end with that comes at a bad moment; anything else fails the history."""


class FleetMachine(RuleBasedStateMachine):
    """One history."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.runner = self.stack.enter_context(virtual_time())
        self.asked: list[tuple[list[list[int]], SamplingParams, asyncio.Task[GenerateOutput]]] = []
        self.begun: list[tuple[str, asyncio.Task[Any]]] = []
        self.updates = 0
        self.aborted = False
        self.lives = LIVES

    @initialize(engines=st.integers(1, 4), least=st.integers(1, 4), chunk=st.sampled_from([0, 1, 7, 64]))
    def start(self, engines: int, least: int, chunk: int) -> None:
        options = {**FLEET, "min_engines": min(least, engines), "stream_chunk_tokens": chunk, "max_restarts": 10**6}

        async def begin() -> None:
            self.network = Network(CONFIG)
            self.stack.enter_context(without_sockets(self.network))
            self.engines = VirtualEngines(self.network)
            self.fleet: Fleet = await open_fleet(self.network, self.engines, engines, **options)

        self.runner.run(begin())

    # --- what happens ------------------------------------------------------------------------------------------------

    @rule(prompts=st.integers(1, 6), n=st.integers(1, 3), tokens=st.integers(1, 60), session=st.booleans())
    def ask(self, prompts: int, n: int, tokens: int, session: bool) -> None:  # noqa: FBT001 - hypothesis gives it by name
        self.send(prompts, n, tokens, session=session)

    @rule(ms=MILLISECONDS)
    def let_pass(self, ms: int) -> None:
        self.runner.run(asyncio.sleep(ms / 1000))

    @rule(
        mode=st.sampled_from(PauseMode),
        clear=st.booleans(),
        timeout_s=st.sampled_from([None, 0.001, 0.02, 0.2]),
        ms=MILLISECONDS,
    )
    def pause(self, mode: PauseMode, clear: bool, timeout_s: float | None, ms: int) -> None:  # noqa: FBT001 - as above
        self.begin("pause", self.fleet.pause_generation(mode, clear_cache=clear, timeout_s=timeout_s), ms)

    @rule(ms=MILLISECONDS)
    def resume(self, ms: int) -> None:
        self.begin("resume", self.fleet.resume_generation(), ms)

    @rule(ms=MILLISECONDS)
    def abort(self, ms: int) -> None:
        self.aborted = True
        self.begin("abort", self.fleet.abort_generation(), ms)

    @rule(ms=MILLISECONDS)
    def reset(self, ms: int) -> None:
        self.begin("reset", self.fleet.reset_prefix_cache(), ms)

    @rule(ms=MILLISECONDS)
    def update(self, ms: int) -> None:
        self.begin("update", self.updated(), ms)

    @rule(fault=FAULT, which=WHICH, ms=MILLISECONDS)
    def update_that_meets(self, fault: tuple[SimPhase, FaultKind], which: int, ms: int) -> None:
        phase, kind = fault
        node = self.alive(which)
        if node is not None and self.spend():
            node.engine.faults.add(Fault(kind, phase))
        self.begin("update", self.updated(), ms)

    @rule(which=WHICH, how=st.sampled_from(["kill", "core", "hang", "hang in the core"]), ms=MILLISECONDS)
    def die(self, which: int, how: str, ms: int) -> None:
        node = self.alive(which)
        if node is None or not self.spend():
            return
        self.keep_busy()
        self.runner.run(asyncio.sleep(ms / 1000))  # so that they have come some way

        async def strike() -> None:
            match how:
                case "kill":
                    node.kill()
                case "core":
                    node.engine.die(FaultKind.CORE_DEATH, "struck")
                case "hang":
                    node.hang()
                case _:
                    node.hang_in_the_core()

        self.runner.run(strike())

    @rule(which=WHICH, ms=MILLISECONDS)
    def go_on(self, which: int, ms: int) -> None:
        """What hangs does so no more, where that comes before it was noticed."""
        if (node := self.alive(which)) is not None:

            async def let_go() -> None:
                node.go_on()
                await asyncio.sleep(ms / 1000)

            self.runner.run(let_go())

    @rule(ms=MILLISECONDS)
    @precondition(lambda self: len(self.fleet._roster.members) < 7)
    def add(self, ms: int) -> None:
        self.begin("add", self.fleet.add_engines(1), ms)

    @rule()
    def next_start_fails(self) -> None:
        self.engines.failures += 1

    @rule(which=WHICH, what=st.sampled_from(["drain", "remove"]), ms=MILLISECONDS)
    def leave(self, which: int, what: str, ms: int) -> None:
        members = self.fleet._roster.members
        name = members[which % len(members)].name
        self.begin(what, getattr(self.fleet, what)(name, timeout_s=1.0), ms)

    # --- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_served_unconfirmed_and_nothing_fails(self) -> None:
        if not hasattr(self, "fleet"):
            return
        assert self.network.router.unconfirmed == []
        assert [v for v, checksums in self.network.in_force.items() if len(checksums) > 1] == [], (
            "two weights, one name"
        )
        for _, _, task in self.asked:
            if task.done():
                task.result()
        if not self.fleet._operations.queue.turns:
            for member in self.fleet._roster.live():
                engine = self.network.nodes[member.url].engine
                assert engine.death or engine.paused == self.fleet._operations.paused, f"{member.name}: {member.state}"
        for what, task in self.begun:
            if task.done() and (error := task.exception()) is not None:
                assert isinstance(error, REFUSALS[what]), f"{what} ended with {error!r}"

    def teardown(self) -> None:
        with self.stack:
            if hasattr(self, "fleet"):
                self.runner.run(self.settle())

    async def settle(self) -> None:
        """Everything ends: every answer is right, and the fleet is what it believes."""
        self.engines.failures = 0
        async with asyncio.timeout(ENDLESS_S):
            await asyncio.gather(*(task for _, task in self.begun), return_exceptions=True)
            noticed = await self.fleet._roster.until(lambda: not self.unnoticed(), deadline_s=NOTICED_S)
            assert noticed, f"after {NOTICED_S:g} s nobody has noticed what became of {self.unnoticed()}"
            for node in self.network.nodes.values():
                node.engine.faults.clear()
            await self.fleet._roster.until(self.whole)
            if self.fleet._operations.paused:
                await self.fleet.resume_generation()
            outs = [await task for _, _, task in self.asked]
            await self.fleet._roster.until(self.whole)
        self.nothing_is_served_unconfirmed_and_nothing_fails()
        for (prompts, params, _), out in zip(self.asked, outs, strict=True):
            check(prompts, out, params)
            assert set(out.stop_reasons) <= ({"length", "abort"} if self.aborted else {"length"})
        await self.check_belief()
        await self.fleet.teardown()
        assert [node.name for node in self.network.nodes.values() if node.engine.death is None] == []

    async def check_belief(self) -> None:
        fleet, router = self.fleet, self.network.router
        assert await fleet.get_num_unfinished_requests() == 0
        assert not router.dispatcher.gate.closed
        assert {e.outstanding for e in router.dispatcher.placement.engines.values()} <= {0}
        live = {m.url: m for m in fleet._roster.live()}
        for url, node in self.network.nodes.items():
            engine = node.engine
            assert (url in live) == (engine.death is None), f"{node.name} at {url}: {engine.death}"
            if engine.death is None:
                assert not engine.paused
                assert engine.weights.identity == engine.weights.version == fleet.weight_version
        prompts = [[9, 9, i] for i in range(12)]
        params = SamplingParams(max_tokens=3, detokenize=False)
        out = await asyncio.wait_for(fleet.generate(prompt_token_ids=prompts, sampling_params=params), 60)
        check(prompts, out, params)
        assert {span.version for spans in out.response_spans for span in spans} == {fleet.weight_version}

    # --- parts of it -------------------------------------------------------------------------------------------------

    def send(self, prompts: int, n: int, tokens: int, *, session: bool) -> None:
        params = SamplingParams(max_tokens=tokens, n=n, detokenize=False)
        ids = [[1 + len(self.asked), 2 + i, *range(3, 3 + 5 * i)] for i in range(prompts)]
        sessions = [i % 2 for i in range(prompts)] if session else None

        async def begin() -> None:
            generate = self.fleet.generate(prompt_token_ids=ids, sampling_params=params, session_ids=sessions)
            self.asked.append((ids, params, asyncio.create_task(generate)))

        self.runner.run(begin())

    def keep_busy(self) -> None:
        """There are always requests in flight for what happens to meet."""
        while sum(not task.done() for *_, task in self.asked) < OPEN:
            number = len(self.asked)
            self.send(1 + number % 4, 1 + number % 2, 15 + 17 * number % 50, session=number % 3 == 0)

    def whole(self) -> bool:
        """Every engine is where it stays."""
        return all(not m.is_restarting for m in self.fleet._roster.members)

    def unnoticed(self) -> list[str]:
        """Engines that hang, and those that have died and are taken to live."""
        live = {m.url for m in self.fleet._roster.live()}
        return [
            node.name
            for url, node in self.network.nodes.items()
            if (node.hangs if node.engine.death is None else url in live)
        ]

    async def updated(self) -> None:
        self.updates += 1
        await self.fleet.update_weights([("w", torch.full((2,), float(self.updates)))])

    def begin(self, what: str, operation: Coroutine[Any, Any, Any], ms: int) -> None:
        self.keep_busy()

        async def run() -> None:
            self.begun.append((what, asyncio.create_task(operation, name=what)))
            await asyncio.sleep(ms / 1000)

        self.runner.run(run())

    def spend(self) -> bool:
        """Whether one more death may be dealt."""
        if not self.lives:
            return False
        self.lives -= 1
        return True

    def alive(self, which: int) -> Node | None:
        """A live engine of the fleet."""
        urls = [m.url for m in self.fleet._roster.members if m.state not in {State.DEAD, State.STOPPED}]
        nodes = [node for url in urls if (node := self.network.nodes[url]).engine.death is None]
        return nodes[which % len(nodes)] if nodes else None


def histories(examples: int, steps: int, *, shrink: bool) -> None:
    """Run so many; one that fails is printed, where `shrink` as short as it can be made, which takes minutes."""
    logging.getLogger("penstock").setLevel(logging.CRITICAL)  # engines die by the thousand
    try:
        run_state_machine_as_test(
            FleetMachine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                database=None,
                print_blob=True,
                phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        logging.getLogger("penstock").setLevel(logging.NOTSET)


def test_the_last_engine_that_is_coming_back_is_not_taken_out() -> None:
    async def run() -> None:
        network = Network(CONFIG)
        with without_sockets(network):
            fleet = await open_fleet(network, VirtualEngines(network), 2, max_restarts=10, **FLEET)
            asked = asyncio.create_task(fleet.generate(prompt_token_ids=[[1, 2]], sampling_params={"max_tokens": 30}))
            await asyncio.sleep(0.05)
            for node in network.nodes.values():
                node.kill()
            await fleet._roster.until(lambda: not fleet._roster.live())
            first, second = await asyncio.gather(fleet.remove("e0"), fleet.remove("e1"), return_exceptions=True)
            assert first is None
            assert isinstance(second, UserError)
            assert "without engine e1 the fleet would have 0 engines" in str(second)
            assert (await asyncio.wait_for(asked, 60)).stop_reasons == ["length"]
            await fleet.teardown()

    with virtual_time() as runner:
        runner.run(run())


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_core_that_hangs_before_its_first_token_costs_no_request(goes_on: bool) -> None:  # noqa: FBT001 - pytest's
    machine = FleetMachine()
    machine.start(engines=2, least=1, chunk=0)
    machine.die(which=1, how="kill", ms=1)
    for ms in (0, 0, 0, 3):
        machine.abort(ms)
    for _ in range(2):
        machine.die(which=0, how="hang in the core", ms=0)
    machine.let_pass(40)  # the requests are in that core
    if goes_on:
        machine.go_on(which=0, ms=3000)
        assert all(task.done() for *_, task in machine.asked)
    machine.teardown()


def test_deaths_of_cores_in_a_row_cost_no_request() -> None:
    """Fails where a request goes on before the fleet knows of the death that it has seen."""
    machine = FleetMachine()
    machine.start(engines=2, least=2, chunk=64)
    for which, ms in ((4, 150), (5, 700), (3, 150)):
        machine.die(which=which, how="core", ms=ms)
    machine.die(which=3, how="hang", ms=3)
    for what, which, ms in (("drain", 1, 700), ("remove", 4, 1), ("remove", 0, 150)):
        machine.leave(which=which, what=what, ms=ms)
    machine.die(which=3, how="core", ms=1)
    machine.die(which=1, how="hang", ms=3000)
    machine.die(which=3, how="core", ms=3)
    machine.leave(which=4, what="drain", ms=10)
    machine.teardown()


def test_histories() -> None:
    histories(100, 12, shrink=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thousands_of_histories() -> None:
    histories(5000, 24, shrink=True)
