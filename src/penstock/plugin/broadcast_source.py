"""A worker's source of the broadcast transport: it receives what the trainer sends while it loads."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from penstock.plugin.broadcast_worker import group_of
from penstock.plugin.sources import Place
from penstock.errors import TransferError, WeightsError
from penstock.weights.collective import Group
from penstock.weights.manifest import TensorEntry, WeightManifest
from penstock.weights.transfer import receive


class BroadcastSource:
    """Receives over the group that the worker has joined; tensors go where `place` says, without a copy, over NCCL."""

    partial = False
    compares = True

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def prepare(self, manifest: WeightManifest) -> None:
        """Raise WeightsError unless the worker is in the group over which this version will be sent."""
        self._group(manifest)

    def tensors(self, manifest: WeightManifest, place: Place) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """Every tensor as it arrives; all have, and are those that were sent, when the iterator ends.

        Raises:
            TransferError: the transfer was cut, or what came is not what was sent: the model is torn.
        """
        try:
            group = self._group(manifest)
        except WeightsError as error:  # it ended since `prepare`; the trainer knows, and forms another one
            raise TransferError(str(error)) from error
        entries, bucket_bytes = manifest.tensors, int(manifest.location["bucket_bytes"])
        coming = receive(group, entries, bucket_bytes=bucket_bytes, place=place)
        # In host memory there is room for all of it, and vLLM's reload, which takes layers apart, cannot begin anew
        # where it was cut: it begins when everything is here.
        yield from list(coming) if group.spec.backend == "tcp" else coming

    def _group(self, manifest: WeightManifest) -> Group:
        group, epoch = group_of(self._worker), manifest.location.get("epoch")
        if group is None or group.spec.epoch != epoch:
            has = "none" if group is None else f"group {group.spec.epoch}"
            raise WeightsError(f"this worker is not in group {epoch}, over which the weights come, but in {has}")
        if group.cut is not None or not group.ready:
            raise WeightsError(group.cut or f"group {epoch} is not formed yet")
        return group
