"""The offer of new weights is checked against real shared memory and against the model's tensors."""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import replace

import pytest
from sim_http import sim_client

from penstock.sim import SimConfig
from penstock.types import TensorSpec
from penstock.weights.manifest import TensorEntry, WeightManifest

SPECS = (TensorSpec("a", "float32", (2, 2)), TensorSpec("b", "bfloat16", (3,)))
BYTES = {"a": struct.pack("<4f", 1, -2, 3, 4), "b": struct.pack("<3H", 0x3F80, 0xBF80, 0x7F7F)}
OFFSETS = {"a": 0, "b": 256}


@pytest.fixture
def offer():
    """Writes tensors into a memfd and describes them."""
    fds = []

    def write(version: int, **changed: bytes) -> WeightManifest:
        fd = os.memfd_create("test-weights")
        fds.append(fd)
        os.ftruncate(fd, 512)
        entries = []
        for spec in SPECS:
            raw = changed.get(spec.name, BYTES[spec.name])
            os.pwrite(fd, raw, OFFSETS[spec.name])
            entries.append(TensorEntry(spec.name, spec.dtype, spec.shape, OFFSETS[spec.name], zlib.crc32(raw)))
        path = f"/proc/{os.getpid()}/fd/{fd}"
        return WeightManifest(version, "shared_memory", {"path": path}, tuple(entries))

    yield write
    for fd in fds:
        os.close(fd)


@pytest.fixture(scope="module")
async def sim():
    async with sim_client(SimConfig(tensor_specs=SPECS)) as client:
        yield client


async def test_prepare_and_apply(sim, offer):
    for version in (1, 2):
        assert await sim.post("/penstock/weights/prepare", {"manifest": offer(version).to_json()}) == {"ok": True}
        answer = await sim.post("/penstock/weights/apply", {"version": version, "kv": "recompute"})
        assert set(answer["seconds"]) == {"pause", "load", "resume", "bubble"}
        assert (answer["version"], answer["preempted"], len(answer["checksum"])) == (version, 0, 16)
        info = await sim.get("/penstock/info")
        assert (info["weight_version"], info["paused"]) == (version, False)


def without_b(m):
    return replace(m, tensors=m.tensors[:1])


def with_c(m):
    return replace(m, tensors=(*m.tensors, replace(m.tensors[0], name="c")))


def twice(m):
    return replace(m, tensors=(*m.tensors, m.tensors[0]))


def with_a(**change):
    return lambda m: replace(m, tensors=(replace(m.tensors[0], **change), m.tensors[1]))


def empty(m):
    return replace(m, tensors=())


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (without_b, "missing tensors: ['b']"),
        (with_c, "no tensors ['c']"),
        (twice, "given twice: ['a']"),
        (with_a(shape=(4,)), "shape (4,)"),
        (with_a(dtype="float64"), "dtype float64"),
        (with_a(dtype="complex"), "unknown dtype"),
        (with_a(checksum=1), "checksum"),
        (with_a(offset=510), "beyond"),
        (empty, "no tensors"),
    ],
)
async def test_what_does_not_fit_is_refused_and_changes_nothing(sim, offer, spoil, words):
    before = await sim.get("/penstock/info")
    status, answer = await sim.call("POST", "/penstock/weights/prepare", {"manifest": spoil(offer(9)).to_json()})
    assert status == 400
    assert words in answer["error"]
    assert await sim.get("/penstock/info") == before
    assert (await sim.call("POST", "/penstock/weights/apply", {"version": 9}))[0] == 409


@pytest.mark.parametrize(
    "changed",
    [
        {"a": struct.pack("<4f", 1, float("nan"), 3, 4)},
        {"a": struct.pack("<4f", 1, float("inf"), float("-inf"), 4)},
        {"b": struct.pack("<3H", 0x3F80, 0x7FC0, 0)},
    ],
)
async def test_nan_is_refused(sim, offer, changed):
    status, answer = await sim.call("POST", "/penstock/weights/prepare", {"manifest": offer(9, **changed).to_json()})
    assert (status, "NaN" in answer["error"]) == (400, True)


async def test_large_finite_numbers_are_not_nan(sim, offer):
    large = struct.pack("<4f", 3e38, 3e38, 3e38, 3e38)
    await sim.post("/penstock/weights/prepare", {"manifest": offer(3, a=large).to_json()})


@pytest.mark.parametrize("body", [{}, {"manifest": 3}, {"manifest": {"version": 1}}])
async def test_malformed_manifests_are_refused(sim, body):
    status, answer = await sim.call("POST", "/penstock/weights/prepare", body)
    assert (status, "manifest" in answer["error"]) == (400, True)


async def test_apply_needs_a_version(sim):
    assert (await sim.call("POST", "/penstock/weights/apply", {"version": "x"}))[0] == 400
