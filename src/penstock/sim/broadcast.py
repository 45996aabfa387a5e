"""The simulated engine's part in a broadcast: it joins the real group and receives the real bytes, and drops them."""

from __future__ import annotations

import asyncio
import threading
import zlib
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.errors import TransferError, WeightsError
from penstock.weights.group import GroupSpec
from penstock.weights.manifest import TensorEntry, WeightManifest

if TYPE_CHECKING:
    from penstock.weights.collective import Group


class SimGroup:
    """Of one engine, which is one worker. Needs torch from the first `join` on."""

    def __init__(self) -> None:
        self._group: Group | None = None

    def join(self, body: Any) -> None:
        """Begin to join a group, in the place of the one before it. Raises WeightsError where it cannot."""
        spec = GroupSpec.from_json(body)
        if spec.backend != "tcp":
            raise WeightsError(f"the simulated engine has no GPU, and the group runs over {spec.backend}")
        if self._group is not None:
            self._group.end(f"group {spec.epoch} takes its place")
            self._group = None
        threading.Thread(target=self._join, args=(spec,), name="sim-join", daemon=True).start()

    def check(self, manifest: WeightManifest) -> None:
        """Raise WeightsError unless the engine is in the group over which a version will be sent."""
        group, epoch = self._group, manifest.location.get("epoch")
        if group is None or group.spec.epoch != epoch or group.cut is not None or not group.ready:
            raise WeightsError(f"this engine is not in group {epoch}, over which the weights come")

    async def receive(self, manifest: WeightManifest) -> tuple[TensorEntry, ...]:
        """Receive a version: its tensors with the CRC-32 of what came.

        Raises:
            TransferError: it was cut, or is not what was sent.
        """
        group = self._group
        if group is None:
            raise TransferError("this engine is in no group")
        return await asyncio.to_thread(_receive, group, manifest)

    def _join(self, spec: GroupSpec) -> None:
        import torch  # noqa: PLC0415 - the simulated engine must start without it

        from penstock.weights.collective import Group  # noqa: PLC0415

        self._group = Group(spec, spec.rank_offset, torch.device("cpu"))
        with suppress(TransferError):  # the trainer finds this rank absent
            self._group.join()


def _receive(group: Group, manifest: WeightManifest) -> tuple[TensorEntry, ...]:
    import torch  # noqa: PLC0415

    from penstock.weights.transfer import receive  # noqa: PLC0415

    bucket_bytes = int(manifest.location["bucket_bytes"])
    return tuple(
        replace(entry, crc32=zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()))
        for entry, tensor in receive(group, manifest.tensors, bucket_bytes=bucket_bytes, place=lambda _: None)
    )
