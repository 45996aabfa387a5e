"""A local user without the group's key, while weights are broadcast: nothing is read, joined or disturbed."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from patience import WAIT_S, eventually
from penstock.errors import TransferError
from penstock.weights.broadcast import BroadcastStore, GroupSpec
from penstock.weights.group import Group, NcclStore, listen
from penstock.weights.transfer import receive

ATTACKER = """
import json, socket, sys
from datetime import timedelta
from torch.distributed import TCPStore

address, port = sys.argv[1], int(sys.argv[2])
got = b""
for sent in (b"", b"GET / HTTP/1.1\\r\\n\\r\\n", bytes(4096), b"S" + b"\\xff" * 200):
    with socket.create_connection((address, port), timeout=60) as connection:
        connection.sendall(sent)
        connection.settimeout(0.5)
        try:
            while piece := connection.recv(2**16):
                got += piece
        except OSError:
            pass
idle = [socket.create_connection((address, port), timeout=60) for _ in range(200)]
try:
    store = TCPStore(address, port, None, False, timedelta(seconds=2), wait_for_workers=False)
    store.set("here/1", "")
    joined = True
except Exception:
    joined = False
print(json.dumps({"bytes": len(got), "joined": joined}), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def store() -> Any:
    store = BroadcastStore(timeout_s=60.0)
    yield store
    store.close()


SPEC = GroupSpec("127.0.0.1", 1, 2, 1, "an epoch", "tcp", WAIT_S, "key")


def member(told: Any, **other: Any) -> Group:
    spec = GroupSpec.from_json({**told, **other})
    return Group(spec, spec.rank_offset, torch.device("cpu"))


def members(store: BroadcastStore, count: int) -> None:
    """Wait until the trainer has so many."""
    asyncio.run(eventually(lambda: len(store._present_group()._peers) == count))


def in_thread(work: Any) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_stranger_neither_joins_nor_reads_nor_disturbs(store: BroadcastStore) -> None:
    tensors = [("w", torch.arange(2_000_000.0)), ("v", torch.ones(3))]
    manifest = store.publish(1, tensors)
    (told,) = store.invite([(1, 1, 1)])
    argv = [sys.executable, "-c", ATTACKER, told["address"], str(told["port"])]
    attacker = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert attacker.stdout is not None
        found = json.loads(attacker.stdout.readline())  # its connections stay open from here on
        assert found["joined"] is False
        assert found["bytes"] <= 4 * 32, "a random number for each connection, and nothing else"
        got: dict[str, torch.Tensor] = {}
        spec = GroupSpec.from_json(told)
        receiver = Group(spec, spec.rank_offset, torch.device("cpu"))

        def take_part() -> None:
            receiver.form()
            coming = receive(receiver, manifest.tensors, bucket_bytes=2**20, place=lambda _: None)
            got.update({entry.name: tensor.clone() for entry, tensor in coming})

        taking = in_thread(take_part)
        store.form()
        again = Group(spec, spec.rank_offset, torch.device("cpu"))
        again.connect()  # the strangers' connections keep no member out
        members(store, 2)
        again.end("it only knocked")
        members(store, 1)  # what is sent to one that is leaving cuts the group
        store._bucket_bytes = 2**20
        store.send()
        taking.join(60)
        assert all(torch.equal(got[name], tensor) for name, tensor in tensors)
    finally:
        attacker.kill()
        attacker.communicate()


def test_who_does_not_know_the_key_is_no_member(store: BroadcastStore) -> None:
    store.publish(1, [("w", torch.ones(3))])
    (told,) = store.invite([(1, 1, 1)])
    for key in ("guess", told["epoch"], told["key"][:-1]):
        with pytest.raises(OSError):  # noqa: PT011 - however the connection ends
            member(told, key=key).connect()
    with pytest.raises(TransferError):
        member(told, key="guess", timeout_s=5.0).form()
    assert store._group is not None
    assert store._group.missing(["here/1"], 0.0) == ["here/1"]


def test_a_member_takes_nothing_from_who_does_not_have_the_key() -> None:
    """Such as one who listens where the trainer did."""
    with socket.create_server(("127.0.0.1", 0)) as fake:

        def answer() -> None:
            connection, _ = fake.accept()
            with connection:
                connection.sendall(bytes(32))
                connection.recv(64, socket.MSG_WAITALL)
                connection.sendall(bytes(32))
                connection.recv(1)

        answering = in_thread(answer)
        with pytest.raises(ConnectionRefusedError, match="does not have the group's key"):
            member(SPEC.to_json(), port=fake.getsockname()[1]).connect()
        answering.join(WAIT_S)


def test_the_key_of_a_group_is_good_for_that_group_alone(store: BroadcastStore) -> None:
    store.publish(1, [("w", torch.ones(3))])
    first, second = store.invite([(1, 1, 1)])[0], store.invite([(1, 1, 1)])[0]
    assert first["key"] != second["key"]
    with pytest.raises(OSError):  # noqa: PT011
        member(second, key=first["key"]).connect()


def test_torch_takes_our_store_for_one_of_its_own() -> None:
    """NCCL needs GPUs; gloo asks more of a store than NCCL does."""
    listener = listen("127.0.0.1")
    spec = replace(SPEC, port=listener.getsockname()[1])
    trainer = Group(spec, 0, torch.device("cpu"), listener)
    one = member(spec.to_json())
    one.connect()
    one.set("here/1")
    assert trainer.missing(["here/1"], WAIT_S) == []
    stores = [NcclStore(trainer), NcclStore(one)]
    sums: list[float] = [0.0, 0.0]

    def rank(number: int) -> None:
        prefixed = c10d.PrefixStore("p", stores[number])
        group = c10d.ProcessGroupGloo(prefixed, number, 2, timedelta(seconds=WAIT_S))
        tensor = torch.tensor([1.0 + number])
        group.allreduce([tensor]).wait()
        sums[number] = tensor.item()

    other = in_thread(lambda: rank(1))
    rank(0)
    other.join(WAIT_S)
    one.end("done")
    trainer.end("done")
    assert sums == [3.0, 3.0]
