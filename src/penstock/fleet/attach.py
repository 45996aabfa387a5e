"""Servers that someone else started: joined to a fleet, again when they come back, and never ended."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, TypeVar, cast

from penstock.engine.client import DataClient
from penstock.engine.vanilla import VanillaControl, VanillaReplies, VersionHistory
from penstock.errors import ConfigError, EngineError, EngineHTTPError, PenstockError, UserError
from penstock.fleet.elastic import place_of
from penstock.fleet.member import CONNECT_S, Lifecycle, Member, State, connect_engine
from penstock.fleet.roster import Roster
from penstock.http import HttpTransport
from penstock.parsing import reading
from penstock.settings import ServerSpec, validate

logger = logging.getLogger(__name__)
T = TypeVar("T")


class AttachedServers:
    """Joins servers of others to one fleet.

    Args:
        api_key: what they ask for, since they were started with it; the same that the router asks of clients.
        control_timeout_s: deadline of a control call.
        served_as: what clients of the fleet call its model; None: unknown.
    """

    def __init__(self, *, api_key: str | None, control_timeout_s: float, served_as: str | None = None) -> None:
        self._connections = AsyncExitStack()
        self._api_key = api_key
        self._control_s = control_timeout_s
        self._served_as = served_as
        self._history = VersionHistory()

    def serve(self, client: DataClient, roster: Roster) -> None:
        """Let a client's requests reach servers without our plugin (`engine/vanilla.py`)."""
        self._history.version = lambda: roster.version
        client.unreported = VanillaReplies(roster.asked, self._history)

    async def join(self, lifecycle: Lifecycle, spec: ServerSpec, beside: Sequence[Member] = ()) -> Member:
        """Ask a server what it is; it is SYNCING then.

        Args:
            lifecycle: of the engine that it is to be.
            spec: where it is, and how many ranks to address.
            beside: engines that serve the model which it has to serve.

        Raises:
            PenstockError: it does not answer, or is no engine; it is DEAD.
            UserError: it is a router, serves another model, or has fewer ranks than are to be addressed.
        """
        async with AsyncExitStack() as failed:
            try:
                member = await self._joined(lifecycle, spec.url)
                failed.push_async_callback(member.control.close)
                if self._served_as is not None:
                    member.warning = await self._ask(spec.url, partial(_other_name, name=self._served_as))
                _refuse_other_model(member, beside)
                member.ranks = _ranks(member, spec)
            except PenstockError as error:
                lifecycle.to(State.DEAD, f"does not join: {error}")
                raise
            failed.pop_all()
        member.spec = spec
        return member

    async def close(self) -> None:
        """Close the connections to them; they run on."""
        await self._connections.aclose()

    async def _joined(self, lifecycle: Lifecycle, url: str) -> Member:
        try:
            return await connect_engine(
                lifecycle,
                url,
                self._connections,
                api_key=self._api_key,
                control_timeout_s=self._control_s,
                client=partial(VanillaControl, history=self._history),
            )
        except EngineHTTPError:
            await self._ask(url, _refuse_router)
            raise

    async def _ask(self, url: str, question: Callable[[HttpTransport], Awaitable[T]]) -> T:
        http = HttpTransport(url, api_key=self._api_key)
        try:
            return await question(http)
        finally:
            await http.close()


async def _refuse_router(http: HttpTransport) -> None:
    """Say that a router is none of the engines: its own refusal does not."""
    try:
        await http.get_text("/router/health", timeout_s=CONNECT_S)
    except EngineHTTPError:
        return
    raise UserError(f"{http.url} is a router of Penstock, not an engine; give the addresses of its engines")


async def _other_name(http: HttpTransport, name: str) -> str:
    """A warning: OpenAI requests name the model, and are passed on as they came; those by token ids do not."""
    models: Any = await http.get("/v1/models", timeout_s=CONNECT_S)
    with reading(f"answer of {http.url} to /v1/models", EngineError):
        names = [str(model["id"]) for model in models["data"]]
        first = names[0]
    if name in names:
        return ""
    warning = (
        f"{http.url} serves {', '.join(names)} and knows no model {name}: it answers 404 to OpenAI requests that name "
        f"that one; start it with --served-model-name {name}, or give the fleet served_model_name={first}"
    )
    logger.warning("%s", warning)
    return warning


def _refuse_other_model(member: Member, beside: Sequence[Member]) -> None:
    own = member.info.vocab_size
    for other in beside:
        if own and other.info.vocab_size and own != other.info.vocab_size:
            raise UserError(
                f"{member.url} serves another model: its vocabulary has {own} tokens, that of engine {other.name} "
                f"{other.info.vocab_size}"
            )


def _ranks(member: Member, spec: ServerSpec) -> int:
    info = member.info
    known = info.capabilities.plugin or bool(info.instance)
    if spec.dp is not None and known and spec.dp > info.dp:
        raise UserError(f"engine {member.name} at {spec.url} has {info.dp} data-parallel ranks, not dp={spec.dp}")
    return info.dp if spec.dp is None else spec.dp


def _url(server: object) -> str:
    if not isinstance(server, str):
        raise ConfigError(f"a server is its URL or a ServerSpec, and not {server!r}; several are given one by one")
    return server


def specs_of(servers: Iterable[str | ServerSpec]) -> tuple[ServerSpec, ...]:
    """Read what a caller gave: URLs, with `#dp=N` behind them where so many ranks are to be addressed, or specs.

    Raises:
        ConfigError: one is malformed.
        UserError: one is named twice.
    """
    given: Iterable[object] = servers if isinstance(cast("object", servers), Iterable) else (servers,)
    specs = tuple(s if isinstance(s, ServerSpec) else validate(ServerSpec, {"url": _url(s)}) for s in given)
    places = [place_of(spec.url) for spec in specs]
    if twice := next((spec.url for spec in specs if places.count(place_of(spec.url)) > 1), None):
        raise UserError(f"the server {twice} is named twice; two engines have the url then")
    return specs
