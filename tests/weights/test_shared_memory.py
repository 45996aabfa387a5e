"""The store: what goes in comes out in another process, and nothing is left when its process ends."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest
import torch

from penstock.errors import StateError, WeightsError
from penstock.weights.manifest import ALIGNMENT, TensorEntry, WeightManifest
from penstock.weights.shared_memory import SharedMemoryStore, open_mapping, sealed_memory
from penstock.weights.transfer import read


@pytest.fixture
def store():
    store = SharedMemoryStore()
    yield store
    store.close()


def test_the_current_version_stays_while_the_next_is_written(store):
    first = store.publish(1, [("w", torch.ones(4))])
    store.commit(first)
    second = store.publish(2, [("w", torch.zeros(4))])
    refused = store.publish(3, [("w", torch.full((4,), 7.0))])  # version 2 was never committed
    assert first.location != second.location == refused.location
    mapping = open_mapping(first.location["path"], first.extent)
    assert dict(read(memoryview(mapping), first.tensors))["w"].tolist() == [1, 1, 1, 1]
    assert store.current is first


def test_a_tensor_after_one_of_odd_size_begins_where_a_device_may_read_any_dtype(store):
    odd, wide = torch.ones(3, dtype=torch.uint8), torch.tensor([1.5, -2.0], dtype=torch.float64)
    manifest = store.publish(1, [("odd", odd), ("wide", wide)])
    mapped = memoryview(open_mapping(manifest.location["path"], manifest.extent))
    for (_, found), sent in zip(read(mapped, manifest.tensors), (odd, wide), strict=True):
        assert found.data_ptr() % ALIGNMENT == 0
        assert torch.equal(found, sent)


def test_memory_that_a_reader_maps_keeps_its_size(store):
    for size in (4, 10_000):  # a larger version moves to a file of its own
        manifest = store.publish(1, [("w", torch.ones(size))])
        fd = os.open(manifest.location["path"], os.O_RDWR)
        for other in (0, 1_000_000):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, other)
        os.close(fd)


def test_memory_that_could_shrink_is_refused(store):
    """A reader of a mapping that shrinks is killed by SIGBUS."""
    fd = os.memfd_create("foreign", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    path = f"/proc/{os.getpid()}/fd/{fd}"
    with pytest.raises(WeightsError, match="not sealed"):
        open_mapping(path, 4096)
    with pytest.raises(WeightsError, match="not sealed"):
        store.adopt(WeightManifest(1, "shared_memory", {"path": path}, ()))
    os.close(fd)


PUBLISHER = """
import sys, orjson, torch
from penstock.weights.shared_memory import SharedMemoryStore
store = SharedMemoryStore()
for version in (1, 2, 3):
    manifest = store.publish(version, [("w", torch.full((1000,), float(version)))])
    store.commit(manifest)
    print(orjson.dumps(manifest.to_json()).decode(), flush=True)
    sys.stdin.readline()
"""


@contextmanager
def publisher() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", PUBLISHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def published(process: subprocess.Popen[str]) -> WeightManifest:
    assert process.stdout is not None
    return WeightManifest.from_json(orjson.loads(process.stdout.readline()))


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def values(manifest: WeightManifest) -> set[float]:
    mapping = open_mapping(manifest.location["path"], manifest.extent)
    return {value for _, tensor in read(memoryview(mapping), manifest.tensors) for value in tensor.tolist()}


def test_they_stay_when_their_publisher_is_killed() -> None:
    store = SharedMemoryStore()
    with publisher() as process:
        for version in (1, 2):
            manifest = store.adopt(published(process))
            store.commit(manifest)
            assert manifest.version == version
            assert manifest.location["path"].startswith(f"/proc/{os.getpid()}/fd/")
            go_on(process)
        third = published(process)
        assert values(manifest) == {2.0}, "the version after it was written beside it"
        assert values(store.adopt(third)) == {3.0}
        process.kill()
        process.wait()
    assert store.current is not None
    assert values(store.current) == {2.0}
    with pytest.raises(WeightsError, match="cannot open the weights"):
        store.adopt(third)
    own = store.publish(4, [("w", torch.zeros(5))])
    store.commit(own)
    assert values(own) == {0.0}
    store.close()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_at_most_two_are_kept_open() -> None:
    before = open_files()
    store, source = SharedMemoryStore(), SharedMemoryStore()
    opened = open_files()
    for version in range(1, 20):
        given = source.publish(version, [("w", torch.full((10,), float(version)))])
        source.commit(given)
        adopted = store.adopt(given)
        if version % 3:  # else its update did not commit
            store.commit(adopted)
    assert open_files() <= opened + 2 + 4, "two adopted, and both files of the source with a mapping of each"
    store.close()
    source.close()
    assert open_files() == before


@pytest.mark.parametrize(
    ("location", "transport"),
    [("/etc/passwd", "shared_memory"), ("", "shared_memory"), ("/proc/self/fd/0", "shared_memory"),
     ("/proc/1/fd/../environ", "shared_memory"), ("/proc/1/fd/3", "nccl")],
)  # fmt: skip
def test_what_is_no_stores_file_is_refused(location: str, transport: str) -> None:
    store = SharedMemoryStore()
    with pytest.raises(WeightsError, match=r"cannot be adopted|it is no store's file"):
        store.adopt(WeightManifest(1, transport, {"path": location}, ()))
    store.close()


def test_a_file_that_is_too_short_and_a_closed_store() -> None:
    store, source = SharedMemoryStore(), SharedMemoryStore()
    given = source.publish(1, [("w", torch.zeros(10))])
    beyond = TensorEntry("v", "float32", (1000,), 256, 0)
    longer = WeightManifest(1, given.transport, given.location, (*given.tensors, beyond))
    with pytest.raises(WeightsError, match="256 bytes, the manifest needs"):
        store.adopt(longer)
    store.close()
    with pytest.raises(StateError, match="closed"):
        store.adopt(given)
    source.close()


def test_memory_that_the_system_refuses_is_named() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(WeightsError, match=r"no 2097152 bytes of shared memory \(ulimit -f\?\): "):
            sealed_memory("penstock-test", 2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
