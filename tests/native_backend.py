"""A weight-transfer backend of vLLM over shared memory, so that tests run native updates on CPUs, where NCCL cannot.

vLLM finds it by the entry point in `native_backend-1.dist-info`, which lies beside it on PYTHONPATH.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from penstock.plugin import worker
from penstock.weights.manifest import WeightManifest
from penstock.weights.shared_memory import open_mapping
from penstock.weights.transfer import read


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """One version: a `WeightManifest` in its JSON form."""

    manifest: dict[str, Any]


NAME = "tests_shm"


def register() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, "native_backend", "SharedMemoryWeightTransferEngine")


class SharedMemoryWeightTransferEngine(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    """Loads checkpoint-format tensors that lie in a shared-memory file of this host."""

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        """Nothing to do: the manifest of each update says where its bytes are."""

    def start_weight_update(self) -> None:
        """Put the layers into loading state; until `finish_weight_update` the model cannot run."""
        worker.begin(self.model)

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        manifest = WeightManifest.from_json(update_info.manifest)
        mapping = open_mapping(manifest.location["path"], manifest.extent)
        tensors = read(memoryview(mapping), manifest.tensors)
        worker.receive(self.model, ((name, tensor.to(self.device)) for name, tensor in tensors))

    def finish_weight_update(self) -> None:
        """Take the layers out of loading state, with the loaded weights in force."""
        worker.finish(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is held between updates."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any] | Any) -> None:
        """Refuse: vLLM 0.26 asks for a sender here, and ours is `SharedMemoryStore`."""
        del iterator, trainer_args
        raise TypeError("publish with penstock.weights.shared_memory.SharedMemoryStore; workers only read")
