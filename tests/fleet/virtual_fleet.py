"""A whole fleet in virtual time: the real client, control plane, supervisor and placement over simulated engines.

What is not there: sockets (`virtual_http.py` runs the simulated engines' own handlers), processes (a `Node` stands for
one), and the router's way with bytes (`VirtualRouter` puts requests where the router's own dispatcher says).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import aiohttp
from virtual_http import Call, Exchange, Session, refused

from penstock import Fleet
from penstock.errors import EngineHTTPError, EngineStartError
from penstock.fleet.attach import AttachedServers
from penstock.fleet.engines import connect_engine
from penstock.fleet.launch import Terms, assemble
from penstock.fleet.member import Lifecycle, Member, State
from penstock.fleet.router_process import OpenRouter
from penstock.http import HttpTransport
from penstock.router.backend import Backend
from penstock.router.dispatcher import Dispatcher
from penstock.router.gate import Waiter
from penstock.router.http import RefusalError, RequestHead
from penstock.router.membership import EngineEntry, Membership
from penstock.router.other_calls import state_of
from penstock.router.state import RouterState
from penstock.router_settings import RouterConfig
from penstock.settings import FleetConfig
from penstock.sim import Fault, FaultKind, Phase, SimConfig, SimEngine
from penstock.sim.server import CORE_DEATH_EXIT_S, _app
from penstock.weights.manifest import WeightManifest
from virtual_time import VirtualClock, VirtualLoop

ROUTER = "http://127.0.0.1:1"
LATENCY_S = 0.0002
"""Of each call, one way: so that what happens at once can happen in any order."""
START_S = 0.5
"""An engine takes so long to start."""
DEADLINE_S = 1.0
"""Of a control call; virtual, so that a hang costs nothing."""
SIGKILLED = -9


class Node:
    """One simulated engine, its port and its process."""

    def __init__(self, network: Network, name: str, url: str, config: SimConfig) -> None:
        self.name, self.url = name, url
        self.engine = _RecordedEngine(config, network, self._died)
        self.app = _app(config, (self.engine,))
        self.app.freeze()
        self.listening = True
        self.hangs = False
        """It was made to, and has not gone on since."""
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.open: set[Exchange] = set()

    async def wait(self) -> int:
        """Exit status of its process."""
        return await asyncio.shield(self.status)

    async def stop(self, timeout_s: float) -> None:  # noqa: ARG002 - as EngineProcess has it
        """End it."""
        self.kill()

    def kill(self) -> None:
        """SIGKILL, to all of it."""
        self.engine.die(FaultKind.EXIT, "killed")
        self._gone(SIGKILLED)

    def hang(self) -> None:
        """It makes no token and answers no health check any more."""
        self._hang_at(Phase.TOKENS, Phase.HEALTH, Phase.REQUEST)

    def hang_in_the_core(self) -> None:
        """It makes no token any more, and its server says that it is well."""
        self._hang_at(Phase.TOKENS, Phase.CONTROL, Phase.REQUEST)

    def go_on(self) -> None:
        """It hangs no more, and takes up what it has: SIGCONT."""
        self.engine.faults.clear()
        self.hangs = False

    def _hang_at(self, *phases: Phase) -> None:
        self.hangs = True
        for phase in phases:
            self.engine.faults.add(Fault(FaultKind.HANG, phase, times=1 << 30))

    def _died(self, kind: FaultKind) -> None:
        if kind is FaultKind.EXIT:
            self._gone(1)
        else:  # as vLLM: the server outlives its core for a moment
            asyncio.get_running_loop().call_later(CORE_DEATH_EXIT_S, self._gone, 1)

    def _gone(self, status: int) -> None:
        self.listening = False
        for exchange in tuple(self.open):
            exchange.sever()
        self.engine.close()
        if not self.status.done():
            self.status.set_result(status)


class _RecordedEngine(SimEngine):
    """Notes what comes into force."""

    def __init__(self, config: SimConfig, network: Network, on_death: Callable[[FaultKind], None]) -> None:
        super().__init__(config, on_death=on_death)
        self._network = network

    async def _load(self, manifest: WeightManifest, checksum: str) -> str:
        answered = await super()._load(manifest, checksum)
        self._network.in_force[self.weights.version].add(self.weights.checksum)
        return answered


class Network:
    """Who listens where. Engines by URL; the router is the one place for requests that generate."""

    def __init__(self, config: SimConfig) -> None:
        self.config = config
        self.nodes: dict[str, Node] = {}
        """By URL, those that are gone too."""
        self.in_force: dict[int, set[str]] = defaultdict(set)
        """Checksums of the weights that any engine has served under a version."""
        self.router = VirtualRouter(self)
        self.session = Session(self._open)

    def add(self, name: str) -> Node:
        """A new engine on a new port."""
        url = f"http://127.0.0.1:{10_000 + len(self.nodes)}"
        node = self.nodes[url] = Node(self, name, url, self.config)
        return node

    def exchange(self, node: Node, call: Call) -> Exchange:
        """Let an engine answer. Raises aiohttp.ClientConnectorError where it is gone."""
        if not node.listening:
            raise refused(node.url)
        exchange = Exchange(node.app, call)
        node.open.add(exchange)
        exchange.ended.add_done_callback(lambda _: node.open.discard(exchange))
        return exchange

    async def _open(self, call: Call) -> Exchange:
        await asyncio.sleep(LATENCY_S)
        if call.address == ROUTER:
            return await self.router.forward(call)
        return self.exchange(self.nodes[call.address], call)


class VirtualRouter:
    """The router's control side (`router.state.Admin`), and its data side down to the choice of an engine."""

    def __init__(self, network: Network) -> None:
        config = RouterConfig(engine_metrics_interval_s=0.0)
        self.dispatcher = Dispatcher(config)
        self.unconfirmed: list[str] = []
        """Requests that went to an engine whose weights are not those that the fleet announced."""
        self._network = network

    async def announce(self, membership: Membership) -> None:
        await asyncio.sleep(LATENCY_S)
        self.dispatcher.set_membership(membership)

    async def epochs(self) -> list[int]:
        return [(await self.engines()).epoch]

    async def engines(self) -> RouterState:
        await asyncio.sleep(LATENCY_S)
        return state_of(self.dispatcher)

    async def forward(self, call: Call) -> Exchange:
        """Hold and place a request, again where an engine breaks before the first byte; returns what answers it."""
        waiting = _Waiting(self.dispatcher, call)
        self.dispatcher.gate.submit(waiting)
        while True:
            try:
                backend = await waiting.found
            except asyncio.CancelledError:
                waiting.leave()
                raise
            waiting.found = asyncio.get_running_loop().create_future()
            entry = backend.entry
            node = self._network.nodes[entry.url]
            self._check_confirmed(entry, node)
            try:
                exchange = self._network.exchange(node, call)
                await exchange.begun()
            except aiohttp.ClientConnectorError:
                self.dispatcher.retry(waiting, backend, "refused", 0.0)
            except aiohttp.ServerDisconnectedError:
                self.dispatcher.retry(waiting, backend, "hung_up", 0.0)
            except BaseException:
                self.dispatcher.done(waiting, backend, 0.0)
                exchange.sever()
                raise
            else:
                over = partial(self.dispatcher.done, waiting, backend, 0.0)
                exchange.ended.add_done_callback(lambda _, over=over: over())
                return exchange

    def _check_confirmed(self, entry: EngineEntry, node: Node) -> None:
        weights = node.engine.weights
        if node.engine.death is None and not weights.identity == weights.version == entry.weight_version:
            self.unconfirmed.append(
                f"{entry.name} was sent a request as version {entry.weight_version}; its weights are "
                f"{weights.identity}, labelled {weights.version}"
            )


class _Waiting(Waiter):
    """A request in the dispatcher's hands; `router.exchange.Exchange` is the real one."""

    def __init__(self, dispatcher: Dispatcher, call: Call) -> None:
        ids = {f"{name.lower()}_id": call.headers.get(f"X-{name}-ID") for name in ("Session", "Group")}
        tokens = ("Prompt", "Expected")
        counts = {f"{name.lower()}_tokens": int(call.headers.get(f"X-{name}-Tokens", 0)) for name in tokens}
        self.request = RequestHead(ids | counts)
        self.found: asyncio.Future[Backend] = asyncio.get_running_loop().create_future()
        self._dispatcher = dispatcher

    def placed(self, backend: Backend) -> None:
        if self.found.cancelled():
            self._dispatcher.done(self, backend, 0.0)
        else:
            self.found.set_result(backend)

    def refuse(self, refusal: RefusalError) -> None:
        if not self.found.done():
            self.found.set_exception(EngineHTTPError(str(refusal), status=refusal.status))

    def leave(self) -> None:
        """The client has gone."""
        self._dispatcher.gate.discard(self)


class VirtualEngines:
    """Starts simulated engines (`engines.LaunchedEngines`)."""

    def __init__(self, network: Network) -> None:
        self.taken: dict[Lifecycle, Sequence[str]] = {}
        self.failures = 0
        """So many starts fail from now on."""
        self._network = network
        self._nodes: dict[Lifecycle, Node] = {}

    async def start(self, lifecycle: Lifecycle, gpus: Sequence[str]) -> Member:
        await asyncio.sleep(START_S)
        if self.failures:
            self.failures -= 1
            lifecycle.to(State.DEAD, "did not start")
            raise EngineStartError("did not start", engine=lifecycle.engine)
        node = self._nodes[lifecycle] = self._network.add(lifecycle.engine)
        member = await connect_engine(lifecycle, node.url, api_key=None, control_timeout_s=DEADLINE_S, process=node)
        member.again = partial(self.start, lifecycle, gpus)
        return member

    async def end(self, lifecycle: Lifecycle) -> None:
        if (node := self._nodes.pop(lifecycle, None)) is not None:
            node.kill()
        if lifecycle.state is State.DRAINING:
            lifecycle.to(State.STOPPED, "its process has ended")

    async def end_all(self) -> None:
        """End every one."""
        for lifecycle in tuple(self._nodes):
            await self.end(lifecycle)

    def place(self, taken: Sequence[Sequence[str]]) -> tuple[str, ...]:  # noqa: ARG002 - as LaunchedEngines has it
        return ()


@contextmanager
def virtual_time() -> Generator[asyncio.Runner]:
    """A loop on virtual time, which stands still between two runs of it."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(VirtualClock())) as runner:
        yield runner


async def open_fleet(network: Network, engines: VirtualEngines, count: int, **options: Any) -> Fleet:
    """`count` engines and a fleet over them, as `Fleet.launch` makes it."""
    async with AsyncExitStack() as owned:
        owned.push_async_callback(engines.end_all)
        members = [await engines.start(Lifecycle(f"e{i}"), ()) for i in range(count)]
        return await assemble(
            OpenRouter(ROUTER, network.router),
            members,
            owned,
            Terms(FleetConfig(engines=count, **options), None, DEADLINE_S, 3600.0, start_timeout_s=600.0),
            attached=AttachedServers(api_key=None, control_timeout_s=DEADLINE_S),
            engines=engines,  # type: ignore[arg-type]
        )


@contextmanager
def without_sockets(network: Network) -> Generator[None]:
    """Every `HttpTransport` made in this block reaches the network's engines and router."""
    with patch.object(HttpTransport, "_open", lambda _: network.session):
        yield
