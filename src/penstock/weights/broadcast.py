"""The trainer's side of the transport `broadcast`: a store that sends a version to a group of all engines' workers.

The group is formed while the engines generate, kept while the same engines are there, and formed again with those that
are left. Engines may differ in size.
"""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from penstock.errors import StateError, TransferError, WeightsError
from penstock.guard import new_key
from penstock.weights.group import BUCKET_BYTES, GroupSpec, Rendezvous
from penstock.weights.manifest import TensorEntry, WeightManifest

if TYPE_CHECKING:
    import torch

    from penstock.weights.collective import Group

TRANSPORT = "broadcast"
TRAINER_RANK = 0
Layout = tuple[int, int, int]
"""TP, PP and DP ranks of one engine."""


def rank_offsets(layouts: Sequence[Layout]) -> list[int]:
    """Return the rank of each engine's first worker, shape `[len(layouts)]`: the trainer is 0, the engines follow.

    Within an engine a worker's rank is the offset + `dp_rank * tp * pp + its rank among the tp * pp of its replica`.

    Raises:
        WeightsError: an engine with no worker.
    """
    return _ends(layouts)[:-1]


def world_size(layouts: Sequence[Layout]) -> int:
    """Count the ranks of the whole group: the trainer and every worker. Raises as `rank_offsets` does."""
    return _ends(layouts)[-1]


def _ends(layouts: Sequence[Layout]) -> list[int]:
    for place, layout in enumerate(layouts):
        if min(layout) < 1:
            raise WeightsError(f"engine {place} of {len(layouts)} has {layout} TP, PP and DP ranks; each is at least 1")
    return list(accumulate((math.prod(layout) for layout in layouts), initial=TRAINER_RANK + 1))


class BroadcastStore:
    """Sends a version while the engines take it. Blocking; `interrupt` alone may be called beside another call.

    Args:
        address: where engines find the trainer; it listens there and nowhere else.
        timeout_s: seconds for forming a group, and for sending one version.
        bucket_bytes: what is under way at once, see `transfer.cut`.
    """

    def __init__(
        self, *, address: str = "127.0.0.1", timeout_s: float = 60.0, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.current: WeightManifest | None = None
        """Always None: what was sent is the trainer's alone."""
        self._address = address
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self._offer: tuple[tuple[TensorEntry, ...], Iterable[tuple[str, torch.Tensor]], torch.device] | None = None
        self._group: Group | None = None
        self._closed = False

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        """Check the tensors and sum them; no byte is copied, so they must not change before the update has ended.

        Args:
            version: what they will be served under.
            named_tensors: `(checkpoint name, tensor)`, dense. What can be iterated again, each time alike, need not
                hold all tensors at once, such as a sharded model that gathers one after another: once here, once for
                each `send`, once for a copy. An iterator is listed.

        Raises:
            WeightsError: a name twice, no tensor at all, a dtype no engine loads, NaN or infinity.
            StateError: the store is closed.
        """
        from penstock.weights.transfer import describe  # noqa: PLC0415 - the core must import without torch

        if self._closed:
            raise StateError("the store of weights is closed: its fleet was torn down")
        self._offer = None
        again = list(named_tensors) if iter(named_tensors) is named_tensors else named_tensors
        entries, device = describe(again)
        self._offer = (entries, again, device)
        location = {"bucket_bytes": str(self._bucket_bytes)}
        return WeightManifest(version=version, transport=TRANSPORT, location=location, tensors=entries)

    def adopt(self, manifest: WeightManifest) -> WeightManifest:
        """Refuse: another process cannot send over this one's group. Raises WeightsError."""
        raise WeightsError(f"weights of the transport {manifest.transport!r} cannot be adopted by a store that sends")

    def commit(self, manifest: WeightManifest) -> None:
        """Do nothing: the tensors are the trainer's, and no copy is kept."""

    def offered(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the tensors that were published last; none after `forget`."""
        return self._offer[1] if self._offer is not None else ()

    def forget(self) -> None:
        """Let go of what was published."""
        self._offer = None

    def close(self) -> None:
        """End the group."""
        self._closed = True
        self._offer = None
        self.interrupt("the trainer has closed the fleet")
        self._group = None

    def invite(self, layouts: Sequence[Layout]) -> list[dict[str, Any]]:
        """Open a new group in the place of the one before it.

        Args:
            layouts: TP, PP and DP ranks of each engine, shape `[engines]`.

        Returns:
            What to tell each engine (`GroupSpec`), in their order; then call `form`.

        Raises:
            TransferError: this host cannot listen on the address.
        """
        from penstock.weights.collective import Group  # noqa: PLC0415 - the core must import without torch

        if self._offer is None:
            raise StateError("publish before a group is formed: the tensors' device decides over what it runs")
        self.interrupt("another group takes its place")
        device = self._offer[2]
        key = new_key()
        rendezvous = Rendezvous(self._address, key)
        spec = GroupSpec(
            address=self._address,
            port=rendezvous.port,
            world_size=world_size(layouts),
            rank_offset=TRAINER_RANK + 1,
            epoch=secrets.token_hex(8),
            backend="nccl" if device.type == "cuda" else "tcp",
            timeout_s=self._timeout_s,
            key=key,
        )
        self._group = Group(spec, TRAINER_RANK, device, rendezvous)
        return [spec.at(offset).to_json() for offset in rank_offsets(layouts)]

    def form(self) -> None:
        """Form the group with the engines that were invited. TransferError: it could not be; see `absent`."""
        self._present_group().lead()

    def absent(self, layouts: Sequence[Layout]) -> list[int]:
        """Return which of the invited engines did not come, where `form` failed for that."""
        ranks = set(self._group.absent) if self._group is not None else set[int]()
        ends = [*rank_offsets(layouts), world_size(layouts)]
        return [i for i in range(len(layouts)) if ranks & set(range(ends[i], ends[i + 1]))]

    def formed(self) -> bool:
        """Whether the group is there and whole, for tensors where the published ones are."""
        group = self._group
        if group is None or self._offer is None:
            return False
        return group.ready and group.cut is None and group.device == self._offer[2]

    def addressed(self, manifest: WeightManifest) -> WeightManifest:
        """Return the manifest for the engines of the present group."""
        return replace(manifest, location={**manifest.location, "epoch": self._present_group().spec.epoch})

    def send(self) -> None:
        """Send what was published to the group; returns when all of it has left.

        Raises:
            TransferError: it was cut, or took longer than the deadline. An engine that did not get all of it is torn.
            WeightsError: the tensors are not those that were published.
        """
        from penstock.weights.transfer import send  # noqa: PLC0415 - the core must import without torch

        if self._offer is None:
            raise StateError("nothing was published that could be sent")
        group, sent = self._present_group(), False
        try:
            send(group, self._offer[0], self._offer[1], bucket_bytes=self._bucket_bytes)
            sent = True
        finally:
            if not sent:  # whatever the trainer's tensors raised
                group.end(f"the trainer could not send: {sys.exception()}")

    def interrupt(self, why: str) -> None:
        """Cut the group: `form` and `send` return, and every engine that still waits for bytes learns why not."""
        if self._group is not None:
            self._group.end(why)

    def _present_group(self) -> Group:
        if self._group is None:
            raise TransferError("there is no group; invite the engines first")
        return self._group
