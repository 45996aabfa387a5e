"""Weights that another process published, kept when it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest
import torch

from penstock.errors import StateError, WeightsError
from penstock.weights.manifest import TensorEntry, WeightManifest
from penstock.weights.pack import read
from penstock.weights.shared_memory import SharedMemoryStore, open_mapping

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
    with pytest.raises(WeightsError, match="cannot be adopted"):
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
