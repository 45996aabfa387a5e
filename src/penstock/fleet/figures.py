"""What the engines of a fleet say of themselves: their state, and how much they have to do."""

from __future__ import annotations

from penstock.errors import EngineDeadError, UserError
from penstock.fleet.control import fan_out
from penstock.fleet.member import SERVABLE, EngineStatus, Member, why
from penstock.fleet.roster import Roster
from penstock.types import EngineStats

STATS_S = 10.0
"""Deadline of reading an engine's metrics."""


async def statuses(roster: Roster, *, stats: bool = True) -> tuple[EngineStatus, ...]:
    """Every engine that ever joined, the dead too, in order; without `stats` none of them is asked."""
    asked = await fan_out(roster.live() if stats else (), lambda engine: engine.stats(), deadline_s=STATS_S)
    return tuple(
        EngineStatus(m.name, m.url, m.state, m.lifecycle.reason, m.weight_version, asked.results.get(m.name))
        for m in roster.members
    )


async def loads(roster: Roster, index: int | None) -> list[EngineStats]:
    """Of engine `index`, or of all that are alive.

    Raises:
        UserError: there is no engine of that index; `EngineDeadError`: it does not serve, or none does.
    """
    asked = await fan_out(_chosen(roster, index), lambda engine: engine.stats(), deadline_s=STATS_S)
    asked.raise_first()
    return list(asked.results.values())


def _chosen(roster: Roster, index: int | None) -> tuple[Member, ...]:
    members = roster.members
    if index is None:
        if not (live := roster.live()):
            raise EngineDeadError(f"no engine is left now ({why(members)})")
        return live
    if not 0 <= index < len(members):
        raise UserError(f"there is no engine {index}; the fleet has engines 0 to {len(members) - 1}")
    member = members[index]
    if member.state not in SERVABLE:
        raise EngineDeadError(f"it is {member.state}: {member.lifecycle.reason}", engine=member.name)
    return (member,)
