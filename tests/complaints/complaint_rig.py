"""What complaints about a fleet have in common."""

from __future__ import annotations

from patience import WAIT_S
from penstock import Fleet, SamplingParams
from penstock.fleet.member import State

LONG = SamplingParams(max_tokens=300, detokenize=False)
SHORT = SamplingParams(max_tokens=8, detokenize=False)


async def all_serve(fleet: Fleet) -> None:
    """Return when every engine serves the fleet's version."""
    members = fleet._roster.members
    assert await fleet._roster.until(lambda: all(m.state is State.SERVING for m in members), deadline_s=WAIT_S)
    assert {status.weight_version for status in await fleet.engines()} == {fleet.weight_version}
