"""The stores of a fleet's weight versions, and the choice of a transport for each version."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from penstock.fleet.member import Member
from penstock.rooms import plugged_in
from penstock.settings import FleetConfig, Transport
from penstock.weights.manifest import Store, TensorProvider, WeightManifest
from penstock.weights.shared_memory import SharedMemoryStore

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]", "::1"})


class Stores:
    """One store for each transport, made at its first use. It is itself a store."""

    def __init__(self, settings: FleetConfig, members: Callable[[], Sequence[Member]], timeout_s: float) -> None:
        if settings.weight_transport == "delta":
            plugged_in("store_needs.delta")()  # refuses before engines start
        self.settings = settings
        self._members = members
        self._timeout_s = timeout_s
        self._stores: dict[str, Store] = {"shared_memory": SharedMemoryStore()}
        self.last: Store | None = None
        """Store of the last committed version."""
        self._provider: TensorProvider | None = None
        """Provider of the version published last, if it can be asked again."""
        self.lent: Any = None
        """The committed version, if the trainer keeps the bytes (`transports.LentVersion`)."""

    @cached_property
    def _others(self) -> Any:
        """The other transports than shared memory (`transports.OtherTransports`)."""
        return plugged_in("transports")(self.settings, self._members, self._timeout_s, self._stores)

    @property
    def current(self) -> WeightManifest | None:
        """The last committed version, if its bytes are still available."""
        if self.lent is not None:
            return self.lent.copy
        return self.last.current if self.last is not None else None

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        """Choose the transport and publish by it; raises as that store's `publish`."""
        from penstock.weights.pack import checked  # noqa: PLC0415 - the core must import without torch

        self._provider = named_tensors if isinstance(named_tensors, TensorProvider) else None
        gathers = getattr(named_tensors, "specs", None) is not None
        if self.settings.weight_transport != "auto":
            return self._by(self.settings.weight_transport, gathers=gathers).publish(version, named_tensors)
        tensors = iter(named_tensors)
        again = tensors is not named_tensors
        first = next(checked(tensors))
        chosen = choose(first[1].device, self._members())
        chosen = "shared_memory" if gathers and chosen == "cuda_ipc" else chosen
        logger.debug("weight version %d goes by %s", version, chosen)
        begun = itertools.chain([first], tensors)
        return self._by(chosen, gathers=gathers).publish(version, _Begun(begun, named_tensors) if again else begun)

    def adopt(self, manifest: WeightManifest) -> WeightManifest:
        """Take over a version that another process published, by the transport it chose."""
        return self.of(manifest.transport).adopt(manifest)

    def commit(self, manifest: WeightManifest) -> None:
        """Note that a version is in force; keep a copy of lent bytes if the config asks."""
        store = self.last = self.of(manifest.transport)
        store.commit(manifest)
        provider, self._provider, self.lent = self._provider, None, None
        if (offered := store.offered()) is not None:
            self.lent = self._others.lent(manifest, provider)
            if self._others.keeps_copy():
                self.lent.make_copy(offered)

    def close(self) -> None:
        for store in self._stores.values():
            store.close()

    def of(self, transport: str) -> Store:
        """Return the store of a transport. WeightsError: there is no such transport."""
        if transport not in self._stores:
            self._stores[transport] = self._others.make(transport)
        return self._stores[transport]

    def _by(self, transport: Transport, *, gathers: bool) -> Store:
        """Return the store to publish to, for the present engines."""
        if transport != "shared_memory":
            self._others.fit(transport, gathers=gathers)
        return self.of(transport)


class _Begun:
    """Tensors that can be iterated again; the first pass continues the one that read the first tensor."""

    def __init__(self, begun: Iterable[tuple[str, torch.Tensor]], again: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._begun: Iterable[tuple[str, torch.Tensor]] | None = begun
        self._again = again
        self.specs = getattr(again, "specs", None)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        begun, self._begun = self._begun, None
        yield from self._again if begun is None else begun


def choose(device: torch.device, members: Sequence[Member]) -> Transport:
    """Return the transport for tensors on a device of this process to these engines.

    Engines of this host map bytes in host memory. See `transports.choose_remote` for others, and for tensors on a GPU.
    """
    if device.type != "cuda" and all(is_local(member) for member in members):
        return "shared_memory"
    return plugged_in("transports.choose")(device, members)


def is_local(member: Member) -> bool:
    """Return whether an engine runs on this host, according to its address."""
    return (urlsplit(member.url).hostname or "") in LOOPBACK
