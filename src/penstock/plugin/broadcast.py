"""A worker's part in the group over which a trainer broadcasts weights."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportUninitializedInstanceVariable=false

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from penstock.errors import TransferError, WeightsError
from penstock.plugin.sources import Place
from penstock.weights.checksum import warm_up
from penstock.weights.collective import Group
from penstock.weights.group import GroupSpec
from penstock.weights.manifest import TensorEntry, WeightManifest
from penstock.weights.transfer import receive


def join_group(worker: Any, body: dict[str, Any]) -> None:
    """Let vLLM's worker begin to join a group (`GroupSpec` as JSON). WeightsError: it cannot."""
    spec = GroupSpec.from_json(body)
    rank = spec.rank_offset + _rank_of(worker.vllm_config.parallel_config)
    if rank >= spec.world_size:
        raise WeightsError(
            f"this worker would be rank {rank} of {spec.world_size}: the engine has more workers than was said"
        )
    leave_group(worker, f"group {spec.epoch} takes its place")
    device = worker.device if spec.backend == "nccl" else torch.device("cpu")
    worker._penstock_group = Group(spec, rank, device)  # noqa: SLF001
    threading.Thread(target=_join, args=(worker._penstock_group,), name="penstock-join", daemon=True).start()  # noqa: SLF001


def group_of(worker: Any) -> Group | None:
    """The group that a worker joined last, or is joining."""
    return getattr(worker, "_penstock_group", None)


def leave_group(worker: Any, why: str) -> None:
    """End a worker's part in its group."""
    group = group_of(worker)
    if group is not None:
        group.end(why)
        worker._penstock_group = None  # noqa: SLF001


def _join(group: Group) -> None:
    warm_up(group.device)
    with suppress(TransferError):  # kept in `group.cut`, and the trainer finds this rank absent
        group.join()


def _rank_of(parallel: Any) -> int:
    # Not `data_parallel_rank`, which vLLM resets to 0 in the workers of dense models.
    return parallel.data_parallel_index * parallel.world_size + parallel.rank


class BroadcastSource:
    """Receives over the group that the worker has joined; tensors go where `place` says, without a copy, over NCCL."""

    compares = True

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def prepare(self, manifest: WeightManifest) -> None:
        """Raise WeightsError unless the worker is in the group over which this version will be sent."""
        self._group(manifest)

    def tensors(self, manifest: WeightManifest, place: Place) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """Yield every tensor as it arrives. TransferError: it was cut, or is not what was sent; the model is torn."""
        try:
            group = self._group(manifest)
        except WeightsError as error:  # it ended since `prepare`; the trainer knows, and forms another one
            raise TransferError(str(error)) from error
        entries, bucket_bytes = manifest.tensors, int(manifest.location["bucket_bytes"])
        coming = receive(group, entries, bucket_bytes=bucket_bytes, place=place)
        # Host memory has room for all of it, and vLLM's reload cannot go on where it was cut: it begins at the end.
        yield from list(coming) if group.spec.backend == "tcp" else coming

    def _group(self, manifest: WeightManifest) -> Group:
        group, epoch = group_of(self._worker), manifest.location.get("epoch")
        if group is None or group.spec.epoch != epoch:
            has = "none" if group is None else f"group {group.spec.epoch}"
            raise WeightsError(f"this worker is not in group {epoch}, over which the weights come, but in {has}")
        if group.cut is not None or not group.ready:
            raise WeightsError(group.cut or f"group {epoch} is not formed yet")
        return group
