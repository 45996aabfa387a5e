"""The offer of new weights is checked against real memory or files, and against the model's tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sim_http import sim_client

from penstock.sim import SimConfig
from penstock.sim.update import check_manifest
from penstock.types import TensorSpec
from penstock.weights.delta import DeltaStore
from penstock.weights.disk import DiskStore
from penstock.weights.shared_memory import SharedMemoryStore

SPECS = (TensorSpec("a", "float32", (2, 2)), TensorSpec("b", "bfloat16", (3,)))


@pytest.fixture
def good():
    store = SharedMemoryStore()
    yield store.publish(9, [("a", torch.ones(2, 2)), ("b", torch.ones(3, dtype=torch.bfloat16))])
    store.close()


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
        (with_a(offset=510), "bytes, the manifest needs 526"),
    ],
)
async def test_what_does_not_fit_is_refused_and_changes_nothing(sim, good, spoil, words):
    before = await sim.get("/penstock/info")
    bad = replace(good, tensors=spoil(*good.tensors))
    status, answer = await sim.call("POST", "/penstock/weights/prepare", {"manifest": bad.to_json()})
    assert status == 400
    assert words in answer["error"]
    assert await sim.get("/penstock/info") == before
    assert (await sim.call("POST", "/penstock/weights/apply", {"version": 9}))[0] == 409


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
