"""LoRA adapters of a fleet: their versions, every engine with the same, and pauses of one of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from penstock.aio import in_thread
from penstock.engine.adapters import IN_FLIGHT, AdapterLoad
from penstock.engine.capabilities import Capability, require
from penstock.engine.control import ControlClient
from penstock.errors import (
    DeadlineError,
    EngineHTTPError,
    StateError,
    UserError,
    WeightsError,
    seconds,
)
from penstock.fleet.member import Member, fan_out
from penstock.fleet.operations import OperationQueue
from penstock.fleet.pausing import command
from penstock.fleet.roster import Roster
from penstock.fleet.stores import is_local
from penstock.fleet.update import check_kv
from penstock.settings import FleetConfig
from penstock.types import KV, AdapterStatus, UpdateReport
from penstock.weights.adapter_files import AdapterFiles

T = TypeVar("T")

MARGIN_S = 2.0
"""Longer than the engine's own deadline, so that its message arrives."""
MOST_NAME = 256
"""Bytes, as a router's header takes them."""


@dataclass(slots=True)
class FleetAdapter:
    """A name, and what engines have under it."""

    version: int
    files: AdapterFiles
    pinned: bool = False
    """It is not evicted."""
    resumed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set unless it is paused."""


class FleetAdapters:
    """The adapters of a fleet's engines, by name. What changes engines has its turn among the operations.

    `fleet.max_adapters` names are kept; one more evicts the one used least recently. `timeout_s`: of a control call.
    """

    def __init__(
        self,
        roster: Roster,
        queue: OperationQueue,
        check_awake: Callable[[], None],
        fleet: FleetConfig,
        timeout_s: float,
    ) -> None:
        self._roster = roster
        self._queue = queue
        self._check_awake = check_awake
        self._most = fleet.max_adapters
        self._folder = fleet.weight_folder
        self._timeout_s = timeout_s
        self.known: dict[str, FleetAdapter] = {}
        """By name."""
        self._highest: dict[str, int] = {}
        """The last version of every name, the unloaded too: KV of an older one must not be found again."""
        self._order: dict[str, asyncio.Lock] = {}
        """Versions of one name are in force in the order of their calls, however long each is written and read."""
        self._saved: dict[str, tuple[str, int]] = {}
        """For a name that came by its path, the files as they were, and the version they became."""

    async def update(
        self,
        name: str,
        tensors: Iterable[tuple[str, Any]],
        config: Mapping[str, Any],
        version: int | None = None,
        kv: KV = "recompute",
    ) -> UpdateReport:
        """Put a version in force on every engine; a new name may evict another. See `Fleet.update_adapter`.

        Raises:
            WeightsError: every engine refused it; the version before stays in force.
            StateError: the bound on names is reached, and no adapter can be evicted.
            EngineDeadError: no engine is left.
        """
        self._check(name, version)
        check_kv(kv)
        began, shared = time.perf_counter(), self._shared_folder()
        async with self._in_order(name):
            files = await in_thread(lambda: AdapterFiles.of_tensors(tensors, config, shared=shared))
            return await self._update(name, files, version, kv, time.perf_counter() - began)

    async def update_from(
        self, name: str, source: Mapping[str, Any], version: int | None = None, kv: KV = "recompute"
    ) -> UpdateReport:
        """Put a version in force that another process of this user has written; it need not live on."""
        self._check(name, version)
        check_kv(kv)
        async with self._in_order(name):
            return await self._update(name, AdapterFiles.adopt(source), version, kv, 0.0)

    async def load(self, name: str, path: str, timeout_s: float, *, fixed: bool = False) -> UpdateReport | None:
        """Load what is saved at a path, as a new version if it is not what was loaded last; `fixed`: see `of_folder`.

        Returns:
            None if it was; engines that lost it have it again. Never None where this process does not see the files.
        """
        self._check(name, None)
        if not seconds(timeout_s):
            raise UserError("timeout_s is 0: no engine can load an adapter in that; leave it out for the default")
        async with self._in_order(name):
            stamp = stamp_of(path)
            known, saved = self.known.get(name), f"{path}\n{stamp}"
            if stamp and known is not None and self._saved.get(name) == (saved, known.version):
                await self._turn("load_adapter", lambda: self._bring_to_all(name, known))
                return None
            files = await in_thread(lambda: AdapterFiles.of_folder(path, fixed=fixed))
            async with self._read_ahead(name, files, timeout_s) as read:
                report = await self._turn("load_adapter", lambda: self._put(name, read.pop(), None, timeout_s))
            self._saved[name] = saved, report.version
            return report

    async def unload(self, name: str) -> None:
        """Forget an adapter on every engine. StateError: it has requests in flight somewhere; it stays everywhere."""
        await self._turn("unload_adapter", lambda: self._unload(name))

    async def pause(self, name: str, *, again: bool = False) -> None:
        """Stop its requests at a token on every engine; new ones wait too.

        Raises:
            StateError: it is paused already, unless that may be so (`again`).
        """
        await self._set_paused(name, paused=True, again=again)

    async def resume(self, name: str, *, again: bool = False) -> None:
        """Let its requests go on under the version in force. StateError: it is not paused, and not `again`."""
        await self._set_paused(name, paused=False, again=again)

    async def wait(self, name: str, timeout_s: float) -> None:
        """Return when an adapter is not paused. DeadlineError: it still is after `timeout_s` seconds."""
        seconds(timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await self._of(name).resumed.wait()
        except TimeoutError:
            raise DeadlineError(f"adapter {name!r} is still paused after {timeout_s:g} s", seconds=timeout_s) from None

    async def pin(self, name: str, *, pinned: bool) -> None:
        """Keep an adapter from being evicted, or do so no longer."""
        self._of(name).pinned = pinned

    async def statuses(self) -> dict[str, AdapterStatus]:
        """Name every adapter, with its version and its requests over all engines."""
        served = await self._served()
        return {name: self._status(name, served) for name in self.known}

    async def status(self, name: str) -> AdapterStatus:
        """Return one adapter's version and requests. UserError: there is none of that name."""
        self._of(name)
        return (await self.statuses())[name]

    async def give(self, member: Member) -> None:
        """Bring an engine that joins to the version of every adapter, before it serves.

        Raises:
            EngineError: it cannot be brought there, so it must not serve.
        """
        for name, known in self.known.items():
            # An owner before us may have given it other tensors under the same version.
            await self._bring(member, name, known, trusted=False)

    def close(self) -> None:
        for known in self.known.values():
            known.files.close()
        self.known.clear()

    async def _set_paused(self, name: str, *, paused: bool, again: bool) -> None:
        async def call(engine: ControlClient) -> None:
            await (engine.adapters.pause(name) if paused else engine.adapters.resume(name))

        async def work() -> None:
            known = self._of(name)
            if known.resumed.is_set() is not paused:
                if not again:
                    wrong = "already paused; resume it first" if paused else "not paused; pause it first"
                    raise StateError(f"adapter {name!r} is {wrong}")
                return
            await command(self._roster, call, what=f"{what} of adapter {name!r}", deadline_s=self._timeout_s)
            if paused:
                known.resumed.clear()  # engines that join pause it from now on
            else:
                known.resumed.set()

        what = "pause" if paused else "resume"
        await self._turn(f"{what}_generation(adapter=...)", work, "plugin")

    async def _served(self) -> list[Mapping[str, AdapterLoad]]:
        """Ask every engine which adapters it has; one that fails has none."""
        asked = await fan_out(self._roster.live(), lambda engine: engine.adapters.served(), deadline_s=self._timeout_s)
        return list(asked.results.values())

    async def _bring_to_all(self, name: str, known: FleetAdapter) -> None:
        if self.known.get(name) is known:
            for member in self._roster.live():
                await self._bring(member, name, known)

    async def _bring(self, member: Member, name: str, known: FleetAdapter, *, trusted: bool = True) -> None:
        async def load(engine: ControlClient) -> None:
            if not known.resumed.is_set():
                await engine.adapters.pause(name)
            served = (await engine.adapters.served()).get(name)
            if not trusted or served is None or served.version != known.version:
                await engine.adapters.load(name, known.version, known.files.source, timeout_s=self._timeout_s)

        (await fan_out((member,), load, deadline_s=3 * self._timeout_s)).raise_first()

    async def _update(
        self, name: str, files: AdapterFiles, version: int | None, kv: KV, published_s: float
    ) -> UpdateReport:
        deadline_s = self._timeout_s
        async with self._read_ahead(name, files, deadline_s) as read:
            return await self._turn(
                "update_adapter", lambda: self._put(name, read.pop(), version, deadline_s, published_s, kv)
            )

    def _in_order(self, name: str) -> asyncio.Lock:
        return self._order.setdefault(name, asyncio.Lock())

    @asynccontextmanager
    async def _read_ahead(self, name: str, files: AdapterFiles, timeout_s: float) -> AsyncGenerator[list[AdapterFiles]]:
        """Have the engines read a version before its turn, so that neither generation nor other operations wait.

        An engine that cannot read it says so when it is to load it. The files are freed if they are left in the list.
        """
        read = [files]
        try:
            await fan_out(
                self._roster.live(),
                lambda engine: engine.adapters.read(name, files.source, timeout_s=timeout_s),
                deadline_s=timeout_s,
            )
            yield read
        finally:
            for left in read:
                left.close()

    async def _turn(self, what: str, work: Callable[[], Coroutine[Any, Any, T]], needed: Capability = "lora") -> T:
        async def run() -> T:
            self._check_awake()
            require(((m.name, m.info.capabilities) for m in self._roster.live()), needed, what)
            return await work()

        return await self._queue.run(run)

    async def _put(
        self,
        name: str,
        files: AdapterFiles,
        version: int | None,
        timeout_s: float,
        published_s: float = 0.0,
        kv: KV = "recompute",
    ) -> UpdateReport:
        """Put a version in force in this turn; its files are freed when it is superseded, or now if it is refused."""
        began = time.perf_counter()
        with ExitStack() as undo:
            undo.callback(files.close)
            self._check(name, version)
            if kv != "recompute":
                engines = ((m.name, m.info.capabilities) for m in self._roster.live())
                require(engines, "kv_in_flight", f"update_adapter with kv={kv!r}")
            if name not in self.known:
                await self._make_room()
            if name not in self._highest:
                self._highest[name] = await self._highest_at_engines(name)
                self._check(name, version)
            number = self._highest[name] + 1 if version is None else version
            outcome = await command(
                self._roster,
                lambda engine: engine.adapters.load(name, number, files.source, timeout_s=timeout_s, kv=kv),
                what=f"version {number} of adapter {name!r}",
                deadline_s=timeout_s + MARGIN_S,
                refusable=True,
            )
            undo.pop_all()
        self._highest[name] = number
        if (known := self.known.get(name)) is None:
            known = self.known[name] = FleetAdapter(number, files)
            known.resumed.set()
        else:
            before, known.version, known.files = known.files, number, files
            before.close()
        seconds = {"publish": published_s, "total": published_s + time.perf_counter() - began}
        failures = {engine: str(error) for engine, error in outcome.failures.items()}
        return UpdateReport(number, files.nbytes, seconds, tuple(outcome.results.values()), failures, adapter=name)

    async def _unload(self, name: str) -> None:
        known = self._of(name)
        if busy := (await self.status(name)).in_flight:
            raise StateError(f"adapter {name!r} has {busy} requests in flight; unload it when they have ended")
        members = self._roster.live()
        outcome = await fan_out(members, lambda engine: engine.adapters.unload(name), deadline_s=self._timeout_s)
        errors = outcome.failures.values()
        if refused := [e for e in errors if isinstance(e, EngineHTTPError) and e.status == IN_FLIGHT]:
            for member in members:  # requests came meanwhile
                if member.name in outcome.results:
                    await self._bring(member, name, known)
            raise StateError(str(refused[0])) from refused[0]
        for member in members:
            if (error := outcome.failures.get(member.name)) is not None:
                await self._roster.mark_dead(member, f"unloading adapter {name!r} failed: {error}")
        del self.known[name]
        known.resumed.set()
        known.files.close()

    async def _make_room(self) -> None:
        while len(self.known) >= self._most:
            status = await self.statuses()
            idle = [n for n, s in status.items() if not (s.in_flight or s.pinned or s.paused)]
            if not idle:
                raise StateError(
                    f"{len(status)} adapters are loaded, as many as fleet.max_adapters allows, and each is in use, "
                    "pinned or paused; unload one, or allow more"
                )
            with suppress(StateError):  # a request came: another one, then
                await self._unload(max(idle, key=lambda name: status[name].idle_s))

    def _status(self, name: str, served: Iterable[Mapping[str, AdapterLoad]]) -> AdapterStatus:
        known, loads = self.known[name], [loads[name] for loads in served if name in loads]
        return AdapterStatus(
            version=known.version,
            nbytes=known.files.nbytes,
            in_flight=sum(load.in_flight for load in loads),
            idle_s=min((load.idle_s for load in loads), default=0.0),
            pinned=known.pinned,
            paused=not known.resumed.is_set(),
            engines=len(loads),
        )

    async def _highest_at_engines(self, name: str) -> int:
        """Return the last version that an earlier owner of these engines gave a name; 0: none."""
        return max((loads[name].version or 0 for loads in await self._served() if name in loads), default=0)

    def _shared_folder(self) -> Path | None:
        """Where engines read files that memory of this host cannot bring; WeightsError: they need one, there is none.

        None: memory can bring them.
        """
        far = [m.name for m in self._roster.updatable() if not (is_local(m) and m.info.capabilities.plugin)]
        if not far:
            return None
        if self._folder is None:
            raise WeightsError(
                f"{', '.join(far)} cannot read this process's memory (another host, or no plugin): set "
                "fleet.weight_folder, which they see under the same path"
            )
        return self._folder / "adapters"

    def _check(self, name: str, version: int | None) -> None:
        """Raise UserError for a name or a version that cannot be."""
        if not name or len(name.encode()) > MOST_NAME or not name.isprintable():
            raise UserError(f"an adapter's name is 1 to {MOST_NAME} bytes of text, got {name!r}")
        highest = self._highest.get(name, 0)
        if version is not None and (type(version) is not int or not highest < version < 2**63):
            raise UserError(f"adapter {name!r} has had version {highest}; a new one is a greater int, got {version!r}")

    def _of(self, name: str) -> FleetAdapter:
        if (known := self.known.get(name)) is None:
            raise UserError(f"there is no adapter {name!r}; loaded: {', '.join(sorted(self.known)) or 'none'}")
        return known


def stamp_of(path: str) -> list[tuple[str, int, int, int]]:
    """Return name, size, time of change (ns) and inode of each file; empty where they are not to be seen from here."""
    found: list[tuple[str, int, int, int]] = []
    with suppress(OSError):  # it is being written, or on another host
        for file in sorted(Path(path).iterdir()):
            known = file.stat()
            found.append((file.name, known.st_size, known.st_mtime_ns, known.st_ino))
    return found
