"""VLLM's native weight calls over many engines: what each is sent, and what is refused before any is asked.

One call is for all of them, and an engine that fails what others have done is dead. So what some of them cannot take is
found out first.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.engine.capabilities import PENSTOCK, require
from penstock.engine.control import ControlClient
from penstock.errors import EngineHTTPError, MissingCapabilityError
from penstock.fleet.member import Member
from penstock.http import as_json

OURS = PENSTOCK.weight_transfer
"""The backend that engines have which Penstock launches, unless their `extra_args` name another."""
INIT, UPDATE = "init_weight_update_communicator", "update_named_weights"
_OURS_TAKES = (
    f"engines that Penstock launches take native weights by {OURS!r}, with an empty init_info and the update_info "
    '{"manifest": ...}. Call update_weights, which does all of that; or launch them with another backend, such as '
    "extra_args={'weight-transfer-config': '{\"backend\": \"nccl\"}'}. Nothing was changed"
)
_ALIKE = (
    "Start all of them with one --weight-transfer-config; or those of others with Penstock's plugin, and call "
    "update_weights (docs/how-to/other-servers.md). Nothing was changed"
)


class NativeCalls:
    """Checks the native calls of one fleet, and remembers which engines joined a trainer's communicator."""

    def __init__(self) -> None:
        self._joined: frozenset[ControlClient] = frozenset()

    @contextmanager
    def joining(
        self, members: Sequence[Member], init_info: Mapping[str, Any]
    ) -> Generator[dict[ControlClient, dict[str, Any]]]:
        """Yield what each is sent of `init_info`: its own `rank_offset`, the ranks of those before it added.

        Raises:
            MissingCapabilityError: one has no native transfer, or they have different ones; or, when they were asked,
                all have refused since theirs is ours.
            UserError: `init_info` cannot be sent.
        """
        _check_backends(members, INIT)
        as_json("init_info", init_info)
        infos: dict[ControlClient, dict[str, Any]] = {}
        ranks = 0
        for member in members:
            infos[member.control] = dict(init_info)
            if "rank_offset" in init_info:
                infos[member.control]["rank_offset"] = init_info["rank_offset"] + ranks
            tp, pp, dp = member.layout
            ranks += tp * pp * dp
        try:
            yield infos
        except EngineHTTPError as refused:
            if init_info and all(_is_ours(member) for member in members):
                raise MissingCapabilityError(f"{INIT}: {_OURS_TAKES} ({refused})") from refused
            raise
        # An empty one tells nothing: ours takes it too, for which there is nothing to join.
        self._joined = frozenset(infos) if init_info else frozenset()

    def check_update(self, members: Sequence[Member], update_info: Mapping[str, Any]) -> None:
        """Refuse what would leave every engine with an update begun and nothing to end it, of which they are dead.

        Raises:
            MissingCapabilityError: one has no native transfer, or they have different ones; or theirs is ours, as far
                as is known, and `update_info` is for another.
            UserError: `update_info` cannot be sent.
        """
        _check_backends(members, UPDATE)
        as_json("update_info", update_info)
        if "manifest" in update_info:
            return
        # It is unknown here what a server of others has joined.
        lacking = [m.name for m in members if _is_ours(m) and m.process is not None and m.control not in self._joined]
        if lacking:
            raise MissingCapabilityError(
                f"{UPDATE}: {', '.join(lacking)} accepted no {INIT} since the start, and update_info is without a "
                f"manifest ({', '.join(update_info) or 'empty'}): {_OURS_TAKES}"
            )


def _is_ours(member: Member) -> bool:
    return member.info.capabilities.weight_transfer == OURS


def _check_backends(members: Sequence[Member], operation: str) -> None:
    require(((m.name, m.info.capabilities) for m in members), "weight_transfer", operation)
    names: dict[str | None, list[str]] = {}
    for member in members:
        names.setdefault(member.info.capabilities.weight_transfer, []).append(member.name)
    if len(names) > 1:
        each = "; ".join(f"{', '.join(its)} by {backend!r}" for backend, its in names.items())
        raise MissingCapabilityError(
            f"{operation} is one call for all engines, and they take native weights in different ways: {each}. {_ALIKE}"
        )
