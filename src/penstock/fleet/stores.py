"""The stores of a fleet's weight versions, and the choice of a transport for each version."""

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
"""Share of a control call's deadline for sending a version, so that an engine that is cut off can still answer."""
LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]", "::1"})


class Stores:
    """One store for each transport, made at its first use. It is itself a store."""

    def __init__(self, settings: FleetConfig, members: Callable[[], Sequence[Member]], timeout_s: float) -> None:
        if settings.weight_transport == "delta":
            plugged_in("store_needs.delta")()  # refuses before engines start
        self.settings = settings
        self._members = members
        self._timeout_s = timeout_s
        self._copies = SharedMemoryStore()
        self._stores: dict[str, Store] = {"shared_memory": self._copies}
        self._last: Store | None = None
        self._last_is_copy = False
        """Whether the last version is a copy of lent weights, which engines on other hosts cannot read."""
        self._ipc_devices: list[str] = []
        self._provider: TensorProvider | None = None
        """Provider of the version published last, if it can be asked again."""
        self._lent: tuple[WeightManifest, TensorProvider] | None = None
        """The committed version and its provider, if only the trainer has the bytes."""

    @property
    def current(self) -> WeightManifest | None:
        """The last committed version, if its bytes are still available."""
        return self._last.current if self._last is not None else None

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        """Choose the transport and publish by it; raises as that store's `publish`."""
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
        """Take over a version that another process published, by the transport it chose."""
        return self.of(manifest.transport).adopt(manifest)

    def commit(self, manifest: WeightManifest) -> None:
        """Note that a version is in force; keep a copy of lent bytes if the config asks."""
        store = self._last = self.of(manifest.transport)
        store.commit(manifest)
        provider, self._provider, self._lent, self._last_is_copy = self._provider, None, None, False
        if (offered := store.offered()) is not None:
            self._lent = (manifest, provider) if provider is not None else None
            if self._keeps_copy():
                self._copy(manifest, offered)

    def weights_for(self, member: Member, version: int) -> WeightManifest | None:
        """Return the source of a version for a joining engine; this blocks.

        Returns:
            The manifest, or None if no store here has that version for it: it waits for the next update.

        Raises:
            WeightsError: the trainer was asked again, and its tensors have changed. Its own code may raise any error.
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
        """Keep a version in shared memory. WeightsError: the tensors were not those sent."""
        copies = self._copies
        copies.current = None  # the old copy is no longer the fleet's: one buffer is enough
        copy = copies.publish(manifest.version, named_tensors)
        plugged_in("lent.check")(manifest, copy, named_tensors)
        copies.commit(copy)
        self._last, self._last_is_copy = copies, True
        return copy

    def close(self) -> None:
        for store in self._stores.values():
            store.close()

    def of(self, transport: str) -> Store:
        """Return the store of a transport. WeightsError: there is no such transport."""
        if transport not in self._stores:
            self._stores[transport] = self._make(transport)
        return self._stores[transport]

    def _by(self, transport: Transport) -> Store:
        """Return the store to publish to, for the present engines."""
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

    Engines of this host map bytes in host memory. An engine reads tensors directly on a GPU that it shares, since NCCL
    refuses two ranks on one GPU. Engines with GPUs of their own receive them over NVLink or the network.
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
    """Return the engines' GPUs as this process numbers them, without unknown ones."""
    names = visible_gpus()
    return [f"cuda:{names.index(gpu)}" for gpu in sorted({g for m in members for g in m.gpus}) if gpu in names]


def is_local(member: Member) -> bool:
    """Return whether an engine runs on this host, according to its address."""
    return (urlsplit(member.url).hostname or "") in LOOPBACK
