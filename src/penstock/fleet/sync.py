"""Brings one engine to the weights and the state of the fleet: one that joins, returns, or has to go back."""

from __future__ import annotations

from penstock.engine.capabilities import Capability, require
from penstock.errors import EngineError, StateError
from penstock.fleet.fan_out import Call, fan_out
from penstock.fleet.member import EngineControl, Member, State
from penstock.fleet.roster import Roster
from penstock.types import EngineUpdate, PauseMode
from penstock.weights.manifest import WeightManifest, differ

MEMORY_TAGS = frozenset({"weights", "kv_cache"})
"""What an engine gives back when it sleeps, and takes again by tag."""


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
        False where the bytes of that version are nowhere, or it has no plugin to take them: it can join after the next
        update, or when its owner has given it that version.

    Raises:
        EngineError: it failed, or its weights are not those of its peers.
    """
    plugin = member.info.capabilities.plugin
    if not plugin:
        await _identify(member, deadline_s)
    if member.weight_version == roster.version and member.torn is None:
        return True
    manifest = source(roster, current)
    if manifest is None or not plugin:
        return False
    outcome = await fan_out((member,), lambda engine: put(engine, manifest), deadline_s=2 * deadline_s)
    outcome.raise_first()
    checksum = outcome.results[member.name].checksum
    for expected in roster.checksums.get(member.layout, ()):
        if differ(checksum, expected):
            raise EngineError(
                f"its weights of version {roster.version} have the checksum {checksum}, its peers' {expected}",
                engine=member.name,
            )
    member.weight_version, member.torn = roster.version, None
    return True


async def _wake(member: Member, roster: Roster, asleep: frozenset[str], deadline_s: float) -> None:
    """It died to us as it slept, and lives: a server of others. To one that is awake this says nothing.

    Where the fleet sleeps as well, and it needs no weights, it sleeps on: others may use that memory now. One of which
    a part sleeps is woken wholly, since vLLM's sleep takes an engine that is all awake.
    """
    if member.info.capabilities.sleep:
        loads = member.info.capabilities.plugin and (member.weight_version != roster.version or member.torn is not None)
        sleeps_on = "weights" in asleep and asleep == member.asleep and not loads
        tags = frozenset[str]() if sleeps_on else member.asleep
        for tag in sorted(tags, reverse=True):  # the weights first

            async def wake_up(engine: EngineControl, tag: str = tag) -> None:
                await engine.wake_up([tag])

            (await fan_out((member,), wake_up, deadline_s=deadline_s)).raise_first()
            member.asleep -= {tag}


async def _identify(member: Member, deadline_s: float) -> None:
    """What an engine without our plugin has now: its weights are its owner's, who may have brought or reloaded them."""
    outcome = await fan_out((member,), lambda engine: engine.info(), deadline_s=deadline_s)
    outcome.raise_first()
    info = member.info = outcome.results[member.name]
    member.weight_version = info.weight_version
    if info.instance and info.instance != member.torn:
        member.torn = None


async def bring_in(
    member: Member,
    roster: Roster,
    current: WeightManifest | None,
    *,
    paused: bool,
    asleep: frozenset[str],
    deadline_s: float,
) -> bool:
    """Bring an engine that is SYNCING to the fleet's weights and state, and let it serve.

    Args:
        member: it.
        roster: of the fleet.
        current: see `bring_to_version`.
        paused: the fleet is.
        asleep: memory tags that the fleet has given back.
        deadline_s: seconds for each call.

    Returns:
        False where it has to wait for weights; nothing else was done then.

    Raises:
        EngineError: it failed. MissingCapabilityError: it cannot be brought into the state that the fleet is in.
    """
    control = member.control

    async def ask(call: Call[None]) -> None:
        (await fan_out((member,), call, deadline_s=deadline_s)).raise_first()

    await _wake(member, roster, asleep, deadline_s)
    if not await bring_to_version(member, roster, current, deadline_s=deadline_s):
        return False
    needed: Capability | None = "sleep" if asleep else "pause" if paused else None
    if needed is not None:
        require(((member.name, member.info.capabilities),), needed, "join a fleet that is paused or sleeps")
    if asleep:
        member.asleep = asleep
        await ask(lambda engine: engine.sleep(1))
        if back := sorted(MEMORY_TAGS - asleep):
            await ask(lambda engine: engine.wake_up(back))
    elif paused:
        # A server that others started has KV of its own, which must not outlive a native update.
        await ask(lambda engine: engine.pause(PauseMode.KEEP, clear_cache=True))
    elif member.process is None and member.info.capabilities.pause:  # paused by its owner, or by us when it was torn
        await ask(lambda engine: engine.resume())
    if member.control is not control:
        raise StateError(f"engine {member.name} was started anew while it joined")
    roster.admit(member)
    if paused:
        member.lifecycle.to(State.PAUSED, "joined a fleet that is paused")
        roster.announce()
    await roster.pass_on(f"engine {member.name} has joined")
    return True
