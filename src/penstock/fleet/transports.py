"""Transports besides shared memory: their choice, their stores, and copies of weights that stay with the trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

from penstock.aio import OwnThreads
from penstock.errors import WeightsError
from penstock.fleet.gpus import visible_gpus
from penstock.fleet.member import Member
from penstock.fleet.stores import LOOPBACK, Stores, is_local
from penstock.rooms import plugged_in
from penstock.settings import FleetConfig
from penstock.weights.manifest import Store, TensorProvider, WeightManifest

if TYPE_CHECKING:
    import torch

SEND_SHARE = 0.5
"""Share of a control call's deadline for sending a version, so that an engine that is cut off can still answer."""


def stores_of(settings: FleetConfig, members: Callable[[], Sequence[Member]], timeout_s: float) -> Stores:
    """Return the stores of a fleet; `timeout_s`: of a control call. WeightsError: a package is missing."""
    if settings.weight_transport == "delta":
        plugged_in("store_needs.delta")()  # refuses before engines start
    return Stores(settings.weight_transport, members, OtherTransports(settings, members, timeout_s))


class OtherTransports:
    """The stores of other transports than shared memory, each made at its first use."""

    def __init__(self, settings: FleetConfig, members: Callable[[], Sequence[Member]], timeout_s: float) -> None:
        self._settings = settings
        self._members = members
        self._timeout_s = timeout_s
        self._stores: dict[str, Store] = {}
        self._ipc_devices: list[str] = []

    def choose(self, device: torch.device, *, gathers: bool) -> str:
        """Return the transport for tensors that `Stores` does not put into shared memory at once.

        An engine reads tensors directly on a GPU that it shares, since NCCL refuses two ranks on one GPU. Engines with
        GPUs of their own receive them over NVLink or the network.
        """
        members = self._members()
        if device.type != "cuda":
            return "broadcast"
        of_engines = {gpu for member in members if is_local(member) for gpu in member.gpus}
        if all(is_local(member) and member.info.engine == "sim" for member in members):
            return "shared_memory"
        names = visible_gpus()
        place = device.index or 0
        if place >= len(names) or names[place] not in of_engines:
            return "broadcast"
        return "shared_memory" if gathers else "cuda_ipc"

    def of(self, transport: str) -> Store:
        """Return the store of a transport. WeightsError: there is no such transport."""
        if transport not in self._stores:
            self._stores[transport] = self._make(transport)
        return self._stores[transport]

    def close(self) -> None:
        for store in self._stores.values():
            store.close()

    def _make(self, transport: str) -> Store:
        settings = self._settings
        if transport == "broadcast":
            share_s = SEND_SHARE * self._timeout_s
            return plugged_in("store.broadcast")(address=settings.weight_address, timeout_s=share_s)
        if transport == "cuda_ipc":
            return plugged_in("store.cuda_ipc")(self._ipc_devices)
        if transport in {"disk", "delta"} and settings.weight_folder is not None:
            return plugged_in(f"store.{transport}")(settings.weight_folder)
        raise WeightsError(f"this fleet has no transport {transport!r}; set fleet.weight_transport, and its folder")

    def fit(self, transport: str, *, gathers: bool) -> None:
        """Fit a transport's store to the present engines before it publishes.

        Raises:
            WeightsError: an engine cannot reach this trainer, or a learner of several ranks `gathers` the tensors.
        """
        members, address = self._members(), self._settings.weight_address
        if gathers and transport == "cuda_ipc":
            raise WeightsError(
                "cuda_ipc shows engines weights that stay where they are, and a learner of several ranks gathers them "
                "layer by layer: set fleet.weight_transport to auto, shared_memory or broadcast"
            )
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

    def lent(self, manifest: WeightManifest, provider: TensorProvider | None, copies: Store) -> LentVersion:
        """Return a committed version whose bytes only the trainer has; `provider` can give them again."""
        return LentVersion(manifest, provider, copies, 2 * self._timeout_s)

    def keeps_copy(self) -> bool:
        """Return whether to copy a lent version at once."""
        if (asked := self._settings.weight_host_copy) is not None:
            return asked
        members = self._members()
        return len(members) <= 1 and all(map(is_local, members))


class LentVersion:
    """A committed version that its trainer lends, and its copy in shared memory once there is one."""

    def __init__(self, manifest: WeightManifest, provider: TensorProvider | None, copies: Store, ask_s: float) -> None:
        self._manifest = manifest
        self._provider = provider
        self._ask_s = ask_s  # in which the provider has to give its tensors again
        self._copies = copies
        self._copied = False

    @property
    def copy(self) -> WeightManifest | None:
        """The copy, which engines on other hosts cannot read."""
        return self._copies.current if self._copied else None

    def for_engine(self, member: Member, version: int) -> WeightManifest | None:
        """Return the copy if it is of this version; without one, ask the provider. See `Stores`."""
        if version != self._manifest.version or not is_local(member):
            return None
        if self._copied or (provider := self._provider) is None:
            return self.copy
        if provider.specs is None:  # else ranks gather one tensor after the other, so that none holds all
            asking: Future[list[tuple[str, torch.Tensor]]] = OwnThreads().submit(list, provider)
            if not wait((asking,), self._ask_s).done:  # its thread is left behind; it touches nothing of ours
                raise WeightsError(f"named_tensors did not give version {version} again within {self._ask_s:g} s")
            provider = TensorProvider(asking.result)
        return self.make_copy(provider)

    def make_copy(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        """Keep the version in shared memory. WeightsError: the tensors were not those sent."""
        copies = self._copies
        copies.current = None  # the old copy is no longer the fleet's: one buffer is enough
        copy = copies.publish(self._manifest.version, named_tensors)
        plugged_in("lent.check")(self._manifest, copy, named_tensors)
        copies.commit(copy)
        self._copied = True
        return copy


def _devices(members: Sequence[Member]) -> list[str]:
    """Return the engines' GPUs as this process numbers them, without unknown ones."""
    names = visible_gpus()
    return [f"cuda:{names.index(gpu)}" for gpu in sorted({g for m in members for g in m.gpus}) if gpu in names]
