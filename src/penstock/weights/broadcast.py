"""The transport `broadcast`: the trainer's store sends a version to one group of all engines' workers.

The group is formed while the engines generate. It is kept while the same engines are there, and then formed again with
the remaining engines. Engines may differ in size.
"""

from __future__ import annotations

import math
import secrets
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from penstock.checks import reading
from penstock.errors import StateError, TransferError, WeightsError
from penstock.guard import new_key
from penstock.weights.manifest import Source, Store, TensorEntry, WeightManifest

if TYPE_CHECKING:
    import torch

    from penstock.weights.group import Group
    from penstock.weights.manifest import Place

TRANSPORT = "broadcast"
TRAINER_RANK = 0
BUCKET_BYTES = 256 * 2**20
"""Bytes in one group of collectives. At NVLink's 370 GB/s they take 0.7 ms, against some 20 us for the launch. An
engine without a place for a tensor needs memory for two buckets, in addition to its KV cache."""
Backend = Literal["nccl", "tcp"]
Layout = tuple[int, int, int]
"""Numbers of TP, PP and DP ranks of one engine."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One group, and an engine's position in it.

    Attributes:
        address: address at which the trainer (rank 0) listens.
        port: port at that address.
        world_size: number of members: the trainer and every worker of every engine.
        rank_offset: rank of the first worker of the engine that receives this.
        epoch: name of the group. Every change of membership makes a new one.
        backend: `nccl` among GPUs, `tcp` among CPUs.
        timeout_s: seconds for forming the group, and for sending one version over it.
        key: secret that members prove to have. It is never shown.
    """

    address: str
    port: int
    world_size: int
    rank_offset: int
    epoch: str
    backend: Backend
    timeout_s: float
    key: str = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read the output of `to_json`. WeightsError: a field is missing or invalid."""
        fields: Any = data
        kinds: dict[str, Any] = {"port": int, "world_size": int, "rank_offset": int, "timeout_s": float}
        with reading("group", WeightsError):
            spec = cls(**{name: kinds.get(name, str)(fields[name]) for name in cls.__slots__})
        if spec.backend not in get_args(Backend):
            raise WeightsError(f"a group's backend is one of {', '.join(get_args(Backend))}, got {spec.backend!r}")
        if not (0 < spec.rank_offset < spec.world_size and 0 < spec.port < 2**16 and 0 < spec.timeout_s < float("inf")):
            raise WeightsError(f"malformed group {spec}: 0 < rank_offset < world_size, a port and a timeout are needed")
        if not spec.key:
            raise WeightsError(f"malformed group {spec}: it has no key")
        return spec


def rank_offsets(layouts: Sequence[Layout]) -> list[int]:
    """Return each engine's first rank, and last the size. The trainer has rank 0.

    A worker's rank is its engine's offset + `dp_rank * tp * pp` + its rank among the tp * pp workers of its replica.

    Raises:
        WeightsError: an engine has no worker.
    """
    for place, layout in enumerate(layouts):
        if min(layout) < 1:
            raise WeightsError(f"engine {place} of {len(layouts)} has {layout} TP, PP and DP ranks; each is at least 1")
    return list(accumulate((math.prod(layout) for layout in layouts), initial=TRAINER_RANK + 1))


class BroadcastStore(Store):
    """Sends a version while the engines receive it. Only `interrupt` may run concurrently with another call.

    `current` is always None, because the tensors remain the trainer's. The store listens only at `address`, where
    engines find it. Forming a group and sending a version may take `timeout_s` seconds each.
    """

    def __init__(
        self, *, address: str = "127.0.0.1", timeout_s: float = 60.0, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self._offer: tuple[tuple[TensorEntry, ...], Iterable[tuple[str, torch.Tensor]], torch.device] | None = None
        self._group: Group | None = None

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        """Check the tensors and sum them. No byte is copied, so they must not change until the update ends.

        An iterable that gives the same tensors each time need not hold all at once. A sharded model may gather one
        after another: here, for each `send`, and for a copy. An iterator is turned into a list.
        """
        from penstock.weights.transfer import describe  # noqa: PLC0415 - the core must import without torch

        self.check_open()
        self._offer = None
        again = list(named_tensors) if isinstance(named_tensors, Iterator) else named_tensors
        entries, device = describe(again)
        self._offer = (entries, again, device)
        return WeightManifest(version, TRANSPORT, {"bucket_bytes": str(self._bucket_bytes)}, entries)

    def adopt(self, manifest: WeightManifest) -> WeightManifest:
        """Raise WeightsError: another process cannot send over this process's group."""
        raise WeightsError(f"weights of the transport {manifest.transport!r} cannot be adopted by a store that sends")

    def offered(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the tensors of the last `publish`; none after `forget`."""
        return self._offer[1] if self._offer is not None else ()

    def forget(self) -> None:
        self._offer = None

    def close(self) -> None:
        super().close()
        self._offer = None
        self.interrupt("the trainer has closed the fleet")
        self._group = None

    def invite(self, layouts: Sequence[Layout]) -> list[dict[str, Any]]:
        """Replace the group with a new one for engines of these layouts. Then call `form`.

        Returns the `GroupSpec` for each engine, in their order. TransferError: this host cannot listen on the
        address.
        """
        from penstock.weights.group import Group, listen  # noqa: PLC0415 - the core must import without torch

        if self._offer is None:
            raise StateError("publish before a group is formed: the tensors' device decides over what it runs")
        self.interrupt("another group takes its place")
        *offsets, size = rank_offsets(layouts)
        device = self._offer[2]
        listener = listen(self._address)
        spec = GroupSpec(
            address=self._address,
            port=int(listener.getsockname()[1]),
            world_size=size,
            rank_offset=TRAINER_RANK + 1,
            epoch=secrets.token_hex(8),
            backend="nccl" if device.type == "cuda" else "tcp",
            timeout_s=self._timeout_s,
            key=new_key(),
        )
        self._group = Group(spec, TRAINER_RANK, device, listener)
        return [replace(spec, rank_offset=offset).to_json() for offset in offsets]

    def form(self) -> None:
        """Form the group with the invited engines. TransferError: see `absent`."""
        self._present_group().form()

    def absent(self, layouts: Sequence[Layout]) -> list[int]:
        """Return the indices of the invited engines that did not come, or left."""
        ranks = set(self._group.absent) if self._group is not None else set[int]()
        ends = rank_offsets(layouts)
        return [i for i in range(len(layouts)) if ranks & set(range(ends[i], ends[i + 1]))]

    def formed(self) -> bool:
        """Whether the group is formed and intact, on the device of the published tensors."""
        group = self._group
        if group is None or self._offer is None:
            return False
        return group.ready and group.cut is None and group.device == self._offer[2]

    def addressed(self, manifest: WeightManifest) -> WeightManifest:
        """Return the manifest with the epoch of the present group, for its engines."""
        return replace(manifest, location={**manifest.location, "epoch": self._present_group().spec.epoch})

    def send(self) -> None:
        """Send the published tensors to the group. Returns when all of them have left.

        Raises:
            TransferError: the group was cut, or the deadline passed. An engine without all the bytes is torn.
            WeightsError: the tensors differ from the published ones.
        """
        from penstock.weights.transfer import send  # noqa: PLC0415 - the core must import without torch

        if self._offer is None:
            raise StateError("nothing was published that could be sent")
        group, sent = self._present_group(), False
        try:
            send(group, self._offer[0], self._offer[1], bucket_bytes=self._bucket_bytes)
            sent = True
        finally:
            if not sent:  # any error, also one from iterating the trainer's tensors
                group.end(f"the trainer could not send: {sys.exception()}")

    def interrupt(self, why: str) -> None:
        """Cut the group. `form` and `send` return, and waiting engines get the reason."""
        if self._group is not None:
            self._group.end(why)

    def _present_group(self) -> Group:
        if self._group is None:
            raise TransferError("there is no group; invite the engines first")
        return self._group


class BroadcastSource(Source):
    """A worker's side: its latest group. Over NCCL, tensors are received in place, without a copy.

    Args:
        device: the worker's device; None if the worker has only host memory.
    """

    compares = True

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._group: Group | None = None

    def join(self, body: object, rank: int) -> None:
        """Start to join a group instead of the previous one. WeightsError: it cannot.

        `body` is `GroupSpec` as JSON, and `rank` this worker's rank among the workers of its engine.
        """
        import torch  # noqa: PLC0415 - the core must import without torch

        from penstock.weights.group import Group  # noqa: PLC0415

        spec = GroupSpec.from_json(body)
        if spec.rank_offset + rank >= spec.world_size:
            raise WeightsError(
                f"this worker would be rank {spec.rank_offset + rank} of {spec.world_size}: the engine has more "
                "workers than was said"
            )
        device = torch.device("cpu")
        if spec.backend == "nccl":
            if self._device is None or self._device.type != "cuda":
                raise WeightsError("this worker has no GPU, and the group runs over nccl")
            device = self._device
        if self._group is not None:
            self._group.end(f"group {spec.epoch} takes its place")
        self._group = Group(spec, spec.rank_offset + rank, device)
        threading.Thread(target=_join, args=(self._group,), name="penstock-join", daemon=True).start()

    def prepare(self, manifest: WeightManifest) -> None:
        """Raise WeightsError unless the worker is in this version's group."""
        self._group_of(manifest)

    def tensors(self, manifest: WeightManifest, place: Place) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """Yield every tensor as it arrives. TransferError: cut or damaged, and the model is torn."""
        from penstock.weights.transfer import receive  # noqa: PLC0415 - the core must import without torch

        try:
            group = self._group_of(manifest)
        except WeightsError as error:  # the group ended since `prepare`; the trainer knows this and forms another
            raise TransferError(str(error)) from error
        bucket_bytes = int(manifest.location["bucket_bytes"])
        coming = receive(group, manifest.tensors, bucket_bytes=bucket_bytes, place=place)
        # Host memory has room for the whole version. vLLM's reload cannot continue after a cut, so it comes last.
        yield from list(coming) if group.spec.backend == "tcp" else coming

    def _group_of(self, manifest: WeightManifest) -> Group:
        group, epoch = self._group, manifest.location.get("epoch")
        if group is None or group.spec.epoch != epoch:
            has = "none" if group is None else f"group {group.spec.epoch}"
            raise WeightsError(f"this worker is not in group {epoch}, over which the weights come, but in {has}")
        if group.cut is not None or not group.ready:
            raise WeightsError(group.cut or f"group {epoch} is not formed yet")
        return group


def _join(group: Group) -> None:
    from penstock.weights.transfer import warm_up  # noqa: PLC0415 - the core must import without torch

    warm_up(group.device)
    with suppress(TransferError):  # the reason is in `group.cut`, and the trainer finds this rank absent
        group.form()
