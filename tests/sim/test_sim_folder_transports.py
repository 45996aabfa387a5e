"""A simulated engine takes versions from a folder, and refuses what a real one refuses."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import WeightsError
from penstock.sim.update import check_manifest
from penstock.weights.delta import DeltaStore
from penstock.weights.disk import DiskStore
from penstock.weights.shared_memory import SharedMemoryStore


@pytest.fixture(params=[DiskStore, DeltaStore])
def store(tmp_path, request):
    store = request.param(tmp_path)
    yield store
    store.close()


def spoil(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_the_checksum_does_not_depend_on_the_transport(store):
    tensors = {"w": torch.randn(500), "v": torch.randn(3)}
    memory = SharedMemoryStore()
    for version in (1, 2, 3):
        tensors["w"][version] = 0
        manifest = store.publish(version, tensors.items())
        store.commit(manifest)
        assert check_manifest(manifest, None) == check_manifest(memory.publish(version, tensors.items()), None)
    memory.close()


def test_damaged_files_are_refused(store, tmp_path):
    tensors = {"w": torch.randn(500)}
    store.commit(store.publish(1, tensors.items()))
    if isinstance(store, DeltaStore):
        whole = store.current
        tensors["w"][3] += 1
        manifest = store.publish(2, tensors.items())
        spoil(tmp_path / manifest.location["delta"], 0)
        with pytest.raises(WeightsError, match="damaged"):
            check_manifest(manifest, None)
        spoil(tmp_path / whole.location["file"], -9)
    else:
        whole = store.current
        spoil(tmp_path / whole.location["file"], -9)
    with pytest.raises(WeightsError, match="'w' has the checksum"):
        check_manifest(whole, None)
    for file in tmp_path.glob("v*"):
        file.unlink()
    with pytest.raises(WeightsError, match="No such file"):
        check_manifest(whole, None)
