"""CUDA IPC without a GPU: leases end however their lender ends, copies have to fit, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from patience import WAIT_S
from penstock.errors import StateError, WeightsError
from penstock.weights.cuda_ipc import CudaIpcStore, IpcSource, Lease, borrow
from penstock.weights.manifest import TensorEntry, WeightManifest

FORKING = """
import os, sys
from penstock.weights.cuda_ipc import Lease
lease = Lease()
print(lease.path, Lease().path, flush=True)  # nobody refers to the second one
if os.fork() == 0:
    others = os.pipe()  # may have the numbers of those that were closed
    lease.close()
    own = Lease()
    print("forked", len([os.fstat(fd) for fd in others]), os.path.exists(own.path), flush=True)
    own.close()
    os.read(int(sys.argv[1]), 1)
    os._exit(0)
input()
Lease().close()
lease.close()
input()
"""
MANIFEST = WeightManifest(3, "cuda_ipc", {"gpu-a": "{}"}, (TensorEntry("w", "float32", (2,), 0, 7),))


def test_a_lease_ends_when_it_is_closed():
    lease, ended = Lease(), threading.Event()
    borrow(lease.path, ended.set)
    assert not ended.wait(0.05)
    lease.close()
    lease.close()
    assert ended.wait(WAIT_S)
    with pytest.raises(WeightsError, match="lends its weights"):
        borrow(lease.path, ended.set)


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_a_lease_ends_while_a_forked_child_lives(how: str):
    until, end = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", FORKING, str(until)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=(until,),
    ) as lender:  # fmt: skip
        os.close(until)
        try:
            paths = lender.stdout.readline().split()
            assert lender.stdout.readline() == "forked 2 True\n"
            for path in paths:
                assert is_lent(path), "what the child closes are copies"
            ended = [threading.Event() for _ in paths]
            for path, event in zip(paths, ended, strict=True):
                borrow(path, event.set)
            if how == "closed":
                print(file=lender.stdin, flush=True)
                assert ended[0].wait(WAIT_S)
                assert is_lent(paths[1])
            lender.kill()
            assert all(event.wait(WAIT_S) for event in ended)
        finally:
            os.close(end)
            lender.kill()


def is_lent(path: str) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return os.read(fd, 1) != b""
    except BlockingIOError:  # nothing to read, and somebody who could write
        return True
    finally:
        os.close(fd)


def test_what_is_no_lease_is_not_read(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(WeightsError, match="not the lease"):
        borrow(str(file), lambda: None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the rest")
def test_without_a_gpu_both_sides_say_so():
    store = CudaIpcStore()
    with pytest.raises(WeightsError, match="torch sees none"):
        store.publish(1, [("w", torch.ones(2))])
    with pytest.raises(WeightsError, match="of GPUs"):
        CudaIpcStore(("cpu",))
    source = IpcSource(torch.device("cpu"))
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


def test_no_room_for_a_copy_is_told_with_what_to_do_and_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    store = CudaIpcStore()
    empty = torch.empty

    def full_after_a_kilobyte(shape: Any, **how: Any) -> torch.Tensor:
        if torch.Size(shape).numel() > 256:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(shape, **how | {"device": "cpu"})

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "empty", full_after_a_kilobyte)
    small, large = torch.zeros(256), torch.zeros(257)
    with pytest.raises(WeightsError, match=r"cuda:0 has no room .* 'large' \(1028 bytes, of cpu\) beside 1024 bytes"):
        store.publish(1, [("small", small), ("large", large)])
    assert store._copies == {}  # memory, which no answer shows
