"""The other end of a fleet's control socket: calls to the process that holds the fleet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import aiohttp

from penstock.config import ServerSpec
from penstock.engine.capabilities import smallest_vocabulary
from penstock.engine.client import STREAM_CHUNK_TOKENS, DataClient, cancelled, in_thread
from penstock.engine.control import ControlClient
from penstock.engine.vanilla.replies import VanillaReplies
from penstock.errors import DeadlineError, EngineDeadError, EngineError, PenstockError, StateError, UserError
from penstock.fleet.fan_out import FanOut
from penstock.fleet.fleet import Fleet
from penstock.fleet.member import Lifecycle, Member, State
from penstock.fleet.operations import check_version
from penstock.fleet.roster import Roster
from penstock.fleet.service import (
    SILENCE_S,
    FleetState,
    Keys,
    MemberState,
    error_of,
    fan_out_of,
    keys_of,
    present,
    report_of,
    socket_of,
    state_of,
)
from penstock.http import as_json
from penstock.parsing import parse_json, reading
from penstock.router.admin_client import RouterAdmin
from penstock.types import KV, PauseMode, UpdateReport
from penstock.weights.shared_memory import SharedMemoryStore

if TYPE_CHECKING:
    import torch

ANSWER_S = 10.0
"""Deadline of what is answered at once."""
FOREVER_S = 24 * 3600.0
"""Of a call that ends with the operation it asks for; each step of that has its deadline in the other process, which is
asked meanwhile whether it lives."""


class LinkGoneError(EngineDeadError):
    """The process that holds the fleet is gone."""


class Link:
    """Calls over one socket.

    Every method raises `EngineDeadError` where the process that holds the fleet is gone, `DeadlineError` where it does
    not answer, and what the call itself raised there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._session: aiohttp.ClientSession | None = None

    @classmethod
    def to(cls, url: str) -> Self:
        """To the fleet behind the router at `url`. Raises UserError where it has no control socket here."""
        path, known = socket_of(url), present()
        if path is None or path not in known.values():
            others = ", ".join(f"http://127.0.0.1:{port}" for port in sorted(known)) or "none"
            raise UserError(f"no fleet of yours is held at {url} by a process of this machine; known here: {others}")
        return cls(path)

    async def state(self, seen: int = -1) -> FleetState:
        """The fleet's state, as soon as it is another than that of change `seen`, or after `SILENCE_S` seconds."""
        answer = await self._request("GET", f"/fleet?seen={seen}", None, SILENCE_S + ANSWER_S)
        return state_of(answer["state"])

    async def keys(self) -> Keys:
        """The keys of the fleet's router and engines."""
        return keys_of((await self._request("GET", "/fleet/keys", None, ANSWER_S))["result"])

    async def call(self, name: str, **arguments: Any) -> tuple[Any, FleetState]:
        """Make a call (see `Endpoint`); returns its result, and the state after it."""
        answer = await self._while_alive(self._request("POST", f"/fleet/{name}", arguments, FOREVER_S))
        return answer["result"], state_of(answer["state"])

    async def stop(self) -> None:
        """End the fleet; it has ended when this returns."""
        await self._while_alive(self._request("POST", "/fleet/stop", {}, FOREVER_S))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _while_alive(self, call: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        """The answer to a call, or `DeadlineError` as soon as the other process answers nothing any more."""
        asked = asyncio.create_task(call)
        silent = asyncio.create_task(self._until_silent())
        try:
            await asyncio.wait((asked, silent), return_when=asyncio.FIRST_COMPLETED)
            return await (asked if asked.done() else silent)
        finally:
            for task in (asked, silent):
                task.cancel()
            await asyncio.wait((asked, silent))

    async def _until_silent(self) -> dict[str, Any]:
        change = -1
        while True:
            try:
                change = (await self.state(change)).change
            except DeadlineError:
                raise
            except PenstockError:  # it is gone or was stopped: the call that is under way ends too, and says how
                await asyncio.Event().wait()

    async def _request(self, method: str, path: str, body: dict[str, Any] | None, deadline_s: float) -> dict[str, Any]:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(self._path), limit=0))
        data = None if body is None else as_json(path, body)
        timeout = aiohttp.ClientTimeout(total=deadline_s, sock_connect=ANSWER_S)
        try:
            async with self._session.request(method, "http://fleet" + path, data=data, timeout=timeout) as response:
                answer: Any = parse_json(await response.read(), f"the answer of {self._path}", EngineError)
        except TimeoutError as error:
            raise DeadlineError(
                f"the process that holds the fleet did not answer within {deadline_s:g} s", seconds=deadline_s
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise LinkGoneError(f"the process that holds the fleet is gone: nobody answers at {self._path}") from error
        with reading(f"answer of {self._path}, which is not a fleet's", EngineError):
            if "error" not in answer:
                return {"result": answer.get("result"), "state": answer["state"]}
            error = error_of(answer["error"])
        raise error


async def adopt(
    link: Link,
    url: str,
    *,
    api_key: str | None,
    control_timeout_s: float,
    request_timeout_s: float,
    stream_chunk_tokens: int = STREAM_CHUNK_TOKENS,
) -> Fleet:
    """A fleet over the one that `link` leads to; its engines run on after `teardown`.

    Args:
        link: to the process that holds it; closed with the fleet.
        url: of its router.
        api_key: what the router asks of clients; None: the fleet's own key is sent, which its holder tells.
        control_timeout_s: deadline of what engines are asked directly.
        request_timeout_s: deadline of a generation request.
        stream_chunk_tokens: see `FleetConfig`, of what this client asks.

    Raises:
        EngineDeadError: the process is gone, or there is no engine; `DeadlineError`: it does not answer.
    """
    async with AsyncExitStack() as owned:
        owned.push_async_callback(link.close)
        state = await link.state()
        key = (await link.keys()).admin
        admin = RouterAdmin(url, key)
        owned.push_async_callback(admin.close)
        roster = AdoptedRoster(admin, link, control_timeout_s=control_timeout_s)
        owned.push_async_callback(roster.close)
        await roster.take(state)
        roster.check_hope()
        store = SharedMemoryStore()
        owned.callback(store.close)
        orders = RemoteOrders(link, roster, store)
        data = DataClient(
            url,
            api_key=api_key or key,
            request_timeout_s=request_timeout_s,
            vocab_size=smallest_vocabulary(member.info for member in state.members),
            stream_chunk_tokens=stream_chunk_tokens,
        )
        data.http.back = roster.router_back
        data.kept = lambda: roster.kept
        data.http.suspect = orders.look
        data.state.unreported = VanillaReplies(roster.asked)
        owned.push_async_callback(data.close)
        follower = asyncio.create_task(roster.follow(link, state.change), name="follow-fleet")
        owned.push_async_callback(cancelled, follower)
        return Fleet(url, roster=roster, operations=orders, elastic=orders, data=data, owned=owned.pop_all())


class AdoptedRoster(Roster):
    """The members as the process that holds the fleet last told them. It alone changes them, and tells the router."""

    def __init__(self, admin: RouterAdmin, link: Link, *, control_timeout_s: float) -> None:
        super().__init__(admin)
        self.router_returns = True
        self.lost: str | None = None
        """Why the process that holds the fleet is not heard any more."""
        self._link = link
        self._keys: Mapping[str, str] = {}
        self._control_s = control_timeout_s
        self._change = -1

    async def take(self, state: FleetState) -> None:
        """The state is this now, unless a newer one was told already."""
        known = {(member.name, member.url) for member in self.members}
        if any((told.name, told.url) not in known for told in state.members):
            self._keys = (await self._link.keys()).engines  # before the look at the number, as others come meanwhile
        if state.change < self._change:
            return
        self._change = state.change
        known = {member.name: member for member in self.members}
        self.members = tuple(self._member(told, known.get(told.name)) for told in state.members)
        self.version, self.used, self.kept = state.version, state.used, frozenset(state.kept)
        self.announce()
        kept = {id(member.control) for member in self.members}
        for member in known.values():
            if id(member.control) not in kept:
                await member.control.close()

    async def follow(self, link: Link, change: int) -> None:
        """Take every state that comes after `change`, until the process that holds the fleet is gone."""
        try:
            while True:
                state = await link.state(change)
                change = state.change
                await self.take(state)
        except PenstockError as error:
            self.lost = str(error)
            self.router_returns = False
        for member in self.members:
            if member.state is not State.STOPPED:
                member.lifecycle, member.returns = Lifecycle.told(member.name, State.DEAD, self.lost), False
        self.announce()

    async def close(self) -> None:
        """Close the connections to engines."""
        for member in self.members:
            await member.control.close()

    def _member(self, told: MemberState, known: Member | None) -> Member:
        if known is not None and known.url == told.url:
            control, key = known.control, known.api_key
        else:
            key = self._keys.get(told.url)
            control = ControlClient(told.name, told.url, api_key=key, timeout_s=self._control_s)
        return Member(
            name=told.name,
            url=told.url,
            control=control,
            info=told.info,
            lifecycle=Lifecycle.told(told.name, told.state, told.reason),
            weight_version=told.weight_version,
            api_key=key,
            gpus=told.gpus,
            returns=told.coming,
        )


class RemoteOrders:
    """Operations and elasticity of a fleet that another process holds.

    Each call ends with the operation there, whose steps have deadlines, or when that process is gone or hangs.
    """

    def __init__(self, link: Link, roster: AdoptedRoster, store: SharedMemoryStore) -> None:
        self._link = link
        self._roster = roster
        self._store = store
        self._update: asyncio.Task[UpdateReport] | None = None
        self._looking: asyncio.Task[Any] | None = None
        self._closed = False

    async def pause(self, mode: PauseMode, *, clear_cache: bool, timeout_s: float | None = None) -> None:
        """See `Operations`, as of all methods."""
        await self._call("pause", mode=mode.value, clear_cache=clear_cache, timeout_s=timeout_s)

    async def resume(self) -> None:  # noqa: D102
        await self._call("resume")

    async def abort(self) -> None:  # noqa: D102
        await self._call("abort")

    async def reset_prefix_cache(self) -> None:  # noqa: D102
        await self._call("reset_prefix_cache")

    async def sleep(self, level: int) -> None:  # noqa: D102
        await self._call("sleep", level=level)

    async def wake_up(self, tags: Sequence[str] | None) -> None:  # noqa: D102
        await self._call("wake_up", tags=None if tags is None else list(tags))

    async def collective_rpc(  # noqa: D102
        self, method: str, timeout_s: float, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> FanOut[list[Any]]:
        given = {"args": list(args), "kwargs": dict(kwargs or {})}
        return fan_out_of(await self._call("collective_rpc", method=method, timeout_s=timeout_s, **given))

    async def look(self) -> None:
        """Have every engine asked whether it is well, where a request has seen one die (`Supervisor.look`)."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._call("look"), name="remote-look")
        with suppress(PenstockError):  # the holder is gone, which is said elsewhere
            await asyncio.shield(self._looking)

    async def load_adapter(self, name: str, path: str, timeout_s: float) -> None:  # noqa: D102
        await self._call("load_adapter", adapter=name, path=path, timeout_s=timeout_s)

    async def init_weight_transfer(self, init_info: Mapping[str, Any]) -> None:  # noqa: D102
        await self._call("init_weight_transfer", init_info=dict(init_info))

    async def native_update(self, update_info: Mapping[str, Any], version: int) -> None:  # noqa: D102
        await self._call("native_update", update_info=dict(update_info), version=version)

    async def add(self, count: int) -> tuple[str, ...]:  # noqa: D102
        return tuple(await self._call("add", count=count))

    async def attach(self, servers: Sequence[ServerSpec]) -> tuple[str, ...]:  # noqa: D102
        return tuple(await self._call("attach", servers=[spec.model_dump() for spec in servers]))

    async def drain(self, engine: str | int, timeout_s: float | None = None) -> bool:  # noqa: D102
        return bool(await self._call("drain", engine=engine, timeout_s=timeout_s))

    async def remove(self, engine: str | int, timeout_s: float | None = None) -> None:  # noqa: D102
        await self._call("remove", engine=engine, timeout_s=timeout_s)

    async def replace(self, engine: str | int, timeout_s: float | None = None) -> str:  # noqa: D102
        return str(await self._call("replace", engine=engine, timeout_s=timeout_s))

    async def update(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int | None, *, kv: KV = "recompute"
    ) -> UpdateReport:
        """Publish here, and let the engines map it. Once begun, it runs to its end even if this call is cancelled.

        The process that holds the fleet keeps the memory, for engines that return after this one has ended.
        """
        self._check_open()  # a holder that is lost may have stood still, and its engines may read what would be written
        if self._update is not None and not self._update.done():
            raise StateError("a weight update is under way; await it before the next one")
        number = self._roster.used + 1 if version is None else version
        check_version(number, self._roster)
        self._update = asyncio.create_task(self._publish_and_put(named_tensors, number, kv), name="remote-update")
        return await asyncio.shield(self._update)

    async def close(self) -> None:
        """Let no further call begin, and wait for an update under way: it reads what is ours."""
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait((self._looking,))
        if self._update is not None:
            await asyncio.wait((self._update,))

    async def _publish_and_put(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int, kv: KV
    ) -> UpdateReport:
        began = time.monotonic()
        manifest = await in_thread(lambda: self._store.publish(version, named_tensors))
        published = time.monotonic() - began
        try:
            report = report_of(await self._call("update", manifest=manifest.to_json(), kv=kv))
        finally:
            if self._roster.version == version:
                self._store.commit(manifest)  # these bytes stay until the one after the next
        seconds = {
            **report.seconds,
            "publish": published + report.seconds["publish"],
            "total": published + report.seconds["total"],
        }
        return replace(report, seconds=seconds)

    async def _call(self, name: str, **arguments: Any) -> Any:
        self._check_open()
        result, state = await self._link.call(name, **arguments)
        await self._roster.take(state)
        return result

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("this fleet was torn down")
        if self._roster.lost is not None:
            raise EngineDeadError(self._roster.lost)
