"""Deltas: what an engine makes of them is the version that was published, bit for bit, or it is refused."""

from __future__ import annotations

import io
import tracemalloc
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import WeightsError
from penstock.weights import delta
from penstock.weights.delta import DeltaBase, DeltaStore
from penstock.weights.disk import VersionFile
from penstock.weights.manifest import TensorEntry, WeightManifest
from penstock.weights.shared_memory import open_mapping
from penstock.weights.transfer import read

DTYPES = ["float32", "bfloat16", "int64", "uint8", "float8_e4m3fn"]


class Engine:
    """What an engine makes of versions, without vLLM: its process checks, its workers map."""

    def __init__(self) -> None:
        self.base = DeltaBase()
        self.weights: dict[str, torch.Tensor] = {}

    def update(self, manifest: WeightManifest) -> WeightManifest:
        local = self.base.bring(WeightManifest.from_json(manifest.to_json()))
        mapping = open_mapping(local.location["path"], local.extent)
        self.weights = {name: tensor.clone() for name, tensor in read(memoryview(mapping), local.tensors)}
        return local

    def has(self, tensors: dict[str, torch.Tensor]) -> bool:
        same = (torch.equal(as_bytes(tensor), as_bytes(self.weights[name])) for name, tensor in tensors.items())
        return self.weights.keys() == tensors.keys() and all(same)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def start() -> dict[str, torch.Tensor]:
    return {"a": torch.randn(50, 40), "b": torch.randn(333).bfloat16(), "c": torch.zeros(7), "none": torch.empty(0, 2)}


@pytest.fixture
def store(tmp_path):
    store = DeltaStore(tmp_path / "weights")
    yield store
    store.close()


def published(store: DeltaStore, version: int, tensors: dict[str, torch.Tensor]) -> WeightManifest:
    manifest = store.publish(version, tensors.items())
    store.commit(manifest)
    return manifest


def test_only_what_changed_is_sent(store):
    tensors, engine = start(), Engine()
    assert engine.update(published(store, 1, tensors)).transport == "shared_memory", "to the workers"
    assert engine.has(tensors)
    for version in (2, 3):
        tensors["a"][3, 5] += 1
        manifest = published(store, version, tensors)
        assert 0 < int(manifest.location["delta_bytes"]) < 300
        engine.update(manifest)
        assert engine.has(tensors)


def test_each_delta_is_against_the_whole_version_and_old_files_go(store, tmp_path):
    tensors, engine, whole = start(), Engine(), set()
    for version in range(1, 8):
        tensors["c"] += 1
        if version == 5:
            tensors["a"].normal_()  # too much for later deltas against this whole version
        manifest = published(store, version, tensors)
        whole.add(manifest.location["file"])
        assert (manifest.location["delta"] == "") == (version in {1, 6})
        engine.update(manifest)
        assert engine.has(tensors)
        there = {file.name for file in (tmp_path / "weights").glob("v*")}
        assert store._names(manifest) - {""} <= there
        assert len(there) <= 4
    assert len(whole) == 2
    late = Engine()
    late.update(manifest)
    assert late.has(tensors)


def test_a_version_that_cannot_be_read_leaves_no_image_of_another_file(store, monkeypatch):
    def refuse(*_):
        raise WeightsError("unreadable")

    engine, small, large = Engine(), {"a": torch.ones(5000)}, {"a": torch.ones(90_000)}
    engine.update(published(store, 1, small))
    manifest = published(store, 2, large)
    with monkeypatch.context() as patched:
        patched.setattr(VersionFile, "read_into", refuse)
        with pytest.raises(WeightsError, match="unreadable"):
            engine.update(manifest)
    engine.update(published(store, 3, {"a": small["a"] * 2}))
    assert engine.has({"a": small["a"] * 2})


def test_what_a_later_delta_does_not_change_is_whole_again(store):
    tensors, engine = start(), Engine()
    whole = {name: tensor.clone() for name, tensor in tensors.items()}
    engine.update(published(store, 1, tensors))
    engine.update(published(store, 2, {**tensors, "b": tensors["b"] + 1}))
    engine.update(published(store, 3, {**tensors, "c": tensors["c"] + 1}))
    assert engine.has({**whole, "c": whole["c"] + 1})


def test_an_engine_that_missed_some_and_one_that_goes_back_get_there(store):
    tensors, engine = start(), Engine()
    before = published(store, 1, tensors)
    engine.update(before)
    refused = store.publish(2, {**tensors, "c": tensors["c"] + 1}.items())  # too few engines made it
    engine.update(refused)
    engine.update(before)
    assert engine.has(tensors)
    for version in (2, 3):
        tensors["a"][version] *= 1.01
        manifest = published(store, version, tensors)
    engine.update(manifest)
    assert engine.has(tensors)


def test_a_damaged_or_missing_file_is_refused(store):
    tensors, engine = start(), Engine()
    engine.update(published(store, 1, tensors))
    manifest = published(store, 2, {**tensors, "a": tensors["a"] + 1})
    file = Path(manifest.location["folder"]) / manifest.location["delta"]
    data = file.read_bytes()
    file.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    for refuses in (engine.update, store.adopt):
        with pytest.raises(WeightsError, match="damaged"):
            refuses(manifest)
    file.unlink()
    with pytest.raises(WeightsError, match="No such file"):
        engine.update(manifest)
    file.write_bytes(data)
    engine.update(store.adopt(manifest))
    assert engine.has({**tensors, "a": tensors["a"] + 1})


def test_a_result_that_was_not_meant_is_refused_and_the_next_version_is_whole_again(store):
    tensors, engine = start(), Engine()
    engine.update(published(store, 1, tensors))
    manifest = published(store, 2, {**tensors, "a": tensors["a"] + 1})
    wrong = tuple(replace(e, checksum=e.checksum ^ 1) if e.name == "a" else e for e in manifest.tensors)
    with pytest.raises(WeightsError, match="'a' has the checksum"):
        engine.update(replace(manifest, tensors=wrong))
    engine.update(manifest)
    assert engine.has({**tensors, "a": tensors["a"] + 1})


def test_tensors_of_another_form_come_whole_and_nan_is_not_sent(store):
    tensors = start()
    published(store, 1, tensors)
    whole = published(store, 2, {**tensors, "c": torch.ones(9)})
    assert whole.location["delta"] == ""
    with pytest.raises(WeightsError, match="NaN"):
        store.publish(3, {**tensors, "c": torch.full((9,), float("nan"))}.items())
    assert published(store, 3, {**tensors, "c": torch.zeros(9)}).location["file"] == whole.location["file"]


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    count=st.integers(1, 300),
    chunk=st.integers(1, 120),
    positions=st.sets(st.integers(0, 299)),
    bits=st.integers(1, 255),
)
def test_any_change_survives(dtype, count, chunk, positions, bits):
    old = torch.arange(count).remainder(100).to(getattr(torch, dtype))
    new = old.clone()
    size = old.element_size()
    for position in positions:
        if position < count:
            new.view(torch.uint8)[position * size + position % size] ^= bits
    entry = TensorEntry("w", dtype, (count,), 0, 0)
    images = [bytearray(as_bytes(tensor).numpy().tobytes()) for tensor in (old, new)]
    kept, delta.CHUNK = delta.CHUNK, chunk
    try:
        data = written(*images, entry)
        changed = delta.apply_delta(memoryview(data), memoryview(images[0]), [entry])
    finally:
        delta.CHUNK = kept
    assert images[0] == images[1]
    assert changed == ({0} if not torch.equal(as_bytes(old), as_bytes(new)) else set())


BOMB = delta.zstd().compress(bytes(1 << 26))
FRAMES = {
    "a bomb": lambda _: BOMB,
    "two frames": lambda frame: frame + BOMB,
    "cut": lambda frame: frame[:-1],
    "no frame": lambda frame: bytes(len(frame)),
    "too short": lambda _: delta.zstd().compress(bytes(499)),
    "no change": lambda _: delta.zstd().compress(bytes(500)),
    "more changes than values": lambda _: delta.zstd().compress(bytes([255] * 500)),
}
FOOTERS = {
    "no list": lambda _: b"7",
    "deep": lambda _: b"[" * 100_000,
    "infinite": lambda _: b"[[0,0,1e999]]",
    "a fraction": lambda n: b"[[0,0.5,%d]]" % n,
    "negative": lambda n: b"[[0,-1,%d]]" % n,
    "no such tensor": lambda n: b"[[5,0,%d]]" % n,
    "no such chunk": lambda n: b"[[0,1,%d]]" % n,
    "a field more": lambda n: b"[[0,0,%d,1]]" % n,
    "twice": lambda n: b"[[0,0,%d],[0,0,0]]" % n,
    "of other bytes": lambda n: b"[[0,0,%d]]" % (n + 1),
}


@pytest.mark.parametrize("spoil", [*FRAMES, *FOOTERS])
def test_a_malformed_file_is_an_error_of_ours_and_takes_no_memory(spoil):
    old, new = bytearray(4000), bytearray(4000)
    new[17] = 1
    entry = TensorEntry("w", "uint8", (4000,), 0, 0)
    data = written(old, new, entry)
    length = int.from_bytes(data[-8:], "little")
    frame = FRAMES.get(spoil, bytes)(data[: -8 - length])
    text = FOOTERS.get(spoil, lambda n: b"[[0,0,%d]]" % n)(len(frame))
    spoiled = frame + text + len(text).to_bytes(8, "little")
    tracemalloc.start()
    try:
        with pytest.raises(WeightsError, match="malformed delta"):
            delta.apply_delta(memoryview(spoiled), memoryview(old), [entry])
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


def written(old: bytearray, new: bytearray, entry: TensorEntry) -> bytes:
    file = io.BytesIO()
    before = memoryview(old)
    size, checksum = delta.write_delta(file, lambda at, n: before[at : at + n], memoryview(new), [entry])
    assert (size, checksum) == (len(file.getvalue()), zlib.crc32(file.getvalue()))
    return file.getvalue()


@pytest.mark.parametrize(("key", "value"), [("delta_bytes", "x"), ("delta_checksum", "1" * 5000), ("file", "")])
def test_a_malformed_location_is_refused(store, key, value):
    manifest = published(store, 1, start())
    with pytest.raises(WeightsError, match="malformed weight manifest"):
        Engine().update(replace(manifest, location={**manifest.location, key: value}))
