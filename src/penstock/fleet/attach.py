"""Servers that someone else started: joined to a fleet, and again where they come back; never ended."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

from penstock.config import ServerSpec
from penstock.engine.concurrent import all_or_first_error
from penstock.engine.transport import HttpTransport
from penstock.errors import EngineHTTPError, PenstockError, UserError
from penstock.fleet.assemble import JOIN_S, join
from penstock.fleet.lifecycle import Lifecycle, State
from penstock.fleet.member import Member


class AttachedServers:
    """Joins servers of others to one fleet.

    Args:
        api_key: what they ask for; the same as the router's, which passes on what callers send.
        control_timeout_s: deadline of a control call.
    """

    def __init__(self, *, api_key: str | None, control_timeout_s: float) -> None:
        self._connections = AsyncExitStack()
        self._api_key = api_key
        self._control_s = control_timeout_s

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
        try:
            member = await join(
                lifecycle, spec.url, self._connections, api_key=self._api_key, control_timeout_s=self._control_s
            )
            try:
                await self._refuse_router(spec.url)
                _refuse_other_model(member, beside)
                member.ranks = _ranks(member, spec)
            except BaseException:
                await member.control.close()
                raise
        except PenstockError as error:
            lifecycle.to(State.DEAD, f"does not join: {error}")
            raise
        member.spec = spec
        return member

    async def close(self) -> None:
        """Close the connections to them; they run on."""
        await self._connections.aclose()

    async def _refuse_router(self, url: str) -> None:
        """A router passes on what an engine is asked, so it would be taken for one of its own engines."""
        http = HttpTransport(url, api_key=self._api_key)
        try:
            await http.get_text("/router/health", timeout_s=JOIN_S)
        except EngineHTTPError:
            return
        finally:
            await http.close()
        raise UserError(f"{url} is a router of Penstock, not an engine; give the addresses of its engines")

    async def join_all(self, lives: Sequence[Lifecycle], specs: Sequence[ServerSpec]) -> list[Member]:
        """Join several; PenstockError of the first that does not, and the others are given up."""
        return await all_or_first_error(self.join(*pair) for pair in zip(lives, specs, strict=True))


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
