"""The stores of a fleet's weight versions, and the choice of a transport for each version."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from penstock.aio import in_thread
from penstock.fleet.member import Member
from penstock.weights.manifest import Store, TensorProvider, WeightManifest
from penstock.weights.shared_memory import TRANSPORT, SharedMemoryStore

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
T = TypeVar("T")

LEAVE_S = 10.0
"""Seconds for a user's code to end once its result is not needed."""

LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]", "::1"})


class Stores:
    """The store of shared memory, and `others`: those of other transports (`transports.OtherTransports`).

    It is itself a store. `transport` is that of every version, or `auto`: chosen for each (`choose`).
    """

    def __init__(self, transport: str, members: Callable[[], Sequence[Member]], others: Any) -> None:
        self._transport = transport
        self._members = members
        self._others = others
        self._memory = SharedMemoryStore()
        self._last: Store | None = None
        """Store of the last committed version."""
        self._provider: TensorProvider | None = None
        """Provider of the version published last, if it can be asked again."""
        self._lent: Any = None
        """The committed version, if the trainer keeps the bytes (`transports.LentVersion`)."""

    @property
    def current(self) -> WeightManifest | None:
        """The last committed version, if its bytes are still available."""
        if self._lent is not None:
            return self._lent.copy
        return self._last.current if self._last is not None else None

    def for_engine(self, member: Member, version: int) -> WeightManifest | None:
        """Return the source of a version for a joining engine, or None if no store has it; this blocks.

        Raises:
            WeightsError: the trainer was asked again, and its tensors have changed. Its own code may raise any error.
        """
        if self._lent is not None:
            return self._lent.for_engine(member, version)
        return self.current if self.current is not None and self.current.version == version else None

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        """Choose the transport and publish by it; raises as that store's `publish`."""
        from penstock.weights.pack import checked  # noqa: PLC0415 - the core must import without torch

        self._provider = named_tensors if isinstance(named_tensors, TensorProvider) else None
        specs = getattr(named_tensors, "specs", None)
        gathers = specs is not None
        chosen = self._transport
        if chosen == "auto":
            tensors = iter(named_tensors)
            first = next(checked(tensors))
            chosen = self._choose(first[1].device, gathers=gathers)
            logger.debug("weight version %d goes by %s", version, chosen)
            begun = itertools.chain([first], tensors)
            # The first pass goes on with its second tensor: a pass may gather tensors on every rank of a trainer.
            passes = itertools.chain([begun], itertools.repeat(named_tensors))
            named_tensors = begun if tensors is named_tensors else TensorProvider(lambda: next(passes), specs)
        if chosen != TRANSPORT:
            self._others.fit(chosen, gathers=gathers)
        return self.of(chosen).publish(version, named_tensors)

    def adopt(self, manifest: WeightManifest) -> WeightManifest:
        """Take over a version that another process published, by the transport it chose."""
        return self.of(manifest.transport).adopt(manifest)

    def commit(self, manifest: WeightManifest) -> None:
        """Note that a version is in force; keep a copy of lent bytes if the config asks."""
        store = self._last = self.of(manifest.transport)
        store.commit(manifest)
        provider, self._provider, self._lent = self._provider, None, None
        if (offered := store.offered()) is not None:
            self._lent = self._others.lent(manifest, provider, self._memory)
            if self._others.keeps_copy():
                self._lent.make_copy(offered)

    def close(self) -> None:
        self._memory.close()
        self._others.close()

    def of(self, transport: str) -> Store:
        """Return the store of a transport. WeightsError: there is no such transport."""
        return self._memory if transport == TRANSPORT else self._others.of(transport)

    def _choose(self, device: torch.device, *, gathers: bool) -> str:
        """Return the transport for tensors on a device of this process to the present engines.

        Engines of this host map bytes in host memory. `OtherTransports.choose` decides for others, and for tensors on a
        GPU.
        """
        members = self._members()
        if device.type != "cuda" and all(is_local(member) for member in members):
            return TRANSPORT
        return self._others.choose(device, gathers=gathers)


async def tensors_in_thread(work: Callable[[], T], of: str) -> T:
    """Run `work`, which asks a user's code for tensors, in a thread that may be left."""
    return await in_thread(work, leave_s=LEAVE_S, asks=f"the tensors of {of}")


def is_local(member: Member) -> bool:
    """Return whether an engine runs on this host, according to its address."""
    return (urlsplit(member.url).hostname or "") in LOOPBACK
