"""The offer of new weights is checked against real memory or files, and against the model's tensors."""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import replace

import pytest
import torch
from sim_http import sim_client

from penstock.errors import WeightsError
from penstock.sim import SimConfig
from penstock.sim.update import check_manifest
from penstock.types import TensorSpec
from penstock.weights.delta import DeltaStore
from penstock.weights.disk import DiskStore
from penstock.weights.manifest import TensorEntry, WeightManifest
from penstock.weights.shared_memory import SharedMemoryStore, path_of, sealed_memory

SPECS = (TensorSpec("a", "float32", (2, 2)), TensorSpec("b", "bfloat16", (3,)))
BYTES = {"a": struct.pack("<4f", 1, -2, 3, 4), "b": struct.pack("<3H", 0x3F80, 0xBF80, 0x7F7F)}
OFFSETS = {"a": 0, "b": 256}


@pytest.fixture
def offer():
    """Puts tensors into sealed memory and describes them."""
    fds = []

    def write(version: int) -> WeightManifest:
        fd, memory = sealed_memory("test-weights", 512)
        fds.append(fd)
        entries = []
        for spec in SPECS:
            raw, start = BYTES[spec.name], OFFSETS[spec.name]
            memory[start : start + len(raw)] = raw
            entries.append(TensorEntry(spec.name, spec.dtype, spec.shape, start, zlib.crc32(raw)))
        return WeightManifest(version, "shared_memory", {"path": path_of(fd)}, tuple(entries))

    yield write
    for fd in fds:
        os.close(fd)


@pytest.fixture(scope="module")
async def sim():
    async with sim_client(SimConfig(tensor_specs=SPECS)) as client:
        yield client


def with_a(**change):
    return lambda a, b: (replace(a, **change), b)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda a, _: (a,), "1 tensors of the engine's model are missing: b"),
        (lambda a, b: (a, b, replace(a, name="c")), "1 tensors are not in the engine's model: c"),
        (with_a(shape=(4,)), "shape (4,)"),
        (with_a(dtype="float64"), "is float64; the engine takes float32"),
        (with_a(dtype="complex"), "unknown dtype"),
        (with_a(checksum=1), "checksum"),
        (with_a(offset=510), "they are 512 bytes, the manifest needs 526"),
    ],
)
async def test_what_does_not_fit_is_refused_and_changes_nothing(sim, offer, spoil, words):
    before = await sim.get("/penstock/info")
    good = offer(9)
    bad = replace(good, tensors=spoil(*good.tensors))
    status, answer = await sim.call("POST", "/penstock/weights/prepare", {"manifest": bad.to_json()})
    assert status == 400
    assert words in answer["error"]
    assert await sim.get("/penstock/info") == before
    assert (await sim.call("POST", "/penstock/weights/apply", {"version": 9}))[0] == 409


@pytest.mark.parametrize("body", [{}, {"manifest": 3}, {"manifest": {"version": 1}}])
async def test_malformed_manifests_are_refused(sim, body):
    status, answer = await sim.call("POST", "/penstock/weights/prepare", body)
    assert (status, "manifest" in answer["error"]) == (400, True)
    assert (await sim.call("POST", "/penstock/weights/apply", {"version": "x"}))[0] == 400


@pytest.fixture(params=[DiskStore, DeltaStore])
def store(tmp_path, request):
    store = request.param(tmp_path)
    yield store
    store.close()


def flip(path, at):
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
    whole = store.current
    if isinstance(store, DeltaStore):
        tensors["w"][3] += 1
        manifest = store.publish(2, tensors.items())
        flip(tmp_path / manifest.location["delta"], 0)
        with pytest.raises(WeightsError, match="damaged"):
            check_manifest(manifest, None)
    flip(tmp_path / whole.location["file"], -9)
    with pytest.raises(WeightsError, match="'w' has the checksum"):
        check_manifest(whole, None)
    for file in tmp_path.glob("v*"):
        file.unlink()
    with pytest.raises(WeightsError, match="No such file"):
        check_manifest(whole, None)
