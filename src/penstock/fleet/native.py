"""Native weight calls of vLLM over many engines.

One call goes to all engines, and an engine that fails what others did is dead. So the fleet checks that all can take it
before it asks any.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.checks import reading
from penstock.engine.control import ControlClient
from penstock.engine.lacking import require
from penstock.engine.verbs import verbs_of
from penstock.errors import MissingCapabilityError, StateError
from penstock.fleet.attach import foreign_to
from penstock.fleet.member import Member
from penstock.fleet.pausing import command
from penstock.fleet.roster import Roster
from penstock.fleet.update import check_version
from penstock.http import as_json

if TYPE_CHECKING:
    from penstock.fleet.pausing import AllOperations

logger = logging.getLogger(__name__)

INIT, UPDATE = "init_weight_update_communicator", "update_named_weights"
CALLS = 4
"""Control calls in one update."""
_ALIKE = (
    "Start all of them with one --weight-transfer-config, such as "
    "extra_args={'weight-transfer-config': '{\"backend\": \"nccl\"}'}; or with Penstock's plugin, and call "
    "update_weights (docs/how-to/other-servers.md). Nothing was changed"
)


class NativeCalls:
    """The native calls of one fleet; `timeout_s` is each control call's deadline."""

    def __init__(self, operations: AllOperations, roster: Roster, timeout_s: float) -> None:
        self._operations = operations
        self._roster = roster
        self._timeout_s = timeout_s
        self._joined: frozenset[ControlClient] = frozenset()
        """Engines that have joined a trainer's communicator."""

    async def init(self, init_info: Mapping[str, Any]) -> None:
        """Call `/init_weight_transfer_engine`; see `Fleet.init_weight_update_communicator`.

        Raises:
            MissingCapabilityError: an engine has no native transfer, or the kinds differ.
            UserError: `init_info` cannot be sent.
        """

        async def run() -> None:
            members = self._roster.live()
            _check_backends(members, INIT)
            as_json("init_info", init_info)
            with reading("init_info"):
                infos = _by_rank(members, init_info)
            with foreign_to(members):
                await self._operations.refusable(
                    lambda engine: verbs_of(engine).native.init(infos[engine]), "initialisation of weight transfer"
                )
            self._joined = frozenset(infos)

        await self._operations.queue.run(run)

    async def update(self, update_info: Mapping[str, Any], version: int) -> None:
        """Run vLLM's native update on paused engines; see `Fleet.update_named_weights`."""
        operations, roster = self._operations, self._roster

        async def run() -> None:
            check_version(roster, version)
            if not operations.paused:
                raise StateError("pause generation before a native weight update: vLLM dies of one while it generates")
            operations.check_weights_awake()
            self._check_update(roster.live(), update_info)
            if operations.kv_stays:
                roster.keep_kv(version)
            roster.highest_version = version  # an engine that fails may have taken it
            with foreign_to(roster.live()):
                await command(
                    roster,
                    lambda engine: verbs_of(engine).native.update(update_info, version=version),
                    what=f"native update to weight version {version}",
                    deadline_s=CALLS * self._timeout_s,
                    tears=True,
                )
            roster.commit(version, roster.live())
            await roster.push_or_defer(f"its engines serve weight version {version}")
            logger.info(
                "weight version %d came by update_named_weights, of which no copy is kept: an engine that dies now, or "
                "is added, waits for the next update_weights", version,
            )  # fmt: skip

        await operations.queue.run(run)

    def _check_update(self, members: Sequence[Member], update_info: Mapping[str, Any]) -> None:
        """Refuse an update that no engine could finish, since all engines would die of it.

        Raises:
            MissingCapabilityError: an engine has no native transfer, or the kinds differ.
            StateError: an engine launched here has joined no communicator since its start.
            UserError: `update_info` cannot be sent.
        """
        _check_backends(members, UPDATE)
        as_json("update_info", update_info)
        # The fleet cannot know what a server of others has joined.
        outside = [m.name for m in members if m.process is not None and m.control not in self._joined]
        if outside:
            raise StateError(f"{UPDATE}: {', '.join(outside)} joined no trainer since the start; call {INIT} first")


def _by_rank(members: Sequence[Member], init_info: Mapping[str, Any]) -> dict[ControlClient, dict[str, Any]]:
    """Return each engine's `init_info`, with the ranks before it in `rank_offset`."""
    infos: dict[ControlClient, dict[str, Any]] = {}
    ranks = 0
    for member in members:
        infos[member.control] = dict(init_info)
        if "rank_offset" in init_info:
            infos[member.control]["rank_offset"] = init_info["rank_offset"] + ranks
        tp, pp, dp = member.layout
        ranks += tp * pp * dp
    return infos


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
