"""Where a fleet's versions lie, and which transport brings one to the engines: named, or chosen by their place."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from penstock.errors import WeightsError
from penstock.fleet.engines import visible_gpus
from penstock.fleet.member import Member
from penstock.rooms import plugged_in
from penstock.settings import FleetConfig, Transport
from penstock.weights.manifest import Store, TensorProvider, WeightManifest
from penstock.weights.shared_memory import SharedMemoryStore

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

SEND_SHARE = 0.5
"""Of the deadline of a control call, what sending a version may take: an engine that is cut off can still answer."""
LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]", "::1"})


class Stores:
    """One store for each transport that is used, made when it is first used; itself a store."""

    def __init__(self, settings: FleetConfig, members: Callable[[], Sequence[Member]], timeout_s: float) -> None:
        if settings.weight_transport == "delta":
            plugged_in("store_needs.delta")()  # refused here if it must be: before engines start
        self.settings = settings
        self._members = members
        self._timeout_s = timeout_s
        self._copies = SharedMemoryStore()
        self._stores: dict[str, Store] = {"shared_memory": self._copies}
        self._last: Store | None = None
        self._last_is_copy = False
        """Of what the trainer lent: engines of other hosts cannot have it."""
        self._ipc_devices: list[str] = []
        self._provider: TensorProvider | None = None
        """What gave the version that was published last, if it can be asked again."""
        self._lent: tuple[WeightManifest, TensorProvider] | None = None
        """The committed version, and what can give it again, where the trainer alone has its bytes."""

    @property
    def current(self) -> WeightManifest | None:
        """The last committed version, where its bytes can still be had."""
        return self._last.current if self._last is not None else None

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        """Choose the transport and publish by it; raises as that store's `publish` does."""
        from penstock.weights.pack import checked  # noqa: PLC0415 - the core must import without torch

        self._provider = named_tensors if isinstance(named_tensors, TensorProvider) else None
        gathers = getattr(named_tensors, "specs", None) is not None
        if gathers and self.settings.weight_transport == "cuda_ipc":
            raise WeightsError(
                "cuda_ipc shows engines weights that stay where they are, and a learner of several ranks gathers them "
                "layer by layer: set fleet.weight_transport to auto, shared_memory or broadcast"
            )
        if self.settings.weight_transport != "auto":
            return self._by(self.settings.weight_transport).publish(version, named_tensors)
        tensors = iter(named_tensors)
        again = tensors is not named_tensors
        first = next(checked(tensors))
        chosen = choose(first[1].device, self._members())
        chosen = "shared_memory" if gathers and chosen == "cuda_ipc" else chosen
        logger.debug("weight version %d goes by %s", version, chosen)
        begun = itertools.chain([first], tensors)
        return self._by(chosen).publish(version, _Begun(begun, named_tensors) if again else begun)

    def adopt(self, manifest: WeightManifest) -> WeightManifest:
        """Take over what another process published, by the transport that it chose."""
        return self.of(manifest.transport).adopt(manifest)

    def commit(self, manifest: WeightManifest) -> None:
        """The version is in force; of one whose bytes the trainer has alone, a copy is kept where that is asked for."""
        store = self._last = self.of(manifest.transport)
        store.commit(manifest)
        provider, self._provider, self._lent, self._last_is_copy = self._provider, None, None, False
        if (offered := store.offered()) is not None:
            self._lent = (manifest, provider) if provider is not None else None
            if self._keeps_copy():
                self._copy(manifest, offered)

    def weights_for(self, member: Member, version: int) -> WeightManifest | None:
        """Find where an engine that joins can have a version from; blocking.

        Returns:
            None where nothing here can give it that version: it waits for the next update.

        Raises:
            WeightsError: the trainer was asked again, and its tensors are not those any more; or what its code raises.
        """
        current = self.current
        if current is not None and current.version == version:
            return current if is_local(member) or not self._last_is_copy else None
        if self._lent is None or self._lent[0].version != version or not is_local(member):
            return None
        return self._copy(*self._lent)

    def _keeps_copy(self) -> bool:
        if (asked := self.settings.weight_host_copy) is not None:
            return asked
        members = self._members()
        return len(members) <= 1 and all(map(is_local, members))

    def _copy(self, manifest: WeightManifest, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        """Keep a version in shared memory. WeightsError: the tensors are not those that were sent."""
        copies = self._copies
        copies.current = None  # it is not the fleet's any more: one buffer is enough
        copy = copies.publish(manifest.version, named_tensors)
        plugged_in("lent.check")(manifest, copy, named_tensors)
        copies.commit(copy)
        self._last, self._last_is_copy = copies, True
        return copy

    def close(self) -> None:
        for store in self._stores.values():
            store.close()

    def of(self, transport: str) -> Store:
        """The store of a transport. WeightsError: there is none of that name."""
        if transport not in self._stores:
            self._stores[transport] = self._make(transport)
        return self._stores[transport]

    def _by(self, transport: Transport) -> Store:
        """The store to publish to, for the engines as they are now."""
        members, address = self._members(), self.settings.weight_address
        if transport == "broadcast" and address in LOOPBACK and not all(map(is_local, members)):
            others = ", ".join(member.name for member in members if not is_local(member))
            raise WeightsError(
                f"{others} cannot reach this trainer at {address}: set fleet.weight_address to the address that this "
                "host has in their network"
            )
        if transport == "cuda_ipc" and (devices := _devices(members)) != self._ipc_devices:
            self._ipc_devices = devices
            if (before := self._stores.pop(transport, None)) is not None:
                before.close()
        return self.of(transport)

    def _make(self, transport: str) -> Store:
        settings = self.settings
        if transport == "broadcast":
            return plugged_in("store.broadcast")(
                address=settings.weight_address, timeout_s=SEND_SHARE * self._timeout_s
            )
        if transport == "cuda_ipc":
            return plugged_in("store.cuda_ipc")(self._ipc_devices)
        if transport in {"disk", "delta"} and settings.weight_folder is not None:
            return plugged_in(f"store.{transport}")(settings.weight_folder)
        raise WeightsError(f"this fleet has no transport {transport!r}; set fleet.weight_transport, and its folder")


class _Begun:
    """What can be iterated again; its first pass goes on from the look at its first tensor, which began one."""

    def __init__(self, begun: Iterable[tuple[str, torch.Tensor]], again: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._begun: Iterable[tuple[str, torch.Tensor]] | None = begun
        self._again = again
        self.specs = getattr(again, "specs", None)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        begun, self._begun = self._begun, None
        yield from self._again if begun is None else begun


def choose(device: torch.device, members: Sequence[Member]) -> Transport:
    """The transport for tensors on a device of this process, by where the engines are.

    Bytes in host memory are mapped by engines of this host. Tensors on a GPU that an engine uses too are read there by
    it; NCCL refuses two ranks on one GPU. To engines with GPUs of their own they go over NVLink or the network.
    """
    local = all(is_local(member) for member in members)
    if device.type != "cuda":
        return "shared_memory" if local else "broadcast"
    of_engines = {gpu for member in members if is_local(member) for gpu in member.gpus}
    if local and all(member.info.engine == "sim" for member in members):
        return "shared_memory"
    names = visible_gpus()
    place = device.index or 0
    shared = place < len(names) and names[place] in of_engines
    return "cuda_ipc" if shared else "broadcast"


def _devices(members: Sequence[Member]) -> list[str]:
    """GPUs of the engines as this process numbers them; none where they are not known."""
    names = visible_gpus()
    return [f"cuda:{names.index(gpu)}" for gpu in sorted({g for m in members for g in m.gpus}) if gpu in names]


def is_local(member: Member) -> bool:
    """Whether it runs on this host, as far as its address says."""
    return (urlsplit(member.url).hostname or "") in LOOPBACK
