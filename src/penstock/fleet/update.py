"""An update of all engines, in its turn among the operations.

It is published, prepared on all engines, applied on all behind the gate, and committed or rolled back.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, get_args

from penstock.control_types import KV, EngineUpdate, UpdateReport
from penstock.engine.capabilities import Capability
from penstock.engine.control import ControlClient
from penstock.errors import PenstockError, StateError, UpdateError, UserError
from penstock.fleet.lifecycle import SERVABLE
from penstock.fleet.member import Call, Member, fan_out, put, updatable, why
from penstock.fleet.roster import OperationQueue, Roster
from penstock.fleet.stores import Stores, tensors_in_thread
from penstock.rooms import plugged_as, plugged_in
from penstock.weights.manifest import WeightManifest, by_rank, kind_of

if TYPE_CHECKING:
    import torch


logger = logging.getLogger(__name__)


def check_kv(kv: str) -> None:
    """Raise UserError for a value that is not in `KV`."""
    if kv not in get_args(KV):
        raise UserError(f"kv must be one of {', '.join(get_args(KV))}, got {kv!r}")


def check_version(roster: Roster, version: int) -> None:
    """Refuse an invalid version, or one that may already name other weights.

    Raises:
        UserError: the reason.
    """
    if type(version) is not int or version >= 2**63:  # engines would fail on it and be dead
        raise UserError(f"a weight version is an int below 2**63, got {version!r}; give int(...) of it")
    if version <= roster.highest_version:
        raise UserError(
            f"weight version {version} is not greater than {roster.highest_version}, under which engines may have "
            f"made tokens, committed or not; take {roster.highest_version + 1}, or leave the number to the fleet"
        )


class Fetching:
    """Brings a version to engines that fetch it themselves; `fleet/delivery.py` sends it to them instead."""

    def __init__(self, roster: Roster, deadline_s: float) -> None:
        self.roster = roster
        self.deadline_s = deadline_s

    async def ready(
        self, members: Sequence[Member], manifest: WeightManifest
    ) -> tuple[Sequence[Member], Mapping[str, float]]:
        """Return the engines that take part, and the seconds that each took to prepare."""
        return members, await self.prepare(members, manifest)

    async def apply(
        self, members: Sequence[Member], manifest: WeightManifest, call: Call[EngineUpdate]
    ) -> Mapping[str, EngineUpdate]:
        """Make every engine apply a version by `call`; one that fails is DEAD."""

        async def failed(member: Member, error: PenstockError) -> None:
            await self.roster.mark_dead(member, f"apply of weight version {manifest.version} failed: {error}")

        return (await fan_out(members, call, deadline_s=self.deadline_s, on_failure=failed)).results

    def forget(self) -> None:
        """Free the published version."""

    async def prepare(self, members: Sequence[Member], manifest: WeightManifest) -> Mapping[str, float]:
        """Make engines prepare a version; raise a refusal; on other errors one is DEAD."""

        async def seconds(engine: ControlClient) -> float:
            began = time.monotonic()
            await engine.prepare_weights(manifest)
            return time.monotonic() - began

        async def failed(member: Member, error: PenstockError) -> None:
            if not isinstance(error, UserError):
                await self.roster.mark_dead(member, f"prepare of weight version {manifest.version} failed: {error}")

        outcome = await fan_out(members, seconds, deadline_s=self.deadline_s, on_failure=failed)
        for error in outcome.failures.values():
            if isinstance(error, UserError):
                raise error
        return outcome.results


@dataclass(frozen=True, slots=True)
class Updater:
    """Brings new weights to every engine of a fleet.

    `async with gate():` closes the router's gate. At its end it sets the gate as the fleet requires and announces the
    engines' versions. An update is committed if at least `min_engines` made it. Each engine has `deadline_s` seconds
    for each step.
    """

    roster: Roster
    store: Stores
    gate: Callable[[], AbstractAsyncContextManager[None]]
    min_engines: int
    deadline_s: float
    _ways: dict[str, Fetching] = field(default_factory=dict[str, "Fetching"], init=False)
    """By transport; a `Delivery` keeps its group from update to update."""

    async def run(
        self, publish: Callable[[int], WeightManifest], *, version: int, kv: KV = "recompute"
    ) -> UpdateReport:
        """Update once; paused engines stay paused, and engines that wait for weights join.

        `publish` puts a version's weights into the store, in a thread.

        Raises:
            WeightsError: the tensors cannot be sent, or an engine refuses them; the weights are unchanged.
            UpdateError: fewer than `min_engines` made it; the engines left serve the previous version.
        """
        began = time.monotonic()
        asked = self.roster.updatable()
        self._need(asked, version, "before it began")
        manifest = await tensors_in_thread(lambda: publish(version), f"weight version {version}")
        way = self._way(manifest.transport)
        try:
            return await self._put_in_force(manifest, asked, way, began, kv=kv)
        finally:
            way.forget()  # also after a refusal or a rollback

    def _way(self, transport: str) -> Fetching:
        if transport not in self._ways:
            if transport != "shared_memory" and transport in plugged_as("delivery"):
                sender = self.store.of(transport)
                self._ways[transport] = plugged_in(f"delivery.{transport}")(sender, self.roster, self.deadline_s)
            else:
                self._ways[transport] = Fetching(self.roster, self.deadline_s)
        return self._ways[transport]

    async def _put_in_force(
        self, manifest: WeightManifest, asked: Sequence[Member], way: Fetching, began: float, *, kv: KV
    ) -> UpdateReport:
        """Run the rest of an update after its publication; see `run`."""
        published, version = time.monotonic(), manifest.version
        members, prepared = await way.ready(asked, manifest)
        ready = time.monotonic()
        self._need(updatable(members), version, "when they had prepared it")
        async with self.gate():
            closed = time.monotonic()
            applied = await self._apply(updatable(members), manifest, way, kv=kv)
            committed = [m for m in members if m.name in applied and m.updatable]
            await self._commit_or_go_back(committed, applied, manifest)
        opened = ended = time.monotonic()
        if self.roster.version == version:
            await tensors_in_thread(lambda: self._keep(manifest), f"the copy of weight version {version}")
            ended = time.monotonic()
        self._need(committed, version, "when it was applied")
        return UpdateReport(
            version=version,
            bytes=manifest.nbytes,
            seconds={
                "publish": published - began,
                "prepare": ready - published,
                "gate": opened - closed,
                "total": ended - began,
            },
            engines=tuple(
                replace(took := applied[m.name], seconds={"prepare": prepared[m.name], **took.seconds})
                for m in committed
            ),
            # The reason of the last death: an engine may have restarted since.
            failures={m.name: m.lifecycle.deaths[-1] for m in asked if m not in committed and m.lifecycle.deaths},
        )

    async def _commit_or_go_back(
        self, made_it: Sequence[Member], applied: Mapping[str, EngineUpdate], manifest: WeightManifest
    ) -> None:
        """Commit the version if enough engines have it, or roll it back on those that do."""
        if len(made_it) < self.min_engines:
            # An engine that waits for weights does not serve, and waits on.
            await self._roll_back([m for m in made_it if m.state in SERVABLE], manifest.version)
            return
        said: defaultdict[tuple[int, int, int], set[str]] = defaultdict(set)
        for member in made_it:
            said[member.layout].add(applied[member.name].checksum)
        self.roster.commit(manifest.version, made_it, said)

    def _keep(self, manifest: WeightManifest) -> None:
        """Let the store commit; its failure is only logged, as engines serve the version."""
        try:
            self.store.commit(manifest)
        except (PenstockError, RuntimeError, OSError, MemoryError) as error:
            logger.error(  # noqa: TRY400 - the message says what a traceback would
                "weight version %d is in force, but was not kept: %s; an engine that dies now, or is added, waits for "
                "the next update_weights", manifest.version, error,
            )  # fmt: skip

    async def _apply(
        self, members: Sequence[Member], manifest: WeightManifest, way: Fetching, *, kv: KV
    ) -> Mapping[str, EngineUpdate]:
        version = manifest.version
        # An engine that has applied the version continues its requests before the commit.
        self.roster.highest_version = max(self.roster.highest_version, version)
        if kv == "keep":  # for `keep_in_flight`, engines report which tokens attend to kept KV
            self.roster.keep_kv(version)

        for member in members:
            member.torn = member.info.instance  # until it has a version that is committed

        async def call(engine: ControlClient) -> EngineUpdate:
            return await engine.apply_weights(version, kv=kv)

        results = await way.apply(members, manifest, call)
        layouts = {m.name: m.layout for m in members if m.name in results}
        odd = odd_ones_out({name: update.checksum for name, update in results.items()}, layouts)
        for member in members:
            if member.name in odd:
                await self.roster.mark_dead(member, f"weight version {version}: {odd[member.name]}")
        return results

    async def _roll_back(self, members: Sequence[Member], version: int) -> None:
        """Give engines the weights before an uncommitted update; one that fails is DEAD."""
        before = self.store.current
        if before is None or before.version != self.roster.version:
            for member in members:  # loaded from disk, or sent natively: no process here has the bytes
                await self.roster.mark_dead(member, f"holds weight version {version}, which was not committed")
            return

        async def failed(member: Member, error: PenstockError) -> None:
            await self.roster.mark_dead(member, f"going back to weight version {before.version} failed: {error}")

        back = await fan_out(
            members, lambda engine: put(engine, before), deadline_s=2 * self.deadline_s, on_failure=failed
        )
        for member in members:
            member.torn = None if member.name in back.results else member.torn

    def _need(self, members: Sequence[Member], version: int, when: str) -> None:
        if len(members) >= self.min_engines:
            return
        missing = why(m for m in self.roster.members if m.state not in SERVABLE)
        raise UpdateError(
            f"weight version {version} was not committed: {len(members)} engines were good {when}, min_engines is "
            f"{self.min_engines}{missing and '; ' + missing}"
        )


def odd_ones_out(checksums: Mapping[str, str], layouts: Mapping[str, Hashable]) -> dict[str, str]:
    """Return engines with a rank's checksum unlike the majority's, with the reason.

    The majority is that of the layout. Only checksums of one rank and one kind (`manifest.kind_of`) are compared; one
    without a peer is believed. Without a strict majority the right one is unknown, so all are named.
    """
    said: defaultdict[tuple[Hashable, int, str], dict[str, str]] = defaultdict(dict)
    for name, layout in layouts.items():
        for rank, checksum in enumerate(by_rank(checksums[name])):
            said[layout, rank, kind_of(checksum)][name] = checksum
    odd: dict[str, str] = {}
    for (_, rank, _), peers in said.items():
        ((common, count), *_) = Counter(peers.values()).most_common()
        majority = 2 * count > len(peers)
        for name, checksum in peers.items():
            if not majority:
                agree_on_none = f"and its peers agree on none: {sorted(set(peers.values()))}"
                odd.setdefault(name, f"checksum {checksum} on rank {rank}, {agree_on_none}")
            elif checksum != common:
                odd.setdefault(name, f"checksum {checksum} on rank {rank} differs from its peers' {common}")
    return odd


class Operations:
    """Updates over a roster, and the fleet's state; `fleet/pausing.py` extends it.

    With fewer than `min_engines`, an update waits `recovery_timeout_s` for restarting ones. `paused`: the engines'
    initial state.
    """

    def __init__(
        self,
        roster: Roster,
        store: Stores,
        *,
        min_engines: int,
        control_timeout_s: float,
        recovery_timeout_s: float = 0.0,
        paused: bool = False,
    ) -> None:
        self.paused = paused
        """Whether the user has paused generation."""
        self.kv_stays = paused
        """Whether the pause in force may have left the KV caches as they were."""
        self.queue = OperationQueue(roster.occupation)
        self._roster = roster
        self._store = store
        self._min_engines = min_engines
        self._recovery_s = recovery_timeout_s
        self._control_s = control_timeout_s
        self._updater = Updater(roster, store, self._gate_closed, min_engines, control_timeout_s)
        self.asleep: frozenset[str] = frozenset()
        self._usable_from = 0
        """Oldest version that can serve; sleep level 2 dropped older weights from memory."""
        self._updating = False

    async def update(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int | None, *, kv: KV = "recompute"
    ) -> UpdateReport:
        """Update the weights once; see `Updater.run`. StateError: another update runs.

        If too few engines are left and some restart, it waits for those first.
        """
        return await self._update(lambda number: self._store.publish(number, named_tensors), version, kv)

    async def _update(self, publish: Callable[[int], WeightManifest], version: int | None, kv: KV) -> UpdateReport:
        self.queue.check_open()
        check_kv(kv)
        if self._updating:
            raise StateError("a weight update is under way; await it before the next one")

        async def run() -> UpdateReport:
            nonlocal begun
            begun = True
            try:
                self.check_weights_awake()
                self._require("plugin", "update_weights")
                number = self._roster.highest_version + 1 if version is None else version
                check_version(self._roster, number)
                if kv == "keep_in_flight":
                    self._require("kv_in_flight", f"update_weights with kv={kv!r}")
                return await self._updater.run(publish, version=number, kv=kv)
            finally:
                self._updating = False

        def enough_or_none_to_come() -> bool:
            members = self._roster.members
            return len(self._roster.live()) >= self._min_engines or not any(m.is_restarting for m in members)

        self._updating, begun = True, False
        try:
            await self._roster.until(enough_or_none_to_come, deadline_s=self._recovery_s)
            return await self.queue.run(run)
        finally:  # an update that has begun goes on without its cancelled caller
            if not begun:
                self._updating = False

    async def close(self) -> None:
        """Let no further operation begin, and cancel the one that runs."""
        await self.queue.close()

    def check_weights_awake(self) -> None:
        """Raise StateError while the engines' weights sleep."""
        if "weights" in self.asleep:
            raise StateError("the engines sleep; wake_up(['weights']) before an update")

    def _require(self, needed: Capability, operation: str) -> None:
        """Refuse an operation that some live engine cannot do, before asking any."""
        if lacking := [m.name for m in self._roster.live() if not getattr(m.info.capabilities, needed)]:
            raise plugged_in("capabilities.lacking")(lacking, needed, operation)

    @asynccontextmanager
    async def _gate_closed(self) -> AsyncGenerator[None]:
        """Close the gate for this block; then set it as the fleet's state requires."""
        try:
            await self._roster.gate(closed=True)
            yield
        finally:
            await self._set_gate()

    async def _set_gate(self) -> None:
        """Set the gate as the fleet's state requires, and send the engines' versions.

        If it fails, `router_process.keep_in_step` sends them later: changes of the engines hold even without a router.
        """
        stale = self._roster.version < self._usable_from
        closed = self.paused or bool(self.asleep) or stale
        try:
            await self._roster.gate(closed=closed)
        except PenstockError as error:
            state, version = "closed" if closed else "open", self._roster.version
            message = "the router does not know yet that its gate is %s and its engines serve weight version %d: %s"
            logger.warning(message, state, version, error)
