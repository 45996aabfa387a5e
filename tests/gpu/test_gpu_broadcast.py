"""Versions over NCCL between two GPUs: every bit in place, at the speed of the link, and nobody hangs when one dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from penstock.errors import TransferError
from penstock.weights.broadcast import BroadcastStore

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

RECEIVER = """
import json, os, signal, sys, time
import torch
from penstock.weights.group import Group
from penstock.weights.checksum import device_sums
from penstock.weights.broadcast import GroupSpec
from penstock.weights.manifest import WeightManifest
from penstock.weights.transfer import receive

device = torch.device("cuda", int(sys.argv[1]))
torch.cuda.set_device(device)
places = {}

def tell(answer):
    print(json.dumps(answer), flush=True)

def place(entry):
    if entry.name not in places:
        places[entry.name] = torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype), device=device)
    return places[entry.name]

tell("ready")
for line in sys.stdin:
    order = json.loads(line)
    try:
        if "group" in order:
            spec = GroupSpec.from_json(order["group"])
            group = Group(spec, spec.rank_offset, device)
            began = time.perf_counter()
            group.form()
            tell(["joined", time.perf_counter() - began])
            continue
        manifest = WeightManifest.from_json(order["manifest"])
        in_place = order.get("in_place", True)
        bucket_bytes = int(manifest.location["bucket_bytes"])
        torch.cuda.synchronize()
        before, began = torch.cuda.memory_allocated(), time.perf_counter()
        torch.cuda.reset_peak_memory_stats()
        got = {}
        nowhere = lambda entry: None
        tensors = receive(group, manifest.tensors, bucket_bytes=bucket_bytes, place=place if in_place else nowhere)
        for number, (entry, tensor) in enumerate(tensors):
            if number == order.get("die"):
                os.kill(os.getpid(), signal.SIGKILL)
            if number == order.get("halt"):
                os.kill(os.getpid(), signal.SIGSTOP)
            if not in_place:
                got[entry.name] = tensor.clone()
            elif tensor.data_ptr() != place(entry).data_ptr():
                place(entry).copy_(tensor)
        torch.cuda.synchronize()
        seconds, peak = time.perf_counter() - began, torch.cuda.max_memory_allocated() - before
        kept = got if not in_place else places
        same = device_sums([kept[e.name] for e in manifest.tensors]) == [e.checksum for e in manifest.tensors]
        tell({"same": same, "seconds": seconds, "peak": peak})
        got.clear()
    except Exception as error:
        tell([type(error).__name__, str(error)])
"""


class Receiver:
    def __init__(self, gpu: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RECEIVER, str(gpu)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.said() == "ready"

    def tell(self, order: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def said(self) -> Any:
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def store() -> Iterator[BroadcastStore]:
    store = BroadcastStore(timeout_s=60.0)
    yield store
    store.close()


@pytest.fixture
def receivers() -> Iterator[list[Receiver]]:
    made = [Receiver(gpu) for gpu in range(1, torch.cuda.device_count())]
    yield made
    for receiver in made:
        receiver.end()


def model(layers: int, seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    """Shapes of an 8B model in bf16, with so many layers."""
    torch.manual_seed(seed)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda:0")

    tensors = [("embed", made(151936, 4096)), ("head", made(151936, 4096)), ("norm", made(4096))]
    for i in range(layers):
        tensors += [
            (f"{i}.q", made(4096, 4096)), (f"{i}.k", made(1024, 4096)), (f"{i}.v", made(1024, 4096)),
            (f"{i}.o", made(4096, 4096)), (f"{i}.gate", made(12288, 4096)), (f"{i}.up", made(12288, 4096)),
            (f"{i}.down", made(4096, 12288)), (f"{i}.n1", made(4096)), (f"{i}.n2", made(4096)),
            (f"{i}.qn", made(128)), (f"{i}.kn", made(128)),
        ]  # fmt: skip
    return tensors


def form(store: BroadcastStore, receivers: list[Receiver]) -> None:
    for receiver, spec in zip(receivers, store.invite([(1, 1, 1)] * len(receivers)), strict=True):
        receiver.tell({"group": spec})
    began = time.perf_counter()
    store.form()
    print(f"formed with {len(receivers)} in {time.perf_counter() - began:.2f} s:", [r.said() for r in receivers])


@pytest.mark.parametrize("in_place", [True, False])
def test_an_8b_model_arrives_whole(store: BroadcastStore, receivers: list[Receiver], *, in_place: bool) -> None:
    tensors = model(layers=36)
    store.publish(0, tensors)
    form(store, receivers)
    for version in (1, 2, 3, 4):
        tensors[1][1].fill_(version)
        began = time.perf_counter()
        manifest = store.publish(version, tensors)
        published = time.perf_counter() - began
        for receiver in receivers:
            receiver.tell({"manifest": manifest.to_json(), "in_place": in_place})
        time.sleep(0.2)  # they are ready by then: what is measured is the link
        began = time.perf_counter()
        store.send()
        sent = time.perf_counter() - began
        answers = [receiver.said() for receiver in receivers]
        print(
            f"in place {in_place}, version {version}: {manifest.nbytes / 1e9:.1f} GB checked in {published:.3f} s, "
            f"sent in {sent:.4f} s = {manifest.nbytes / sent / 1e9:.0f} GB/s; received in",
            [(round(answer["seconds"] - 0.2, 4), answer["peak"] // 2**20) for answer in answers],
        )
        assert all(answer["same"] for answer in answers)
        store.commit(manifest)
        if in_place and version > 1:  # beyond what is already there: packed tensors of two buckets
            assert all(answer["peak"] < 2**28 for answer in answers), answers


@pytest.mark.parametrize("how", ["die", "halt"])
def test_an_end_in_the_middle_holds_nobody(store: BroadcastStore, receivers: list[Receiver], how: str) -> None:
    tensors = model(layers=8)
    manifest = store.publish(1, tensors)
    form(store, receivers)
    *others, last = receivers
    for receiver in others:
        receiver.tell({"manifest": manifest.to_json()})
    last.tell({"manifest": manifest.to_json(), how: 0})
    # The fleet learns of a death by the engine's connection, of a hang by a deadline.
    threading.Timer(3.0, store.interrupt, ("an engine is gone",)).start()
    began = time.monotonic()
    try:
        store.send()  # an 8B model may have left before: the receiver's buffers are its own
    except TransferError as error:
        print(f"{how}: the trainer was let go after {time.monotonic() - began:.2f} s: {error}")
    time.sleep(max(0.0, 3.5 - (time.monotonic() - began)))
    print([receiver.said() for receiver in others])
    assert time.monotonic() - began < 20
    if how == "die":
        last.process.wait(10)
    else:
        os.kill(last.process.pid, signal.SIGKILL)
    last.end()
    receivers[-1] = Receiver(len(receivers))
    form(store, receivers)
    manifest = store.publish(2, tensors)
    for receiver in receivers:
        receiver.tell({"manifest": manifest.to_json()})
    store.send()
    assert all(receiver.said()["same"] for receiver in receivers)
