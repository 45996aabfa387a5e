"""Who borrows learns that the lease is over, however it ends; and what cuda_ipc refuses without a GPU."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from penstock.engine.vllm_plugin.ipc_source import IpcSource
from penstock.errors import StateError, WeightsError
from penstock.weights.cuda_ipc import CudaIpcStore, merge
from penstock.weights.lease import Lease, borrow
from penstock.weights.manifest import TensorEntry, WeightManifest

CHILD = "from penstock.weights.lease import Lease; print(Lease().path, flush=True); input()"
MANIFEST = WeightManifest(3, "cuda_ipc", {"gpu-a": "{}"}, (TensorEntry("w", "float32", (2,), 0, 7),))


def test_a_lease_ends_when_it_is_closed():
    lease, ended = Lease(), threading.Event()
    borrow(lease.path, ended.set)
    assert not ended.wait(0.05)
    lease.close()
    lease.close()
    assert ended.wait(10)
    with pytest.raises(WeightsError, match="lends its weights"):
        borrow(lease.path, ended.set)


def test_a_lease_ends_with_its_process():
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    ended = threading.Event()
    borrow(child.stdout.readline().strip(), ended.set)
    assert not ended.wait(0.05)
    child.kill()
    assert ended.wait(10)
    child.communicate()


def test_what_is_no_lease_is_not_read(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(WeightsError, match="not the lease"):
        borrow(str(file), lambda: None)


def test_ranks_that_show_the_same_tensors_are_merged():
    other = replace(MANIFEST, location={"gpu-b": "{}"})
    assert merge([MANIFEST, other]).location == {"gpu-a": "{}", "gpu-b": "{}"}
    for wrong in (replace(other, version=4), replace(other, transport="disk"), replace(other, tensors=())):
        with pytest.raises(WeightsError, match="same tensors"):
            merge([MANIFEST, wrong])
    with pytest.raises(WeightsError, match="no manifests"):
        merge([])


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the rest")
def test_without_a_gpu_both_sides_say_so():
    store = CudaIpcStore()
    with pytest.raises(WeightsError, match="torch sees none"):
        store.publish(1, [("w", torch.ones(2))])
    with pytest.raises(WeightsError, match="of GPUs"):
        CudaIpcStore(("cpu",))
    source = IpcSource(SimpleNamespace(device=torch.device("cpu")))
    with pytest.raises(WeightsError, match="engine on a GPU"):
        source.prepare(MANIFEST)
    store.close()
    with pytest.raises(StateError):
        store.publish(1, [("w", torch.ones(2))])


def test_a_store_of_shown_memory_has_no_current_version():
    store = CudaIpcStore()
    store.commit(store.adopt(MANIFEST))
    assert store.current is None
    with pytest.raises(WeightsError, match="'disk'"):
        store.adopt(replace(MANIFEST, transport="disk"))
    store.close()
