"""Brings one engine to the weights that the fleet serves: one that joins, returns, or has to go back."""

from __future__ import annotations

from penstock.errors import EngineError
from penstock.fleet.control import fan_out
from penstock.fleet.member import EngineControl, Member
from penstock.fleet.roster import Roster
from penstock.types import EngineUpdate
from penstock.weights.manifest import WeightManifest


def source(roster: Roster, current: WeightManifest | None) -> WeightManifest | None:
    """Where the bytes of the fleet's version are; None where nobody has them (as loaded, or sent natively)."""
    return current if current is not None and current.version == roster.version else None


async def put(engine: EngineControl, manifest: WeightManifest) -> EngineUpdate:
    """Let an engine take a committed version, outside of an update."""
    await engine.prepare_weights(manifest)
    return await engine.apply_weights(manifest.version)


async def bring_to_version(
    member: Member, roster: Roster, current: WeightManifest | None, *, deadline_s: float
) -> bool:
    """Make an engine that serves nothing yet confirm the fleet's version.

    Args:
        member: SYNCING; what it has as loaded is version 0.
        roster: whose version it is to have.
        current: the last version that was committed here.
        deadline_s: seconds for each of two calls.

    Returns:
        False where the bytes of that version are nowhere: it can join after the next update.

    Raises:
        EngineError: it failed, or its weights are not those of its peers.
    """
    if member.weight_version == roster.version:
        return True
    manifest = source(roster, current)
    if manifest is None:
        return False
    outcome = await fan_out((member,), lambda engine: put(engine, manifest), deadline_s=2 * deadline_s)
    outcome.raise_first()
    checksum = outcome.results[member.name].checksum
    expected = roster.checksums.get(member.layout, checksum)
    if checksum != expected:
        raise EngineError(
            f"its weights of version {roster.version} have the checksum {checksum}, its peers' {expected}",
            engine=member.name,
        )
    member.weight_version = roster.version
    return True
