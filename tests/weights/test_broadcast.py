"""Versions over real groups of processes: every bit arrives, and nobody waits for somebody who is gone."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from patience import WAIT_S
from penstock.errors import TransferError, WeightsError
from penstock.weights import group as group_module
from penstock.weights.broadcast import BroadcastStore, GroupSpec, rank_offsets
from penstock.weights.checksum import device_sums
from penstock.weights.manifest import ALIGNMENT
from penstock.weights.transfer import PACKED_BELOW, cut, describe

RECEIVER = """
import json, sys, os, signal
import torch
from penstock.weights.group import Group
from penstock.weights.checksum import device_sums
from penstock.weights.broadcast import GroupSpec
from penstock.weights.manifest import WeightManifest
from penstock.weights.transfer import receive

def at(number, order):
    if number == order.get("die"):
        os.kill(os.getpid(), signal.SIGKILL)
    if number == order.get("halt"):
        os.kill(os.getpid(), signal.SIGSTOP)

def tell(answer):
    print(json.dumps(answer), flush=True)

tell("ready")
for line in sys.stdin:
    order = json.loads(line)
    try:
        if "group" in order:
            spec = GroupSpec.from_json(order["group"])
            group = Group(spec, spec.rank_offset, torch.device("cpu"))
            group.form()
            tell("joined")
            continue
        manifest = WeightManifest.from_json(order["manifest"])
        got = {}
        tensors = receive(group, manifest.tensors, bucket_bytes=int(manifest.location["bucket_bytes"]), place=print)
        for number, (entry, tensor) in enumerate(tensors):
            same = tensor.dtype is getattr(torch, entry.dtype)
            got[entry.name] = [same, list(tensor.shape), device_sums([tensor])[0]]
            at(number, order)
        tell(got)
    except Exception as error:
        tell([type(error).__name__, str(error)])
"""


class Receiver:
    """A worker's side, in a process of its own."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RECEIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.usable = True

    def tell(self, order: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        self.usable = not {"die", "halt"} & order.keys()

    def said(self) -> Any:
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Ends:
    """A store and receivers, which take part in one group after another while they live."""

    def __init__(self) -> None:
        self.receivers: list[Receiver] = []
        self.new()

    def new(self, timeout_s: float = WAIT_S) -> BroadcastStore:
        """Another store, and receivers that can take part."""
        self.store = BroadcastStore(timeout_s=timeout_s, bucket_bytes=5 * 2**20)
        for receiver in [receiver for receiver in self.receivers if not receiver.usable]:
            receiver.end()
            self.receivers.remove(receiver)
        missing = [Receiver() for _ in range(2 - len(self.receivers))]
        assert [receiver.said() for receiver in missing] == ["ready"] * len(missing)
        self.receivers += missing
        return self.store

    def form(self, count: int) -> list[Receiver]:
        able = [receiver for receiver in self.receivers if receiver.usable][:count]
        for receiver, spec in zip(able, self.store.invite([(1, 1, 1)] * count), strict=True):
            receiver.tell({"group": spec})
        self.store.form()
        assert [receiver.said() for receiver in able] == ["joined"] * count
        return able


@pytest.fixture(scope="module")
def both() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    for receiver in ends.receivers:
        receiver.end()


@pytest.fixture
def ends(both: Ends) -> Iterator[Ends]:
    both.new()
    yield both
    both.store.close()


def model(seed: int) -> list[tuple[str, torch.Tensor]]:
    """Tensors of every kind: none, one and many elements, packed and alone, larger than a bucket, not contiguous."""
    torch.manual_seed(seed)
    return [
        ("none", torch.zeros(0, 3)),
        ("scalar", torch.tensor(1.5)),
        ("small", torch.randn(7)),
        ("bf16", torch.randn(300, 11).bfloat16()),
        ("fp8", torch.randn(33).to(torch.float8_e4m3fn)),
        ("flags", torch.rand(5) > 0.5),
        ("whole", torch.randint(0, 99, (1_000_000,))),
        ("turned", torch.randn(700, 900).T),
        ("large", torch.randn(2_500_000)),
        ("last", torch.randn(3, 3)),
    ]


def sums(tensors: list[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    return {name: [True, list(t.shape), device_sums([t])[0]] for name, t in tensors}


def test_every_rank_gets_every_bit_again_and_again(ends: Ends) -> None:
    tensors = model(1)
    manifest = ends.store.publish(1, iter(tensors))
    assert not ends.store.formed()
    receivers = ends.form(2)
    for version in (1, 2):
        tensors = model(version)
        manifest = ends.store.publish(version, tensors)
        assert ends.store.formed()
        for receiver in receivers:
            receiver.tell({"manifest": ends.store.addressed(manifest).to_json()})
        ends.store.send()
        assert [receiver.said() for receiver in receivers] == [sums(tensors)] * 2
        ends.store.commit(manifest)
    assert ends.store.current is None  # nothing was kept


def test_one_that_dies_takes_nobody_along(ends: Ends) -> None:
    tensors = [(f"w{i}", torch.full((2**20,), float(i))) for i in range(24)]  # 96 MB: more than sockets hold
    manifest = ends.store.publish(1, tensors)
    one, other = ends.form(2)
    order = {"manifest": manifest.to_json()}
    one.tell(order)
    other.tell({**order, "die": 3})
    cutting = threading.Timer(3.0, ends.store.interrupt, ("engine e1 has ended",))
    cutting.start()
    began = time.monotonic()
    with pytest.raises(TransferError):
        ends.store.send()
    kind, message = one.said()
    cutting.cancel()
    cutting.join()  # before there is another group that it would cut
    assert (kind, time.monotonic() - began < 60) == ("TransferError", True), message
    assert not ends.store.formed()
    (again,) = ends.form(1)  # without the one that died
    again.tell(order)
    ends.store.send()
    assert again.said() == sums(tensors)


def test_without_a_word_the_deadline_ends_it(ends: Ends) -> None:
    ends.new(timeout_s=4.0)
    tensors = [(f"w{i}", torch.full((2**20,), float(i))) for i in range(24)]
    manifest = ends.store.publish(1, tensors)
    (one,) = ends.form(1)
    one.tell({"manifest": manifest.to_json(), "halt": 0})
    began = time.monotonic()
    with pytest.raises(TransferError, match="longer than 4 s"):
        ends.store.send()
    assert 3 <= time.monotonic() - began < 60
    one.process.send_signal(signal.SIGCONT)
    assert one.said()[0] == "TransferError"


def test_who_does_not_come_is_named(ends: Ends) -> None:
    ends.new(timeout_s=3.0)
    ends.store.publish(1, model(1))
    layouts = [(1, 1, 1), (1, 1, 2)]
    specs = ends.store.invite(layouts)
    assert [spec["rank_offset"] for spec in specs] == [1, 2]
    for receiver, spec in zip(ends.receivers, specs, strict=True):
        receiver.tell({"group": spec})
    group = ends.store._group
    assert group is not None
    assert group.missing(["here/1", "here/2"], 60) == []  # so that none of these two is late
    with pytest.raises(TransferError, match="not formed"):
        ends.store.form()
    assert ends.store.absent(layouts) == [1]  # its second worker
    assert [receiver.said()[0] for receiver in ends.receivers] == ["TransferError"] * 2


@pytest.mark.parametrize("timeout_s", [1.0, 60.0])
def test_a_rank_that_does_not_connect_holds_the_trainer_no_longer_than_it_may(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float
) -> None:
    """As NCCL waits, without end, for one that came and cannot be reached by it."""
    connecting, held = threading.Event(), threading.Event()

    def stuck(*_: Any) -> None:
        connecting.set()
        held.wait()

    monkeypatch.setattr(group_module.Group, "_connect_backend", stuck)
    store = BroadcastStore(timeout_s=timeout_s)
    store.publish(1, model(1))
    store.invite([(1, 1, 1)])
    assert store._group is not None
    store._group.set("here/1")
    said: list[str] = []

    def form() -> None:
        try:
            store.form()
        except TransferError as error:
            said.append(str(error))

    forming = threading.Thread(target=form, daemon=True)
    forming.start()
    try:
        assert connecting.wait(WAIT_S)
        if timeout_s > 1:  # else nobody says so
            store.interrupt("engine e1 is gone")
        forming.join(WAIT_S)
        assert said == ["engine e1 is gone" if timeout_s > 1 else "the broadcast took longer than 1 s"]
    finally:
        held.set()
        store.close()


def test_a_trainer_that_is_gone_ends_the_wait(ends: Ends) -> None:
    code = (
        "import json, sys\n"
        "import torch\n"
        "from penstock.weights.broadcast import BroadcastStore\n"
        "store = BroadcastStore(timeout_s=60.0)\n"
        "manifest = store.publish(1, [('w', torch.ones(9))])\n"
        "print(json.dumps(store.invite([(1, 1, 1)])), flush=True)\n"
        "store.form()\n"
        "print(json.dumps(manifest.to_json()), flush=True)\n"
        "sys.stdin.read()\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout
    try:
        one = ends.receivers[0]
        one.tell({"group": json.loads(trainer.stdout.readline())[0]})
        assert one.said() == "joined"
        one.tell({"manifest": json.loads(trainer.stdout.readline())})
        time.sleep(0.2)  # it waits for bytes by then; where it does not yet, it hears the same
        began = time.monotonic()
        os.kill(trainer.pid, signal.SIGKILL)
        assert one.said()[0] == "TransferError"
        assert time.monotonic() - began < 50
    finally:
        trainer.kill()
        trainer.communicate()


def test_other_tensors_than_those_described_are_not_taken_for_them(ends: Ends) -> None:
    weights = torch.ones(10)
    manifest = ends.store.publish(1, [("w", weights)])
    (one,) = ends.form(1)
    weights[3] = 2.0  # the trainer goes on while they are sent
    one.tell({"manifest": manifest.to_json()})
    ends.store.send()
    kind, message = one.said()
    assert (kind, "'w' arrived with the sum" in message) == ("TransferError", True), message
    assert "changed, or named_tensors gave another one" in message


def test_buckets_hold_every_tensor_once_and_no_more_than_they_may() -> None:
    draw = random.Random(3)
    for _ in range(200):
        sizes = [draw.choice((0, 1, 300, PACKED_BELOW - 1, PACKED_BELOW, 3 * 2**20)) for _ in range(draw.randrange(40))]
        limit = draw.choice((1, 2**20, 5 * 2**20))
        plan = cut(sizes, limit)
        assert [i for bucket in plan for i in range(bucket.start, bucket.stop)] == list(range(len(sizes)))
        for bucket in plan:
            held = sizes[bucket.start : bucket.stop]
            assert sum(held) <= limit or len([size for size in held if size]) == 1
            ends = 0
            for size, offset in zip(held, bucket.offsets, strict=True):
                assert (offset is None) == (size >= PACKED_BELOW)
                if offset is not None:
                    assert offset >= ends
                    assert offset % ALIGNMENT == 0
                    ends = offset + size
            assert ends <= bucket.packed_bytes


def test_a_malformed_group_is_refused() -> None:
    good = GroupSpec("127.0.0.1", 4000, 3, 1, "e", "tcp", 5.0, "secret")
    assert GroupSpec.from_json(good.to_json()) == good
    for wrong in (
        {"backend": "mpi"}, {"rank_offset": 3}, {"rank_offset": 0}, {"port": 0}, {"timeout_s": float("nan")},
        {"world_size": "many"}, {"key": ""}, {"backend": "gloo"},
    ):  # fmt: skip
        with pytest.raises(WeightsError, match="group") as refused:
            GroupSpec.from_json({**good.to_json(), **wrong})
        assert "secret" not in str(refused.value)
    assert "secret" not in repr(good)
    with pytest.raises(WeightsError):
        GroupSpec.from_json([1])
    with pytest.raises(WeightsError):
        GroupSpec.from_json({})


def test_a_pass_that_gathers_into_one_buffer_is_summed_tensor_by_tensor() -> None:
    """What is sent of it would be the last tensor three times; its sums must not fit that."""

    class Gathering:
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            buffer = torch.empty(4, 4)
            for value in (1.0, 2.0, 3.0):
                yield f"w{value:g}", buffer.fill_(value)

    entries, _ = describe(Gathering())
    alone = [(f"w{value:g}", torch.full((4, 4), value)) for value in (1.0, 2.0, 3.0)]
    assert entries == describe(alone)[0]
    assert len({entry.checksum for entry in entries}) == 3


ENDING = """
import time
from types import SimpleNamespace

import torch

from penstock.weights.group import Group
from penstock.weights.broadcast import GroupSpec

def abort():
    time.sleep(0.5)  # as NCCL's takes a while, outside Python
    print("aborted", flush=True)

group = Group(GroupSpec("127.0.0.1", 1, 2, 1, "an epoch", "tcp", 5.0, "key"), 1, torch.device("cpu"))
group._backend = SimpleNamespace(abort=abort)
group.end("the run is over")
"""


def test_a_process_that_ends_lets_the_abort_of_its_group_come_back_first() -> None:
    """What comes back from torch while Python ends takes the process along, with SIGABRT."""
    ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "aborted\n"), ended.stderr


@pytest.mark.parametrize(
    ("layouts", "offsets", "size"),
    [
        ([], [], 1),
        ([(2, 1, 1), (2, 1, 1), (2, 1, 1)], [1, 3, 5], 7),
        # Its index times its own size, as in loops of the field, would give 1, 3, 3 and 9: two engines on one rank.
        ([(4, 1, 1), (2, 1, 1), (1, 1, 1), (2, 2, 2)], [1, 5, 7, 8], 16),
        ([(1, 2, 1), (4, 1, 2), (1, 1, 1), (2, 2, 1)], [1, 3, 11, 12], 16),
    ],
)
def test_every_rank_belongs_to_exactly_one_worker(layouts: Any, offsets: list[int], size: int) -> None:
    assert rank_offsets(layouts) == [*offsets, size]
    taken = [0]
    for offset, layout in zip(offsets, layouts, strict=True):
        taken += range(offset, offset + math.prod(layout))
    assert taken == list(range(size))
