"""LoRA adapters of a fleet: the same versions on every engine, and pauses of a single adapter."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from penstock.aio import in_thread
from penstock.checks import reading
from penstock.control_types import KV, UpdateReport
from penstock.engine.capabilities import Capability
from penstock.engine.control import ControlClient
from penstock.engine.lacking import require
from penstock.engine.verbs import IN_FLIGHT, AdapterLoad, verbs_of
from penstock.errors import DeadlineError, EngineHTTPError, StateError, UserError, WeightsError
from penstock.fleet.member import Member, ask, fan_out
from penstock.fleet.pausing import command, seconds
from penstock.fleet.roster import OperationQueue, Roster
from penstock.fleet.stores import is_local, tensors_in_thread
from penstock.fleet.update import check_kv
from penstock.settings import FleetConfig
from penstock.weights.adapter_files import AdapterFiles

T = TypeVar("T")

MARGIN_S = 2.0
"""Seconds beyond the engine's own deadline, so that its message arrives."""
MOST_NAME = 256
"""Most bytes of a name, the limit of a router's header."""


@dataclass(slots=True)
class FleetAdapter:
    """The version and files that engines have under one name."""

    version: int
    files: AdapterFiles
    pinned: bool = False
    """Whether eviction skips it."""
    resumed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set unless the adapter is paused."""


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """A LoRA adapter of a fleet."""

    version: int
    """Its own version: 1, 2, ..."""
    nbytes: int
    """Bytes of its tensors; 0: unknown."""
    in_flight: int
    """Its requests now in engines."""
    idle_s: float
    """Seconds since its last request came."""
    pinned: bool
    """Whether eviction skips it."""
    paused: bool
    engines: int
    """Engines that have it."""


class FleetAdapters:
    """The adapters of a fleet's engines, by name. Changes of engines run in the queue of operations.

    `fleet.max_adapters` names are kept; one more evicts the least recently used. `timeout_s`: of a control call.
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
        """The loaded adapters by name."""
        self._highest: dict[str, int] = {}
        """Last version of every name, also of unloaded ones: KV of an older version must not be found again."""
        self._order = WeakValueDictionary[str, asyncio.Lock]()
        """A lock for each name, so that its versions come into force in the order of their calls."""
        self._saved: dict[str, tuple[str, int]] = {}
        """For a name loaded from a path, the path with the files' stamp, and the version that they became."""

    async def update(
        self,
        name: str,
        tensors: Iterable[tuple[str, Any]],
        config: Mapping[str, Any],
        version: int | None = None,
        kv: KV = "recompute",
    ) -> UpdateReport:
        """Put a version in force on every engine; see `Fleet.update_adapter`.

        Raises:
            WeightsError: every engine refused it; the previous version stays in force.
            StateError: `max_adapters` is reached, and no adapter can be evicted for a new name.
            EngineDeadError: no engine is left.
        """
        self._check(name, version)
        check_kv(kv)
        began, shared = time.perf_counter(), self._shared_folder()
        async with self._in_order(name):
            files = await tensors_in_thread(
                lambda: AdapterFiles.of_tensors(tensors, config, shared=shared), f"adapter {name!r}"
            )
            return await self._update(name, files, version, kv, time.perf_counter() - began)

    async def update_from(
        self, name: str, source: Mapping[str, Any], version: int | None = None, kv: KV = "recompute"
    ) -> UpdateReport:
        """Put a version in force that another process of this user wrote and that may end."""
        self._check(name, version)
        check_kv(kv)
        async with self._in_order(name):
            return await self._update(name, AdapterFiles.adopt(source), version, kv, 0.0)

    async def load(self, name: str, path: str, timeout_s: float, *, fixed: bool = False) -> UpdateReport | None:
        """Load an adapter from a path if it changed; `fixed`: see `of_folder`.

        Returns:
            The report, or None if it is unchanged and visible here; engines that lost it have it again.
        """
        self._check(name, None)
        if not seconds(timeout_s):
            raise UserError("timeout_s is 0: no engine can load an adapter in that; leave it out for the default")
        async with self._in_order(name):
            with reading("path of an adapter"):
                stamp = stamp_of(path)
            known, saved = self.known.get(name), f"{path}\n{stamp}"
            same = stamp and known is not None and self._saved.get(name) == (saved, known.version)
            if same and await self._turn("load_adapter", lambda: self._bring_to_all(name, known)):
                return None
            files = await in_thread(lambda: AdapterFiles.of_folder(path, fixed=fixed))
            async with self._read_ahead(name, files, timeout_s) as read:
                report = await self._turn("load_adapter", lambda: self._put(name, read.pop(), None, timeout_s))
            self._saved[name] = saved, report.version
            return report

    async def unload(self, name: str) -> None:
        """Forget an adapter on every engine. StateError: it has requests in flight."""
        await self._turn("unload_adapter", lambda: self._unload(name))

    async def pause(self, name: str, *, again: bool = False) -> None:
        """Stop the adapter's requests at a token on every engine; new ones wait too.

        Raises:
            StateError: it is already paused, and `again` is False.
        """
        await self._set_paused(name, paused=True, again=again)

    async def resume(self, name: str, *, again: bool = False) -> None:
        """Continue the adapter's requests. StateError: it is not paused, and not `again`."""
        await self._set_paused(name, paused=False, again=again)

    async def wait(self, name: str, timeout_s: float) -> None:
        """Wait until an adapter is not paused. DeadlineError: `timeout_s` seconds passed."""
        seconds(timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await self._of(name).resumed.wait()
        except TimeoutError:
            raise DeadlineError(f"adapter {name!r} is still paused after {timeout_s:g} s", seconds=timeout_s) from None

    async def pin(self, name: str, *, pinned: bool) -> None:
        """Protect an adapter from eviction, or end that."""
        self._of(name).pinned = pinned

    async def statuses(self) -> dict[str, AdapterStatus]:
        """Return every adapter's version and requests over all engines, by name."""
        served = await self._served()
        return {name: self._status(name, served) for name in self.known}

    async def status(self, name: str) -> AdapterStatus:
        """Return one adapter's version and requests. UserError: the name is unknown."""
        self._of(name)
        return (await self.statuses())[name]

    async def give(self, member: Member) -> None:
        """Load every adapter's version on a joining engine, before it serves.

        Raises:
            EngineError: it failed, so it must not serve.
        """
        for name, known in self.known.items():
            # An earlier owner may have given it other tensors under the same version.
            await self._bring(member, name, known, trusted=False)

    def close(self) -> None:
        for known in self.known.values():
            known.files.close()
        self.known.clear()

    async def _set_paused(self, name: str, *, paused: bool, again: bool) -> None:
        async def call(engine: ControlClient) -> None:
            calls = verbs_of(engine).adapters
            await (calls.pause(name) if paused else calls.resume(name))

        async def work() -> None:
            known = self._of(name)
            if known.resumed.is_set() is not paused:
                if not again:
                    wrong = "already paused; resume it first" if paused else "not paused; pause it first"
                    raise StateError(f"adapter {name!r} is {wrong}")
                return
            await command(self._roster, call, what=f"{what} of adapter {name!r}", deadline_s=self._timeout_s)
            if paused:
                known.resumed.clear()  # joining engines pause it from now on
            else:
                known.resumed.set()

        what = "pause" if paused else "resume"
        await self._turn(f"{what}_generation(adapter=...)", work, "plugin")

    async def _served(self) -> list[Mapping[str, AdapterLoad]]:
        """Return each engine's adapters, without engines that fail."""
        asked = await fan_out(
            self._roster.live(), lambda engine: verbs_of(engine).adapters.served(), deadline_s=self._timeout_s
        )
        return list(asked.results.values())

    async def _bring_to_all(self, name: str, known: FleetAdapter | None) -> bool:
        """Return False if it was unloaded or evicted before this turn."""
        if known is None or self.known.get(name) is not known:
            return False
        for member in self._roster.live():
            await self._bring(member, name, known)
        return True

    async def _bring(self, member: Member, name: str, known: FleetAdapter, *, trusted: bool = True) -> None:
        async def load(engine: ControlClient) -> None:
            calls = verbs_of(engine).adapters
            if not known.resumed.is_set():
                await calls.pause(name)
            served = (await calls.served()).get(name)
            if not trusted or served is None or served.version != known.version:
                await calls.load(name, known.version, known.files.source, timeout_s=self._timeout_s)

        await ask(member, load, deadline_s=3 * self._timeout_s)

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
        """Let engines read a version before its turn, so that no operation waits for it.

        An engine that cannot read it reports that when it loads it. Files left in the list are freed.
        """
        read = [files]
        try:
            await fan_out(
                self._roster.live(),
                lambda engine: verbs_of(engine).adapters.read(name, files.source, timeout_s=timeout_s),
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
        """Put a version in force; free its files when superseded, or now if it is refused."""
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
                versions = [loads[name].version or 0 for loads in await self._served() if name in loads]
                self._highest[name] = max(versions, default=0)  # an earlier owner of these engines may have given some
                self._check(name, version)
            number = self._highest[name] + 1 if version is None else version
            outcome = await command(
                self._roster,
                lambda engine: verbs_of(engine).adapters.load(name, number, files.source, timeout_s=timeout_s, kv=kv),
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
        outcome = await fan_out(
            members, lambda engine: verbs_of(engine).adapters.unload(name), deadline_s=self._timeout_s
        )
        errors = outcome.failures.values()
        if refused := [e for e in errors if isinstance(e, EngineHTTPError) and e.status == IN_FLIGHT]:
            for member in members:  # new requests came in between
                if member.name in outcome.results:
                    await self._bring(member, name, known)
            raise StateError(str(refused[0])) from refused[0]
        for member in members:
            if (error := outcome.failures.get(member.name)) is not None:
                await self._roster.mark_dead(member, f"unloading adapter {name!r} failed: {error}")
        del self.known[name]
        self._saved.pop(name, None)
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
            with suppress(StateError):  # a request came for it: try another
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

    def _shared_folder(self) -> Path | None:
        """Return the folder that all engines see; None if shared memory is enough.

        WeightsError: they need a folder, and none is set.
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

    def _check(self, name: Any, version: int | None) -> None:
        """Raise UserError for an invalid name or version."""
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name.encode()) <= MOST_NAME:
            raise UserError(f"an adapter's name is 1 to {MOST_NAME} bytes of text, got {name!r}")
        highest = self._highest.get(name, 0)
        if version is not None and (type(version) is not int or not highest < version < 2**63):
            raise UserError(f"adapter {name!r} has had version {highest}; a new one is a greater int, got {version!r}")

    def _of(self, name: Any) -> FleetAdapter:
        if not isinstance(name, str) or (known := self.known.get(name)) is None:
            raise UserError(f"there is no adapter {name!r}; loaded: {', '.join(sorted(self.known)) or 'none'}")
        return known


def stamp_of(path: str) -> list[tuple[str, int, int, int]]:
    """Return each file's name, size, mtime (ns) and inode; empty if invisible here."""
    found: list[tuple[str, int, int, int]] = []
    with suppress(OSError):  # the folder is being written, or is on another host
        for file in sorted(Path(path).iterdir()):
            known = file.stat()
            found.append((file.name, known.st_size, known.st_mtime_ns, known.st_ino))
    return found
