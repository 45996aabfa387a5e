"""Engines, router and store in this process, with failures on demand, for the fleet's logic without processes."""

# ruff: noqa: ARG002, FBT003 - the signatures are those of what is replaced

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, Literal

from penstock.control_types import KV, CoreState, EngineUpdate, PauseMode
from penstock.engine.capabilities import PENSTOCK, EngineInfo
from penstock.engine.verbs import AdapterLoad, EngineStats
from penstock.errors import EngineDeadError, EngineHTTPError, StateError, WeightsError
from penstock.fleet.member import Lifecycle, Member, State
from penstock.fleet.pausing import AllOperations as Operations
from penstock.fleet.roster import Roster
from penstock.fleet.supervise import Admission, start_serving
from penstock.router.membership import Membership
from penstock.router.state import EngineLoad, RouterState
from penstock.settings import FleetConfig
from penstock.weights.manifest import WeightManifest
from virtual_time import virtual

Kind = Literal["refuse", "hang", "die", "unfit", "garbage", "wrong"]
DEADLINE_S = 0.05
Journal = list[tuple[str, str]]
BenchTest = Callable[..., Coroutine[Any, Any, None]]


async def until(reached: Callable[[], bool]) -> None:
    """Let others run until `reached()` is so."""
    async with asyncio.timeout(60.0):
        while not reached():  # noqa: ASYNC110 - any state of the fakes can be waited for
            await asyncio.sleep(0.001)


class FakeAdapterCalls:
    """`AdapterCalls` of a fake engine."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def read(self, name: str, source: Mapping[str, Any], *, timeout_s: float) -> None:
        self._engine.journal.append((self._engine.name, "read adapter"))  # a thread of its worker: its core answers

    async def load(
        self, name: str, version: int, source: Mapping[str, Any], *, timeout_s: float, kv: KV = "recompute"
    ) -> EngineUpdate:
        await self._engine.at("load adapter")
        content = Path(source["file"]).read_bytes() if "file" in source else b""
        self._engine.lora[name] = (version, content)
        return EngineUpdate(self._engine.name, {"bubble": 0.0}, preempted=0, checksum="")

    async def unload(self, name: str) -> None:
        await self._engine.at("unload adapter")
        if self._engine.in_flight.get(name):
            raise EngineHTTPError(f"adapter {name!r} has requests in flight", status=409, engine=self._engine.name)
        self._engine.lora.pop(name, None)

    async def served(self) -> dict[str, AdapterLoad]:
        return {
            name: AdapterLoad(version, self._engine.in_flight.get(name, 0), self._engine.idle_s.get(name, 0.0))
            for name, (version, _) in self._engine.lora.items()
        }

    async def pause(self, name: str) -> None:
        await self._engine.at("pause adapter")
        self._engine.paused_adapters.add(name)

    async def resume(self, name: str) -> None:
        await self._engine.at("resume adapter")
        self._engine.paused_adapters.discard(name)


class FakeNativeTransfer:
    """`NativeTransfer` of a fake engine."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def init(self, init_info: Mapping[str, Any]) -> None:
        await self._engine.at("init")
        self._engine.calls["init"] = init_info

    async def update(self, update_info: Mapping[str, Any], *, version: int) -> None:
        if not self._engine.paused:
            raise StateError("not paused")
        await self._engine.at("native")
        self._engine.version = version


class FakeEngine:
    """Keeps the state that a real engine would, so that it can be compared with what the fleet believes."""

    def __init__(self, name: str, journal: Journal, *, layout: tuple[int, int, int] = (1, 1, 1)) -> None:
        self.name = name
        self.journal = journal
        self.faults: dict[str, Kind] = {}
        self.paused = False
        self.version = 0
        self.prepared: int | None = None
        self.layout = layout
        self.capabilities = replace(PENSTOCK, weight_transfer="nccl")
        self.calls: dict[str, Any] = {}
        self.torn = False
        self.lora: dict[str, tuple[int, bytes]] = {}
        self.adapters = FakeAdapterCalls(self)
        self.native = FakeNativeTransfer(self)
        self.verbs = self
        """Version and bytes of each adapter."""
        self.in_flight: dict[str, int] = {}
        self.idle_s: dict[str, float] = {}
        self.paused_adapters: set[str] = set()
        self.foreign = 0
        self.checksum: str | None = None
        self.gone = asyncio.Event()
        self.tokens = 10
        self.busy = asyncio.Event()
        self.busy.set()
        self.idle = asyncio.Event()
        """It has no request in flight, for which a pause waits."""
        self.idle.set()

    async def at(self, phase: str) -> None:
        self.journal.append((self.name, phase))
        match self.faults.get(phase):
            case "refuse":
                raise EngineHTTPError(f"no {phase}", status=500, error_type="InternalServerError", engine=self.name)
            case "hang":
                await asyncio.Event().wait()
            case "die":
                raise EngineDeadError(f"connection broke at {phase}", engine=self.name)
            case "unfit":
                raise WeightsError(f"engine {self.name}: tensor 'w' has shape (2,), not (3,)")
            case "garbage":
                raise KeyError("version")
            case _:
                await self.busy.wait()

    async def info(self) -> EngineInfo:
        tp, pp, dp = self.layout
        sizes = (tp, pp, dp, 32, 64)
        return EngineInfo("fake", "0", self.version, self.paused, *sizes, ("shared_memory",), self.capabilities)

    async def state(self) -> CoreState:
        await self.at("question")
        return CoreState(self.paused, self.version, torn=self.torn, foreign=self.foreign, checksum=self.checksum)

    async def core_gone(self) -> None:
        await self.gone.wait()

    async def health(self, timeout_s: float) -> None:
        self.calls["health"] = timeout_s
        await self.at("health")

    async def stats(self) -> EngineStats:
        await self.at("stats")
        return EngineStats(running=2, waiting=1, kv_cache_usage=0.25, generation_tokens=self.tokens, preemptions=0)

    async def pause(self, mode: PauseMode, *, clear_cache: bool = True, timeout_s: float | None = None) -> None:
        self.calls["pause"] = (mode, clear_cache, timeout_s)
        await self.at("pause")
        if mode is PauseMode.WAIT:
            await self.idle.wait()
        self.paused = True

    async def resume(self) -> None:
        await self.at("resume")
        self.paused = False

    async def abort(self) -> None:
        await self.at("abort")
        self.idle.set()

    async def reset_prefix_cache(self) -> None:
        await self.at("reset")

    async def sleep(self, level: int) -> None:
        await self.at("sleep")
        self.calls["sleep"] = level

    async def wake_up(self, tags: Sequence[str] | None) -> None:
        await self.at("wake")
        self.calls["wake"] = tags
        if tags is None or "kv_cache" in tags:
            self.paused = False  # as vLLM does when all memory is back

    async def collective_rpc(
        self, method: str, timeout_s: float, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> list[Any]:
        await self.at("rpc")
        return [f"{self.name}.{rank}" for rank in range(self.layout[0] * self.layout[1] * self.layout[2])]

    async def prepare_weights(self, manifest: WeightManifest) -> None:
        await self.at("prepare")
        self.prepared = manifest.version

    async def apply_weights(self, version: int, *, kv: KV = "recompute") -> EngineUpdate:
        assert self.prepared == version, "apply without prepare"
        was_paused, self.paused = self.paused, True
        await self.at("apply-pause")
        await self.at("apply-load")
        self.version = version
        self.checksum = checksum = "other" if self.faults.get("checksum") == "wrong" else f"sum-{version}"
        await self.at("apply-resume")
        self.paused = was_paused
        seconds = {"pause": 0.25, "load": 0.5, "resume": 0.25, "bubble": 1.0}
        return EngineUpdate(self.name, seconds, preempted=3, checksum=checksum)

    async def close(self) -> None:
        pass


class FakeProcess:
    def __init__(self, url: str = "http://127.0.0.1:1") -> None:
        self.url = url
        self.killed = False
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await asyncio.shield(self.status)

    async def stop(self, timeout_s: float = 0.0) -> None:
        self.kill()

    def kill(self) -> None:
        self.killed = True
        if not self.status.done():
            self.status.set_result(-9)


class FakeRouter:
    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.known = Membership(-1, ())
        self.gone = False

    async def announce(self, membership: Membership) -> None:
        if self.gone:
            raise EngineDeadError("router is gone")
        if membership.epoch <= self.known.epoch:
            raise StateError(f"epoch {membership.epoch} is not newer than {self.known.epoch}")
        if membership.engines != self.known.engines:
            self.journal.append(("router", "set"))
        if membership.closed is not self.known.closed:
            self.journal.append(("router", "gate closed" if membership.closed else "gate open"))
        self.known = membership

    @property
    def closed(self) -> bool:
        return self.known.closed

    async def epochs(self) -> list[int]:
        return [self.known.epoch]

    async def engines(self) -> RouterState:
        engines = self.known.engines
        loads = tuple(EngineLoad(e.name, e.url, e.weight_version, e.eligible, False, 0, 0) for e in engines)
        return RouterState(self.known.epoch, self.closed, 0, 0, 0, loads)

    def serves(self) -> dict[str, int]:
        """Name and weight version of each engine that gets requests."""
        return {entry.name: entry.weight_version for entry in self.known.engines if entry.eligible}


class FakeStore:
    def __init__(self) -> None:
        self.current: WeightManifest | None = None
        self.error: Exception | None = None
        self.published: list[tuple[int, Any]] = []

    def publish(self, version: int, named_tensors: Any) -> WeightManifest:
        if self.error is not None:
            raise self.error
        self.published.append((version, named_tensors))
        return WeightManifest(version, "shared_memory", {"path": "nowhere"}, ())

    def for_engine(self, member: Member, version: int) -> WeightManifest | None:
        return self.current if self.current is not None and self.current.version == version else None

    def adopt(self, manifest: WeightManifest) -> WeightManifest:
        return manifest

    def commit(self, manifest: WeightManifest) -> None:
        self.current = manifest

    def close(self) -> None:
        pass


def on_bench(names: str = "abc", *, settled: bool = True, **options: Any) -> Callable[[BenchTest], Any]:
    """Run a test in virtual time, with a `Bench` that has started as its first argument; then check its belief.

    Args:
        names: of the engines.
        settled: False where the test ends in the middle of a change.
        options: of the bench.
    """

    def of(test: BenchTest) -> Any:
        async def benched(*args: Any, **kwargs: Any) -> None:
            bench = await Bench(names, **options).started()
            await test(bench, *args, **kwargs)
            if settled:
                bench.check_belief()

        signature = inspect.signature(test)
        run: Any = wraps(test)(virtual(benched))
        run.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])  # what pytest gives
        return run

    return of


class Bench:
    """A fleet of fakes, all SERVING at version 0 and known to the router."""

    def __init__(self, names: str = "abc", *, min_engines: int = 1, layouts: Mapping[str, tuple[int, int, int]] = {}):
        self.journal: Journal = []
        self.router = FakeRouter(self.journal)
        self.store = FakeStore()
        self.roster = Roster(self.router)
        self.engine: dict[str, FakeEngine] = {}
        self.process: dict[str, FakeProcess] = {}
        for port, name in enumerate(names, start=1):
            layout = layouts.get(name, (1, 1, 1))
            fake = self.engine[name] = FakeEngine(name, self.journal, layout=layout)
            self.process[name] = FakeProcess()
            lifecycle = Lifecycle(name)
            lifecycle.to(State.SYNCING, "test")
            info = EngineInfo("fake", "0", 0, False, *layout, 32, 64, ("shared_memory",), fake.capabilities)
            url = f"http://127.0.0.1:{port}"
            member = Member(name, url, fake, info, lifecycle, 0, process=self.process[name])
            self.roster.add(member)
            start_serving(self.roster, member)
        self.operations = Operations(
            self.roster,
            self.store,
            FleetConfig(engines=max(1, min_engines), min_engines=min_engines),
            control_timeout_s=DEADLINE_S,
            request_timeout_s=30.0,
        )
        self.operations.native._joined = frozenset(self.engine.values())  # a trainer's communicator

    @property
    def admission(self) -> Admission:
        return Admission(self.operations, self.roster, self.store, self.operations._control_s)

    async def started(self) -> Bench:
        await self.roster.push_membership()
        self.journal.clear()
        return self

    def state(self, name: str) -> State:
        return next(m.state for m in self.roster.members if m.name == name)

    def check_belief(self) -> None:
        """What every live engine is, the fleet believes; and who is dead gets nothing and is ended."""
        for member in self.roster.members:
            fake = self.engine[member.name]
            if member.state is State.DEAD:
                assert member.name not in self.router.serves()
                assert self.process[member.name].killed
                continue
            assert fake.paused == (member.state is State.PAUSED) == self.operations.paused
            assert fake.version == member.weight_version == self.roster.version
            assert self.router.serves()[member.name] == fake.version
