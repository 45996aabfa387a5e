"""Servers that others started, which a fleet attaches and never ends; and engines that other processes changed."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Generator, Iterable, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from typing import Any, cast

from penstock.control_types import CoreState
from penstock.engine.capabilities import Capabilities
from penstock.engine.control import ControlClient
from penstock.engine.vanilla import VanillaControl
from penstock.engine.verbs import verbs_of
from penstock.errors import EngineHTTPError, PenstockError, UserError
from penstock.fleet.engines import connect_engine
from penstock.fleet.lifecycle import Lifecycle, State
from penstock.fleet.member import Member, ask
from penstock.fleet.roster import Roster
from penstock.options import validate
from penstock.settings import ServerSpec
from penstock.weights.manifest import differ

logger = logging.getLogger(__name__)

SILENCING_S = 2.0
"""Deadline of pausing a server that has torn weights."""


class AttachedServers:
    """Joins servers of others to one fleet.

    `api_key` is the servers' key, which the router also asks of clients.
    """

    def __init__(self, *, api_key: str | None, control_timeout_s: float) -> None:
        self._controls: dict[Lifecycle, ControlClient] = {}
        self._api_key = api_key
        self._control_s = control_timeout_s
        self.joined: Callable[[], None] = lambda: None
        """Called when a server has joined: from then on, engines may lack our plugin."""

    async def join(self, lifecycle: Lifecycle, spec: ServerSpec) -> Member:
        """Ask a server for its properties; it is SYNCING afterwards.

        Raises:
            PenstockError: it does not answer, or is no engine; it is DEAD afterwards.
            UserError: it is a router, or has fewer ranks than `dp`.
        """
        async with AsyncExitStack() as failed:
            try:
                member = await connect_engine(
                    lifecycle, spec.url, api_key=self._api_key, control_timeout_s=self._control_s, client=VanillaControl
                )
                failed.push_async_callback(member.control.close)
                member.ranks = _ranks(member, spec)
            except PenstockError as error:
                is_router = isinstance(error, EngineHTTPError) and error.error_type == "permission_error"
                why = "is a router of Penstock, not an engine; give the addresses of its engines"
                lifecycle.to(State.DEAD, f"does not join: {why if is_router else error}")
                if is_router:  # it refuses control
                    raise UserError(f"{spec.url} {why}") from error
                raise
            failed.pop_all()
        self._controls[lifecycle] = member.control
        member.again = partial(self.join, lifecycle, spec)
        self.joined()
        return member

    async def close(self) -> None:
        """Close the connections; the servers run on."""
        for control in self._controls.values():
            await control.close()


def asked(roster: Roster) -> list[tuple[str, Capabilities]]:
    """Return name and capabilities of each engine that may get a request."""
    return [(m.name, m.info.capabilities) for m in roster.members if m.state not in {State.DEAD, State.STOPPED}]


def check_beside(member: Member, members: Sequence[Member]) -> None:
    """Refuse another member's server or model (UserError); warn of another model name."""
    own, others = member.info, [one for one in members if one is not member and one.state is not State.STOPPED]
    for one in others:
        same = place_of(member.url) == place_of(one.url)  # a plain vLLM names no instance
        if same or (own.instance and one.info.instance == own.instance):
            raise UserError(
                f"{member.url} is the server of engine {one.name}, which belongs to this fleet already as {one.url}; "
                "give each server once"
            )
        if own.vocab_size and one.info.vocab_size and own.vocab_size != one.info.vocab_size:
            raise UserError(
                f"{member.url} serves another model: its vocabulary has {own.vocab_size} tokens, that of engine "
                f"{one.name} {one.info.vocab_size}"
            )
    if odd := [one for one in others if own.model and one.info.model and own.model != one.info.model]:
        logger.warning(
            "engine %s serves %r, and engine %s serves %r: if these are two models, remove one; else start both with "
            "one --served-model-name, or requests by one name fail on the other",
            member.name, own.model, odd[0].name, odd[0].info.model,
        )  # fmt: skip


async def until_it_answers(member: Member, hang_s: float, pause: Callable[[], Awaitable[None]]) -> None:
    """Return once a dead server answers health checks again, each within `hang_s` seconds."""
    while True:
        with suppress(PenstockError):
            return await member.control.health(hang_s)
        await pause()


async def reread(member: Member, deadline_s: float) -> None:
    """Ask a server without our plugin for its version, since its owner may have changed its weights."""
    info = member.info = await ask(member, lambda engine: engine.info(), deadline_s=deadline_s)
    member.weight_version = info.weight_version
    if info.instance and info.instance != member.torn:
        member.torn = None


async def silence(member: Member) -> None:
    """Pause a dead server with torn weights, for clients that do not use this fleet's router."""
    try:
        await ask(member, lambda engine: verbs_of(engine).release(), deadline_s=SILENCING_S)
    except PenstockError as error:
        logger.warning("engine %s may make tokens of unconfirmed weights: %s", member.name, error)


def _ranks(member: Member, spec: ServerSpec) -> int:
    info = member.info
    known = info.capabilities.plugin or bool(info.instance)
    if spec.dp is not None and known and spec.dp > info.dp:
        raise UserError(f"engine {member.name} at {spec.url} has {info.dp} data-parallel ranks, not dp={spec.dp}")
    return info.dp if spec.dp is None else spec.dp


def place_of(url: str) -> str:
    """Normalise a URL, since a server with two addresses would be updated twice."""
    return url.lower().replace("://localhost", "://127.0.0.1", 1)


def specs_of(servers: Iterable[str | ServerSpec]) -> tuple[ServerSpec, ...]:
    """Read servers: URLs, with `#dp=N` to address N ranks one by one, or specs.

    Specs from another process come as dictionaries. ConfigError: a server is malformed; UserError: it is named twice.
    """
    given: Iterable[Any] = (
        servers if isinstance(cast("object", servers), Iterable) else cast("Iterable[Any]", (servers,))
    )
    specs = tuple(s if isinstance(s, ServerSpec) else validate(ServerSpec, s) for s in given)
    places = [place_of(spec.url) for spec in specs]
    if twice := next((spec.url for spec in specs if places.count(place_of(spec.url)) > 1), None):
        raise UserError(f"the server {twice} is named twice; give each server once")
    return specs


# --- Engines that other processes changed -----------------------------------------------------------------------------


@contextmanager
def foreign_to(members: Sequence[Member]) -> Generator[None]:
    """Reset the engines' counts of foreign calls after a block of our own calls."""
    try:
        yield
    finally:
        for member in members:
            member.foreign = None


def wrong_weights(member: Member, state: CoreState, checksums: Collection[str]) -> str | None:
    """Return why an engine's weights differ from what it confirmed; None: they do not.

    `checksums`: of the fleet's weights on engines of its layout.
    """
    if state.torn or state.asleep:
        return "its weights were dropped or half written by another process"
    if state.weight_version not in {None, member.weight_version}:
        return f"another process gave it weight version {state.weight_version}, the fleet {member.weight_version}"
    if state.checksum is not None and any(differ(state.checksum, one) for one in checksums):
        return f"another process gave it other weights under the same version {state.weight_version}"
    if None not in {state.foreign, member.foreign} and state.foreign != member.foreign:
        return "another process called a method of its workers, which may have changed its weights"
    return None
