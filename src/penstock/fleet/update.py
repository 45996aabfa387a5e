"""The life of an update: published, prepared on all, applied on all behind the gate, and committed or not."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from penstock.engine.concurrent import in_thread
from penstock.errors import PenstockError, UpdateError, WeightsError
from penstock.fleet.control import fan_out
from penstock.fleet.lifecycle import Clock
from penstock.fleet.member import SERVABLE, EngineControl, Member, why
from penstock.fleet.roster import Roster
from penstock.fleet.sync import put, source
from penstock.types import EngineUpdate, UpdateReport
from penstock.weights.manifest import WeightManifest

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class Store(Protocol):
    """Where versions lie; `weights.shared_memory.SharedMemoryStore` is the real one."""

    current: WeightManifest | None
    """The last committed version; None before the first."""

    def publish(  # noqa: D102
        self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> WeightManifest: ...
    def adopt(self, manifest: WeightManifest) -> WeightManifest: ...  # noqa: D102
    def commit(self, manifest: WeightManifest) -> None: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Updater:
    """Brings new weights to every engine of a fleet.

    Attributes:
        roster: the engines.
        store: where the trainer's tensors go.
        gate: `async with gate():` closes the router's gate, and on the way out, however that is, puts it where the
            fleet wants it.
        min_engines: the update counts as committed if at least so many engines made it.
        deadline_s: seconds that each engine has for each step.
        clock: monotonic seconds.
    """

    roster: Roster
    store: Store
    gate: Callable[[], AbstractAsyncContextManager[None]]
    min_engines: int
    deadline_s: float
    clock: Clock = time.monotonic

    async def run(self, publish: Callable[[int], WeightManifest], *, version: int) -> UpdateReport:
        """One update; engines that are paused stay paused.

        Args:
            publish: puts the weights of a version into the store; called in a thread.
            version: of the weights.

        Raises:
            WeightsError: the tensors cannot be sent, or an engine refuses them; nothing was changed.
            UpdateError: fewer than `min_engines` made it; those that are left serve the version before it.
        """
        began = self.clock()
        members = self.roster.live()
        self._need(members, version, "before it began")
        manifest = await in_thread(lambda: publish(version))
        published = self.clock()
        prepared = await self._prepare(members, manifest)
        ready = self.clock()
        self._need(_alive(members), version, "when they had prepared it")
        async with self.gate():
            closed = self.clock()
            applied = await self._apply(_alive(members), version)
            committed = [m for m in members if m.name in applied and m.state in SERVABLE]
            if len(committed) < self.min_engines:
                await self._roll_back(committed, version)
            else:
                self.store.commit(manifest)
                self.roster.commit(version, {m.layout: applied[m.name].checksum for m in committed})
            await self.roster.push()
        opened = self.clock()
        self._need(committed, version, "when it was applied")
        return UpdateReport(
            version=version,
            bytes=manifest.nbytes,
            seconds={
                "publish": published - began,
                "prepare": ready - published,
                "gate": opened - closed,
                "total": opened - began,
            },
            engines=tuple(_with_prepare(applied[m.name], prepared[m.name]) for m in committed),
            failures=_failures(members),
        )

    async def _prepare(self, members: Sequence[Member], manifest: WeightManifest) -> Mapping[str, float]:
        async def seconds(engine: EngineControl) -> float:
            began = self.clock()
            await engine.prepare_weights(manifest)
            return self.clock() - began

        async def failed(member: Member, error: PenstockError) -> None:
            if not isinstance(error, WeightsError):
                await self.roster.bury(member, f"prepare of weight version {manifest.version} failed: {error}")

        outcome = await fan_out(members, seconds, deadline_s=self.deadline_s, on_failure=failed)
        for error in outcome.failures.values():
            if isinstance(error, WeightsError):
                raise error
        return outcome.results

    async def _apply(self, members: Sequence[Member], version: int) -> Mapping[str, EngineUpdate]:
        # An engine that has applied goes on with the requests it has, before anyone knows whether the update commits.
        self.roster.used = max(self.roster.used, version)

        async def failed(member: Member, error: PenstockError) -> None:
            await self.roster.bury(member, f"apply of weight version {version} failed: {error}", torn=True)

        outcome = await fan_out(
            members, lambda engine: engine.apply_weights(version), deadline_s=self.deadline_s, on_failure=failed
        )
        layouts = {m.name: m.layout for m in members if m.name in outcome.results}
        odd = odd_ones_out({name: update.checksum for name, update in outcome.results.items()}, layouts)
        for member in members:
            if member.name in odd:
                await self.roster.bury(member, f"weight version {version}: {odd[member.name]}", torn=True)
        return outcome.results

    async def _roll_back(self, members: Sequence[Member], version: int) -> None:
        """Give engines that took an update which did not commit the weights before it; who cannot is DEAD."""
        before = source(self.roster, self.store.current)
        if before is None:
            for member in members:  # as loaded from disk, or sent natively: the bytes are not here
                await self.roster.bury(member, f"holds weight version {version}, which was not committed", torn=True)
            return

        async def failed(member: Member, error: PenstockError) -> None:
            await self.roster.bury(member, f"going back to weight version {before.version} failed: {error}", torn=True)

        await fan_out(members, lambda engine: put(engine, before), deadline_s=2 * self.deadline_s, on_failure=failed)

    def _need(self, members: Sequence[Member], version: int, when: str) -> None:
        if len(members) >= self.min_engines:
            return
        missing = why(m for m in self.roster.members if m.state not in SERVABLE)
        raise UpdateError(
            f"weight version {version} was not committed: {len(members)} engines were good {when}, min_engines is "
            f"{self.min_engines}{missing and '; ' + missing}"
        )


def odd_ones_out(checksums: Mapping[str, str], layouts: Mapping[str, Hashable]) -> dict[str, str]:
    """Engines whose checksum is not that of the majority of their layout, with the reason.

    Without a strict majority nobody knows who is right, so all of that layout are named.
    """
    odd: dict[str, str] = {}
    for layout in set(layouts.values()):
        peers = {name: checksums[name] for name, its in layouts.items() if its == layout}
        ((common, count), *_) = Counter(peers.values()).most_common()
        majority = 2 * count > len(peers)
        for name, checksum in peers.items():
            if not majority:
                odd[name] = f"checksum {checksum}, and its peers agree on none: {sorted(set(peers.values()))}"
            elif checksum != common:
                odd[name] = f"checksum {checksum} differs from its peers' {common}"
    return odd


def _alive(members: Sequence[Member]) -> list[Member]:
    return [m for m in members if m.state in SERVABLE]


def _failures(members: Sequence[Member]) -> dict[str, str]:
    return {m.name: m.lifecycle.reason for m in members if m.state not in SERVABLE}


def _with_prepare(update: EngineUpdate, seconds: float) -> EngineUpdate:
    return replace(update, seconds={"prepare": seconds, **update.seconds})
