"""`Fleet.connect`: a fleet of another process, through its control API, or a fleet of running servers."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, get_type_hints

from pydantic import TypeAdapter

from penstock.aio import cancelled
from penstock.checks import reading
from penstock.control_types import KV, PauseMode, UpdateReport
from penstock.engine.vanilla import VanillaReplies
from penstock.errors import ConfigError, EngineDeadError, EngineError, PenstockError, StateError, UserError
from penstock.fleet.adapters import FleetAdapters
from penstock.fleet.attach import AttachedServers, asked, specs_of
from penstock.fleet.calls import CallClient
from penstock.fleet.elastic import Elastic
from penstock.fleet.fleet import Fleet
from penstock.fleet.launch import LogFolder, PendingFleet, Terms, assemble, data_client, reachable
from penstock.fleet.lifecycle import Change, Lifecycle, State
from penstock.fleet.member import Member
from penstock.fleet.native import NativeCalls
from penstock.fleet.pausing import AllOperations
from penstock.fleet.roster import Roster
from penstock.fleet.router_process import check_router, open_router
from penstock.fleet.service import (
    CALLS,
    FOLDER_ENV,
    PREFIX,
    QUIET_S,
    FleetState,
    MemberState,
    present,
    refuse_second,
    router_address,
    socket_of,
    state_of,
)
from penstock.fleet.stores import tensors_in_thread
from penstock.fleet.update import check_version
from penstock.guard import new_key
from penstock.http import UnreachableError
from penstock.options import check_key, refuse_unknown, section
from penstock.router.state import RouterAdmin
from penstock.router_settings import RouterConfig
from penstock.settings import FleetConfig, ServerSpec
from penstock.weights.adapter_files import AdapterFiles
from penstock.weights.shared_memory import SharedMemoryStore

if TYPE_CHECKING:
    import torch

    from penstock.weights.manifest import WeightManifest

ANSWER_S = 10.0
"""Deadline of calls that the owner answers at once."""


class FleetClient(CallClient):
    """Client of one fleet's control API; every method raises as `CallClient.call`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, PREFIX, "the process that owns the fleet")

    @classmethod
    def to(cls, url: str | None) -> Self:
        """Return a client of the fleet behind the router at `url`; None: of the only one.

        UserError: it has no socket here, or `url` is None and there are several fleets.
        """
        known = present()
        path = socket_of(url) if url is not None else next(iter(known.values()), None)
        urls = ", ".join(f"http://127.0.0.1:{port}" for port in sorted(known)) or "none"
        if url is None and len(known) > 1:
            how = "`penstock status URL`, `penstock fleet ... --url URL`"
            raise UserError(f"several fleets are here: {urls}; give the address of one ({how})")
        if path is None or path not in known.values():
            raise UserError(
                f"no process of yours on this machine owns a fleet{f' at {url}' if url else ''}; known here: {urls} "
                f"(where `penstock serve` was given {FOLDER_ENV}, give it here too)"
            )
        return cls(path)

    async def state(self, seen: int = -1) -> FleetState:
        """Return the state once it differs from that of change `seen`, or after `QUIET_S`."""
        return state_of(await self.call("state", deadline_s=QUIET_S + ANSWER_S, seen=seen))


async def adopt(client: FleetClient, url: str, terms: Terms) -> Fleet:
    """Return a fleet over the one at `client`; `teardown` closes `client` alone.

    Without `api_key` in `terms`, requests carry the key that the owner gives.

    Raises:
        EngineDeadError: the owner is gone, or there is no engine; `DeadlineError`: it does not answer.
    """
    async with AsyncExitStack() as owned:
        owned.push_async_callback(client.close)
        state = await client.state()
        admin = RouterAdmin(url, state.admin_key)
        owned.push_async_callback(admin.close)
        roster = AdoptedRoster(admin, client)
        await roster.take(state)
        roster.raise_if_lost()
        store = SharedMemoryStore()
        owned.callback(store.close)
        elastic = Remote(Elastic, roster.call)
        data = data_client(url, terms.api_key or state.admin_key, roster, owned, terms)
        data.unreported = VanillaReplies(partial(asked, roster))
        follower = asyncio.create_task(roster.follow(client), name="follow-fleet")
        owned.push_async_callback(cancelled, follower)
        operations: Any = RemoteOperations(roster, store)
        return Fleet(url, roster, operations, elastic, data, owned.pop_all())


class AdoptedRoster(Roster):
    """The members as the owner last reported them. Only the owner changes them and updates the router."""

    def __init__(self, admin: RouterAdmin, client: FleetClient) -> None:
        super().__init__(admin)
        self.client = client
        self.router_returns = True
        self.lost: str | None = None
        """Reason why the owner can no longer be reached; None: it can."""
        self._change = -1

    async def take(self, state: FleetState) -> None:
        """Put a state in force, unless a newer one is in force."""
        if state.change < self._change:
            return
        self._change = state.change
        self.members = tuple(map(_member, state.members))
        self.version, self.highest_version, self.kv_kept_versions = state.version, state.used, frozenset(state.kept)
        self.notify_all()

    def check_reachable(self) -> None:
        """Raise if the fleet was torn down here, or its owner is lost."""
        if self.ended:
            raise StateError("this fleet was torn down")
        if self.lost is not None:
            raise EngineDeadError(self.lost)

    async def call(self, name: str, /, **arguments: Any) -> Any:
        """Run a call at the owner, and take over the state after it."""
        self.check_reachable()
        try:
            result = await self.client.call(name, **arguments)
            await self.take(await self.client.state())
        except EngineDeadError as error:
            raise EngineDeadError(self.lost or str(error)) from error
        return result

    async def follow(self, client: FleetClient) -> None:
        """Take over every state until the owner is gone; calls under way then fail."""
        try:
            while True:
                await self.take(await client.state(self._change))
        except PenstockError as error:
            self.lost = str(error)
        self.router_returns = False
        for member in self.members:
            if member.state is not State.STOPPED:
                member.lifecycle = _life(member.name, State.DEAD, self.lost)
        self.notify_all()
        await client.close()


def _life(engine: str, state: State, reason: str) -> Lifecycle:
    """Return a lifecycle in a state that the owner reported."""
    life = Lifecycle(engine)
    life.state, life.reason = state, reason
    life.history.append(Change(state, state, reason))
    return life


def _member(reported: MemberState) -> Member:
    life = _life(reported.name, reported.state, reported.reason)
    life.restarts = reported.is_restarting
    nobody: Any = None  # only the owner calls its engines
    return Member(
        reported.name, reported.url, nobody, reported.info, life, reported.weight_version,
        api_key=reported.api_key, gpus=reported.gpus,
    )  # fmt: skip


@cache
def _signature(method: Callable[..., Any]) -> tuple[inspect.Signature, TypeAdapter[Any]]:
    return inspect.signature(method), TypeAdapter(get_type_hints(method)["return"])


class Remote:
    """The owner's object of a `kind` in `CALLS`: each method is a call with arguments by name."""

    def __init__(self, kind: type, call: Callable[..., Awaitable[Any]]) -> None:
        self._kind = kind
        self._call = call
        self._prefix, self._names = CALLS[kind]

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if name not in self._names:
            raise AttributeError(name)

        async def forward(*args: Any, **options: Any) -> Any:
            signature, result = _signature(getattr(self._kind, name))
            arguments = signature.bind(None, *args, **options).arguments
            del arguments["self"]
            answer = await self._call(f"{self._prefix}{name}", **arguments)
            with reading(f"answer of a fleet to {name}", EngineError):
                return result.validate_python(answer)

        return forward


class RemoteAdapters(Remote):
    """`FleetAdapters` of a fleet that another process owns."""

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        super().__init__(FleetAdapters, call)

    async def update(
        self,
        name: str,
        tensors: Iterable[tuple[str, Any]],
        config: Mapping[str, Any],
        version: int | None = None,
        kv: KV = "recompute",
    ) -> UpdateReport:
        files = await tensors_in_thread(lambda: AdapterFiles.of_tensors(tensors, config), f"adapter {name!r}")
        try:
            return await self.update_from(name, files.source, version, kv)
        finally:
            files.close()


class RemoteOperations(Remote):
    """`Operations` of a fleet that another process owns."""

    def __init__(self, roster: AdoptedRoster, store: SharedMemoryStore) -> None:
        super().__init__(AllOperations, roster.call)
        self._roster = roster
        self._store = store
        self.adapters = RemoteAdapters(roster.call)
        self.native = Remote(NativeCalls, roster.call)
        self._update: asyncio.Task[UpdateReport] | None = None
        self._publishing: asyncio.Task[WeightManifest] | None = None
        """The part of `_update` that runs the caller's code."""
        self._undoing: asyncio.Task[None] | None = None

    async def pause(self, mode: PauseMode | str, *, clear_cache: bool, timeout_s: float | None = None) -> None:
        """Pause at the owner. If the caller is cancelled, resume as soon as the pause is in force."""
        call = self._roster.call("pause", mode=mode, clear_cache=clear_cache, timeout_s=timeout_s)
        pausing = asyncio.create_task(call, name="remote-pause")
        try:
            await asyncio.shield(pausing)
        except asyncio.CancelledError:
            self._undoing = asyncio.create_task(self._undo(pausing), name="undo-remote-pause")
            raise

    async def _undo(self, pausing: asyncio.Task[Any]) -> None:
        with suppress(PenstockError):  # the pause failed, or the owner is gone
            await pausing
            await self._roster.client.call("resume")  # also while the fleet is torn down here

    async def update(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int | None, *, kv: KV = "recompute"
    ) -> UpdateReport:
        """Publish for engines to map; the owner keeps the memory. Once published, it completes."""
        self._roster.check_reachable()  # a lost owner may only hang, and its engines read this memory
        if self._update is not None and not self._update.done():
            raise StateError("a weight update is under way; await it before the next one")
        number = self._roster.highest_version + 1 if version is None else version
        check_version(self._roster, number)
        publish = tensors_in_thread(lambda: self._store.publish(number, named_tensors), f"weight version {number}")
        self._publishing = asyncio.create_task(publish, name="publish")
        self._update = asyncio.create_task(self._apply(self._publishing, number, kv), name="remote-update")
        return await asyncio.shield(self._update)

    async def close(self) -> None:
        """Wait for an update under way, since it reads our memory, and a while for the undoing of a pause.

        An update whose tensors have not all come ends here.
        """
        if self._update is not None and self._publishing is not None:
            self._publishing.cancel()
            await asyncio.wait((self._update,))
        if self._undoing is not None:
            await asyncio.wait((self._undoing,), timeout=ANSWER_S)

    async def _apply(self, publishing: asyncio.Task[WeightManifest], version: int, kv: KV) -> UpdateReport:
        began = time.monotonic()
        await asyncio.wait((publishing,))
        if publishing.cancelled():
            raise StateError("this fleet was torn down in the middle of the operation")
        manifest = publishing.result()
        published = time.monotonic() - began
        try:
            report: UpdateReport = await self.update_from(manifest.to_json(), kv=kv)
        finally:
            if self._roster.version == version:
                self._store.commit(manifest)  # these bytes stay until the update after the next
        longer = {name: published + report.seconds[name] for name in ("publish", "total")}
        return replace(report, seconds={**report.seconds, **longer})


# --- Fleet.connect ---------------------------------------------------------------------------------------------------

OF_A_CLIENT = frozenset({"stream_chunk_tokens"})
"""Options of `FleetConfig` that each client chooses; the owner chooses the others."""
OF_STARTS = frozenset({"engines", "attach", "launcher", "stop_timeout_s"}) | {
    name for name in FleetConfig.model_fields if name.startswith("ray_")
}
"""Options that only affect the start of engines."""


def connect(
    target: str | Sequence[str | ServerSpec],
    options: Mapping[str, Any],
    *,
    api_key: str | None = None,
    control_timeout_s: float = 60.0,
    request_timeout_s: float = 3600.0,
) -> PendingFleet:
    """Prepare the fleet that `Fleet.connect` describes."""
    owned = isinstance(target, str)
    refuse_unknown(options, FleetConfig, *(() if owned else (RouterConfig,)))
    check_key(api_key)
    if others := sorted(options.keys() - OF_A_CLIENT) if owned else []:
        raise ConfigError(
            f"the process that owns the fleet at {target} has chosen {', '.join(others)} already; leave these out, or "
            "give them where the fleet is started"
        )
    if idle := sorted(OF_STARTS & options.keys()):
        raise ConfigError(
            f"{', '.join(idle)} would have no effect: connect takes the engines that are there and starts none; leave "
            "it out, or call Fleet.launch, which starts engines and attaches others"
        )
    terms = Terms(section(FleetConfig, None, options), api_key, control_timeout_s, request_timeout_s)
    if isinstance(target, str):
        url = router_address(target)
        return PendingFleet(lambda: _adopted(url, terms))
    router = section(RouterConfig, None, options)
    check_router(router, api_key)
    specs = specs_of(target)
    return PendingFleet(lambda: _of_servers(specs, router, terms))


async def _adopted(url: str, terms: Terms) -> Fleet:
    path = socket_of(url)
    if path is not None and await asyncio.to_thread(path.exists):
        with suppress(UnreachableError):  # the owner died and left its socket behind
            return await adopt(FleetClient(path), url, terms)
    raise EngineDeadError(
        f"no process of yours on this machine owns a fleet at {url}. Give the addresses of its engines as a list, with "
        "router.url for that router, to own them; call Fleet.connect as the user who owns the fleet, on the router's "
        "machine; or use an OpenAI client"
    )


async def _of_servers(specs: Sequence[ServerSpec], config: RouterConfig, terms: Terms) -> Fleet:
    """Make a fleet of the servers that answer; too few of them are an error."""
    refuse_second(config.known_url)
    async with AsyncExitStack() as owned:
        logs = LogFolder(terms.fleet.log_dir, owned)
        router = await open_router(config, log_dir=logs.path, api_key=terms.api_key, owned=owned, admin_key=new_key())
        attached = AttachedServers(api_key=terms.api_key, control_timeout_s=terms.control_timeout_s)
        owned.push_async_callback(attached.close)
        joined = await asyncio.gather(
            *(attached.join(Lifecycle(f"e{i}"), spec) for i, spec in enumerate(specs)), return_exceptions=True
        )
        members = [outcome for outcome in joined if isinstance(outcome, Member)]
        failures = [outcome for outcome in joined if isinstance(outcome, BaseException)]
        unexpected = [error for error in failures if not isinstance(error, PenstockError)]
        if unexpected or (failures and len(members) < terms.fleet.min_engines):
            raise (unexpected or failures)[0]
        return await reachable(await assemble(router, members, owned, terms, attached=attached))
