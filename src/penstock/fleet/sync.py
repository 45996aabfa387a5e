"""Brings one engine to the weights and the state of the fleet: one that joins, returns, or was changed by others."""

from __future__ import annotations

import logging

from penstock.engine.capabilities import Capability, require
from penstock.engine.control import ControlClient, CoreState
from penstock.errors import EngineError, PenstockError, StateError
from penstock.fleet.fan_out import Call, fan_out
from penstock.fleet.member import SERVABLE, Member, State
from penstock.fleet.roster import Roster
from penstock.types import EngineUpdate, PauseMode
from penstock.weights.manifest import WeightManifest, differ

logger = logging.getLogger(__name__)

MEMORY_TAGS = frozenset({"weights", "kv_cache"})
"""What an engine gives back when it sleeps, and takes again by tag."""


def source(roster: Roster, current: WeightManifest | None) -> WeightManifest | None:
    """Return where the bytes of the fleet's version are; None: nowhere (as loaded, or sent natively)."""
    return current if current is not None and current.version == roster.version else None


async def put(engine: ControlClient, manifest: WeightManifest) -> EngineUpdate:
    """Let an engine take a committed version, outside of an update."""
    await engine.prepare_weights(manifest)
    return await engine.apply_weights(manifest.version)


async def resume(engine: ControlClient) -> None:
    """Let an engine generate again."""
    await engine.resume()


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
    """Wake a server of others that was dead to us while it slept.

    Where the fleet sleeps as well, and it needs no weights, it sleeps on: others may use that memory now. An engine of
    which a part sleeps is woken wholly, since vLLM's sleep takes an engine that is all awake.
    """
    if not member.info.capabilities.sleep:
        return
    loads = member.info.capabilities.plugin and (member.weight_version != roster.version or member.torn is not None)
    if "weights" in asleep and asleep == member.asleep and not loads:
        return
    for tag in sorted(member.asleep, reverse=True):  # the weights first

        async def wake_up(engine: ControlClient, tag: str = tag) -> None:
            await engine.wake_up([tag])

        (await fan_out((member,), wake_up, deadline_s=deadline_s)).raise_first()
        member.asleep -= {tag}


async def _identify(member: Member, deadline_s: float) -> None:
    """Ask an engine without our plugin what it has now: its owner may have brought or reloaded its weights."""
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
        await ask(resume)
    if member.control is not control:
        raise StateError(f"engine {member.name} was restarted while it joined")
    roster.admit(member)
    if paused:
        member.lifecycle.to(State.PAUSED, "joined a fleet that is paused")
        roster.announce()
    await roster.push_or_defer(f"engine {member.name} has joined")
    return True


def wrong_weights(member: Member, state: CoreState) -> str | None:
    """Say why an engine has other weights than it has confirmed, if so."""
    if state.torn or state.asleep:
        return "its weights were dropped or half written by another process"
    if state.weight_version not in {None, member.weight_version}:
        return f"another process gave it weight version {state.weight_version}, the fleet {member.weight_version}"
    if None not in {state.foreign, member.foreign} and state.foreign != member.foreign:
        return "another process called a method of its workers, which may have changed its weights"
    return None


async def put_right(member: Member, roster: Roster, *, paused: bool, deadline_s: float) -> None:
    """Put right what another process did to an engine: resume it, pause it again, or end it for its weights' sake.

    Args:
        member: it, while no operation runs.
        roster: of the fleet.
        paused: the fleet is.
        deadline_s: seconds for each of two calls.
    """

    async def failed(member: Member, error: PenstockError) -> None:
        await roster.mark_dead(member, f"it could not be brought back to what the fleet does: {error}")

    async def keep_paused(engine: ControlClient) -> None:
        await engine.pause(PauseMode.KEEP, clear_cache=False)

    if roster.occupation.going:
        return
    calls, control = roster.occupation.begun, member.control
    outcome = await fan_out((member,), lambda engine: engine.state(), deadline_s=deadline_s)
    if (state := outcome.results.get(member.name)) is None or roster.occupation.begun != calls:
        return  # a call of ours may have done it; one that says nothing is left to the next probe
    if member.state not in SERVABLE or member.control is not control:
        return
    if (wrong := wrong_weights(member, state)) is not None:
        member.asleep = MEMORY_TAGS if state.asleep else member.asleep
        await roster.mark_dead(member, wrong, torn=True)
    elif state.paused != paused:
        was, now = ("paused", "resumed") if state.paused else ("resumed", "paused")
        logger.warning("engine %s was %s by another process, and is %s again", member.name, was, now)
        await fan_out((member,), keep_paused if paused else resume, deadline_s=deadline_s, on_failure=failed)
    else:
        member.foreign = state.foreign
