"""Commands to every engine of a fleet, which change what it does: a pause, a sleep, a native update, an adapter."""

from __future__ import annotations

from typing import TypeVar

from penstock.errors import DeadlineError, EngineDeadError, EngineHTTPError, PenstockError
from penstock.fleet.member import SERVABLE, Call, FanOut, Member, fan_out, why
from penstock.fleet.roster import Roster

T = TypeVar("T")


async def command(
    roster: Roster,
    call: Call[T],
    *,
    what: str,
    deadline_s: float,
    refusable: bool = False,
    may_be_late: bool = False,
    tears: bool = False,
) -> FanOut[T]:
    """Make every live engine do something that changes its state; one that fails is dead at once.

    Args:
        roster: of the fleet.
        call: the control call.
        what: names it in reasons, such as `pause`.
        deadline_s: seconds for each engine.
        refusable: an engine that answers with an HTTP error has changed nothing. It stays if all others refused
            too, and then the first refusal is raised.
        may_be_late: one that does not answer in time stays as well; what it has done, the caller undoes.
        tears: the weights of one that fails may be half written.

    Raises:
        EngineDeadError: none is left, or was there, and none is coming back.
        EngineHTTPError: all refused, and `refusable`.
    """
    members = roster.live()
    asked = {m.name: m.control for m in members}

    async def failed(member: Member, error: PenstockError) -> None:
        spared = (refusable and isinstance(error, EngineHTTPError)) or (
            may_be_late and isinstance(error, DeadlineError)
        )
        if not spared:
            await roster.mark_dead(member, f"{what} failed: {error}", torn=tears)

    outcome = await fan_out(members, roster.tears(call) if tears else call, deadline_s=deadline_s, on_failure=failed)
    # Of those that were spared and not restarted meanwhile:
    refused = [
        m
        for m in members
        if not may_be_late and m.name in outcome.failures and m.state in SERVABLE and m.control is asked[m.name]
    ]
    if refused and not outcome.results:
        raise outcome.failures[refused[0].name]
    for member in refused:  # the others did it: this engine is in another state than the fleet
        await roster.mark_dead(member, f"{what} failed: {outcome.failures[member.name]}")
    if members and not roster.live():
        raise EngineDeadError(f"{what}: no engine is left ({why(members)})")
    if not members:
        roster.raise_if_lost()
    return outcome
