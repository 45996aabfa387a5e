"""A fleet that another process owns: the client of its control API, and a `Fleet` over it."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from pydantic import TypeAdapter

from penstock.aio import cancelled, in_thread
from penstock.engine.capabilities import smallest_vocabulary
from penstock.engine.client import DataClient
from penstock.engine.control import ControlClient
from penstock.engine.vanilla import VanillaReplies
from penstock.errors import EngineDeadError, EngineError, PenstockError, StateError, UserError, error_from_json
from penstock.fleet.adapters import FleetAdapters
from penstock.fleet.calls import CallClient
from penstock.fleet.elastic import Elastic
from penstock.fleet.fan_out import FanOut
from penstock.fleet.fleet import Fleet, FleetControl, FleetSize
from penstock.fleet.launch import Terms
from penstock.fleet.member import Lifecycle, Member, State
from penstock.fleet.operations import Operations, check_version
from penstock.fleet.roster import Roster
from penstock.fleet.service import (
    OF_ADAPTERS,
    OF_ENGINES,
    OPERATIONS,
    PREFIX,
    QUIET_S,
    FleetState,
    MemberState,
    present,
    socket_of,
    state_of,
)
from penstock.parsing import reading
from penstock.router.admin_client import RouterAdmin
from penstock.settings import ServerSpec
from penstock.types import KV, AdapterStatus, UpdateReport
from penstock.weights.adapter_files import AdapterFiles
from penstock.weights.shared_memory import SharedMemoryStore

if TYPE_CHECKING:
    import torch

ANSWER_S = 10.0
"""Deadline of what is answered at once."""
CALL_S = 24 * 3600.0
"""Of a call that ends with an operation; each step of that has its own deadline in the other process."""

logger = logging.getLogger(__name__)
_REPORT = TypeAdapter(UpdateReport)
_ADAPTERS = TypeAdapter(dict[str, AdapterStatus])


class FleetClient(CallClient):
    """The control API of one fleet; every method raises as `CallClient.call`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, PREFIX, "the process that owns the fleet")

    @classmethod
    def to(cls, url: str) -> Self:
        """Return a client of the fleet behind the router at `url`. Raises UserError if it has no socket here."""
        path, known = socket_of(url), present()
        if path is None or path not in known.values():
            others = ", ".join(f"http://127.0.0.1:{port}" for port in sorted(known)) or "none"
            raise UserError(f"no process of yours on this machine owns a fleet at {url}; known here: {others}")
        return cls(path)

    async def state(self, seen: int = -1) -> FleetState:
        """Return the fleet's state, as soon as it is another than that of change `seen`, or after `QUIET_S`."""
        return state_of((await self.call("engines", deadline_s=QUIET_S + ANSWER_S, seen=seen))["state"])

    async def order(self, name: str, /, **arguments: Any) -> tuple[Any, FleetState]:
        """Make a call of `Operations` or `Elastic`; returns its result, and the state after it."""
        answer = await self.call(name, deadline_s=CALL_S, **arguments)
        with reading("answer of a fleet", EngineError):
            return answer["result"], state_of(answer["state"])

    async def stop(self) -> None:
        """End the fleet; it has ended when this returns."""
        await self.call("stop", deadline_s=CALL_S)


async def adopt(client: FleetClient, url: str, terms: Terms) -> Fleet:
    """Return a fleet over the one that `client` reaches; its engines run on after `teardown`.

    Args:
        client: of the fleet's owner; closed with the fleet.
        url: of its router.
        terms: of these calls; without `api_key` the fleet's own key is sent, which its owner gives.

    Raises:
        EngineDeadError: the owner is gone, or there is no engine; `DeadlineError`: it does not answer.
    """
    async with AsyncExitStack() as owned:
        owned.push_async_callback(client.close)
        state = await client.state()
        admin = RouterAdmin(url, state.admin_key)
        owned.push_async_callback(admin.close)
        roster = AdoptedRoster(admin, control_timeout_s=terms.control_timeout_s)
        owned.push_async_callback(roster.close)
        await roster.take(state)
        roster.raise_if_lost()
        store = SharedMemoryStore()
        owned.callback(store.close)
        control = RemoteControl(client, roster, store)
        data = DataClient(
            url,
            api_key=terms.api_key or state.admin_key,
            request_timeout_s=terms.request_timeout_s,
            vocab_size=smallest_vocabulary(member.info for member in state.members),
            stream_chunk_tokens=terms.fleet.stream_chunk_tokens,
        )
        data.http.back = roster.router_back
        data.kept = lambda: roster.kv_kept_versions
        data.http.suspect = control.probe_all
        data.unreported = VanillaReplies(roster.asked)
        owned.push_async_callback(data.close)
        follower = asyncio.create_task(roster.follow(client), name="follow-fleet")
        owned.push_async_callback(cancelled, follower)
        return Fleet(
            url,
            roster=roster,
            operations=cast("FleetControl", control),
            elastic=cast("FleetSize", control),
            data=data,
            owned=owned.pop_all(),
        )


class AdoptedRoster(Roster):
    """The members as the owner last reported them. The owner alone changes them, and updates the router."""

    def __init__(self, admin: RouterAdmin, *, control_timeout_s: float) -> None:
        super().__init__(admin)
        self.router_returns = True
        self.lost: str | None = None
        """Why the owner cannot be reached any more."""
        self._control_s = control_timeout_s
        self._change = -1
        self._log: str | None = None

    async def take(self, state: FleetState) -> None:
        """Put a state in force, unless a newer one is."""
        if state.change < self._change:
            return
        self._change, self._log = state.change, state.log
        known = {member.name: member for member in self.members}
        self.members = tuple(self._member(reported, known.get(reported.name)) for reported in state.members)
        self.version, self.highest_version, self.kv_kept_versions = state.version, state.used, frozenset(state.kept)
        self.announce()
        kept = {id(member.control) for member in self.members}
        for member in known.values():
            if id(member.control) not in kept:
                await member.control.close()

    async def follow(self, client: FleetClient) -> None:
        """Take every state that comes, until the owner is gone; calls under way fail then."""
        try:
            while True:
                await self.take(await client.state(self._change))
        except PenstockError as error:
            where = f"; its log is {self._log}" if self._log and not isinstance(error, StateError) else ""
            self.lost = f"{error}{where}"
        self.router_returns = False
        for member in self.members:
            if member.state is not State.STOPPED:
                member.lifecycle = Lifecycle.reported(member.name, State.DEAD, self.lost)
        self.announce()
        await client.close()

    async def close(self) -> None:
        """Close the connections to engines."""
        for member in self.members:
            await member.control.close()

    def _member(self, reported: MemberState, known: Member | None) -> Member:
        name, url, key = reported.name, reported.url, reported.api_key
        same = known is not None and (known.url, known.api_key) == (url, key)
        member = Member(
            name=name,
            url=url,
            control=known.control
            if known is not None and same
            else ControlClient(name, url, api_key=key, timeout_s=self._control_s),
            info=reported.info,
            lifecycle=Lifecycle.reported(name, reported.state, reported.reason),
            weight_version=reported.weight_version,
            api_key=key,
            gpus=reported.gpus,
            warning=reported.warning,
        )
        member.restarts = reported.is_restarting
        return member


def _report(result: Any) -> UpdateReport:
    with reading("report of an update", EngineError):
        return _REPORT.validate_python(result)


def _forwarded(kind: type, name: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return a method of `kind` that makes `call` with its arguments by their names."""
    signature = inspect.signature(getattr(kind, name))

    def forward(*args: Any, **options: Any) -> Awaitable[Any]:
        arguments = signature.bind(None, *args, **options).arguments
        return call(**{key: value for key, value in arguments.items() if key != "self"})

    return forward


class RemoteAdapters:
    """`FleetAdapters` of a fleet that another process owns; its other methods of `OF_ADAPTERS` are calls to the owner.

    Args:
        call: makes a call to the owner.
    """

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self._call = call

    async def update(
        self,
        name: str,
        tensors: Iterable[tuple[str, Any]],
        config: Mapping[str, Any],
        version: int | None = None,
        kv: KV = "recompute",
    ) -> UpdateReport:
        """Write the tensors here, and let the owner keep them."""
        files = await in_thread(lambda: AdapterFiles.of_tensors(tensors, config))
        try:
            given = {"name": name, "source": files.source, "version": version, "kv": kv}
            return _report(await self._call("adapter_update_from", **given))
        finally:
            files.close()

    async def load(self, name: str, path: str, timeout_s: float) -> UpdateReport | None:
        """See `FleetAdapters.load`."""
        result = await self._call("adapter_load", name=name, path=path, timeout_s=timeout_s)
        return None if result is None else _report(result)

    async def statuses(self) -> dict[str, AdapterStatus]:
        """See `FleetAdapters.statuses`."""
        with reading("adapters of a fleet", EngineError):
            return _ADAPTERS.validate_python(await self._call("adapter_statuses"))

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if name not in OF_ADAPTERS:
            raise AttributeError(name)
        return _forwarded(FleetAdapters, name, partial(self._call, f"adapter_{name}"))


class RemoteControl:
    """`Operations` and `Elastic` of a fleet that another process owns.

    Every method of theirs in `OPERATIONS` and `OF_ENGINES` is a call to the owner, with the arguments by their names.
    It ends with the operation, whose steps have deadlines, or when the owner is gone or hangs.
    """

    def __init__(self, client: FleetClient, roster: AdoptedRoster, store: SharedMemoryStore) -> None:
        self._client = client
        self._roster = roster
        self._store = store
        self.adapters = RemoteAdapters(self._call)
        self._update: asyncio.Task[UpdateReport] | None = None
        self._probing: asyncio.Task[Any] | None = None
        self._closed = False

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        kind = Operations if name in OPERATIONS else Elastic
        if kind is Elastic and name not in OF_ENGINES:
            raise AttributeError(name)
        return _forwarded(kind, name, partial(self._call, name))

    async def collective_rpc(self, *args: Any) -> FanOut[list[Any]]:
        """See `Operations.collective_rpc`."""
        outcome = await self.__getattr__("collective_rpc")(*args)
        failures = {name: error_from_json(error) for name, error in outcome["failures"].items()}
        return FanOut(outcome["results"], failures)

    async def probe_all(self) -> None:
        """Have every engine asked whether it is well, after a request has seen one die (`Supervisor.probe_all`)."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._call("probe_all"), name="remote-probe")
        with suppress(PenstockError):  # `follow` handles an owner that is gone
            await asyncio.shield(self._probing)

    async def attach(self, servers: Sequence[ServerSpec]) -> tuple[str, ...]:
        """See `Elastic.attach`."""
        names = tuple(await self._call("attach", servers=[spec.model_dump() for spec in servers]))
        for member in self._roster.members:
            if member.name in names and member.warning:
                logger.warning(member.warning)
        return names

    async def update(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int | None, *, kv: KV = "recompute"
    ) -> UpdateReport:
        """Publish here, and let the engines map it. Once begun, it runs to its end even if this call is cancelled.

        The owner keeps the memory, for engines that return after this process has ended.
        """
        self._check_open()  # a lost owner may only stand still, and its engines may read what would be written
        if self._update is not None and not self._update.done():
            raise StateError("a weight update is under way; await it before the next one")
        number = self._roster.highest_version + 1 if version is None else version
        check_version(number, self._roster)
        self._update = asyncio.create_task(self._publish_and_apply(named_tensors, number, kv), name="remote-update")
        return await asyncio.shield(self._update)

    async def close(self) -> None:
        """Let no further call begin, and wait for an update under way: it reads what is ours."""
        self._closed = True
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.wait((self._probing,))
        if self._update is not None:
            await asyncio.wait((self._update,))

    async def _publish_and_apply(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int, kv: KV
    ) -> UpdateReport:
        began = time.monotonic()
        manifest = await in_thread(lambda: self._store.publish(version, named_tensors))
        published = time.monotonic() - began
        try:
            result = await self._call("update", manifest=manifest.to_json(), kv=kv)
        finally:
            if self._roster.version == version:
                self._store.commit(manifest)  # these bytes stay until the one after the next
        report = _report(result)
        longer = {name: published + report.seconds[name] for name in ("publish", "total")}
        return replace(report, seconds={**report.seconds, **longer})

    async def _call(self, call: str, /, **arguments: Any) -> Any:
        self._check_open()
        try:
            result, state = await self._client.order(call, **arguments)
        except EngineDeadError as error:
            if self._roster.lost is not None:
                raise EngineDeadError(self._roster.lost) from error
            raise
        await self._roster.take(state)
        return result

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("this fleet was torn down")
        if self._roster.lost is not None:
            raise EngineDeadError(self._roster.lost)
