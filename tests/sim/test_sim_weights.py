"""A simulated engine reads the versions of every store."""

from __future__ import annotations

import pytest
import torch

from penstock.sim.update import check_manifest
from penstock.weights.delta import DeltaStore
from penstock.weights.disk import DiskStore
from penstock.weights.shared_memory import SharedMemoryStore


@pytest.fixture(params=[DiskStore, DeltaStore])
def store(tmp_path, request):
    store = request.param(tmp_path)
    yield store
    store.close()


def test_the_checksum_does_not_depend_on_the_transport(store):
    tensors = {"w": torch.randn(500), "v": torch.randn(3)}
    memory = SharedMemoryStore()
    for version in (1, 2, 3):
        tensors["w"][version] = 0
        manifest = store.publish(version, tensors.items())
        store.commit(manifest)
        assert check_manifest(manifest, None) == check_manifest(memory.publish(version, tensors.items()), None)
    memory.close()
