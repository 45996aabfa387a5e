"""Deltas: what an engine makes of them is the version that was published, bit for bit, or it is refused."""

from __future__ import annotations

import tracemalloc
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import WeightsError
from penstock.plugin.checksum import weights_checksum
from penstock.plugin.delta import DeltaSource
from penstock.plugin.worker import HostBytes
from penstock.weights import delta_format
from penstock.weights.delta import DeltaFiles, DeltaStore
from penstock.weights.delta_format import zstd
from penstock.weights.manifest import WeightManifest

DTYPES = ["float32", "bfloat16", "int64", "uint8", "float8_e4m3fn"]


class Model(torch.nn.Module):
    """As a worker holds one: its parameters are the checkpoint's tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, torch.nn.Parameter(tensor.clone(), requires_grad=False))


class Engine:
    """Who checks and who loads, of one engine, without the vLLM between them."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.model = Model(tensors)
        runner = SimpleNamespace(get_model=lambda: self.model)
        self.worker = SimpleNamespace(model_runner=runner, penstock_in_force=None)
        self.bytes, self.source = HostBytes(), DeltaSource(self.worker)
        self.version = 0

    def update(self, manifest: WeightManifest) -> list[str]:
        """Prepare and load; returns the names of what was brought."""
        local = self.prepare(manifest)
        self.source.partial = True
        brought = []
        for entry, tensor in self.source.tensors(local, lambda _: None):
            self.model.get_parameter(entry.name).copy_(tensor)
            brought.append(entry.name)
        self.version = manifest.version
        self.worker.penstock_in_force = manifest.version, weights_checksum(self.model), local.location["path"]
        return brought

    def prepare(self, manifest: WeightManifest) -> WeightManifest:
        local = self.bytes.check(WeightManifest.from_json(manifest.to_json()), self.version)
        self.source.prepare(local)
        return local

    def has(self, tensors: dict[str, torch.Tensor]) -> bool:
        return all(
            torch.equal(as_bytes(tensor), as_bytes(self.model.get_parameter(name).data))
            for name, tensor in tensors.items()
        )


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


def test_only_what_changed_is_sent_and_brought(store):
    tensors = start()
    engine = Engine(tensors)
    assert set(engine.update(published(store, 1, tensors))) == set(tensors)
    tensors["a"][3, 5] += 1
    manifest = published(store, 2, tensors)
    assert DeltaFiles.of(manifest).delta_bytes < 300
    assert engine.update(manifest) == ["a"]
    assert engine.has(tensors)
    assert engine.update(published(store, 3, tensors)) == ["a"], "what differs from the whole version"
    assert engine.has(tensors)


def test_each_delta_is_against_the_whole_version_and_old_files_go(store, tmp_path):
    tensors = start()
    engine = Engine(tensors)
    for version in range(1, 8):
        tensors["c"] += 1
        if version == 5:
            tensors["a"].normal_()  # too much for later deltas against this whole version
        manifest = published(store, version, tensors)
        files = DeltaFiles.of(manifest)
        assert (files.full_version, files.delta == "") == ((6, version == 6) if version > 5 else (1, version == 1))
        changed = engine.update(manifest)
        assert version in {1, 5, 6} or changed == ["c"]
        assert engine.has(tensors)
        there = {file.name for file in (tmp_path / "weights").glob("v*")}
        assert files.names <= there
        assert len(there) <= 4
    late = Engine(start())
    assert set(late.update(manifest)) == set(tensors)
    assert late.has(tensors)


def test_what_a_later_delta_does_not_change_is_whole_again(store):
    tensors = start()
    engine, whole = Engine(tensors), {name: tensor.clone() for name, tensor in tensors.items()}
    engine.update(published(store, 1, tensors))
    engine.update(published(store, 2, {**tensors, "b": tensors["b"] + 1}))
    assert engine.update(published(store, 3, {**tensors, "c": tensors["c"] + 1})) == ["c", "b"]
    assert engine.has({**whole, "c": whole["c"] + 1})


def test_an_engine_that_joins_or_missed_some_gets_there(store):
    tensors = start()
    early = Engine(tensors)
    early.update(published(store, 1, tensors))
    for version in (2, 3):
        tensors["a"][version] *= 1.01
        manifest = published(store, version, tensors)
    late = Engine(start())
    assert set(late.update(store.current)) == set(tensors)
    assert early.update(manifest) == ["a"]
    assert late.has(tensors)
    assert early.has(tensors)


def test_a_version_that_another_engine_refused_is_forgotten(store):
    tensors = start()
    engine = Engine(tensors)
    engine.update(published(store, 1, tensors))
    refused = {**tensors, "b": tensors["b"] + 1}
    engine.prepare(store.publish(2, refused.items()))  # and is not applied
    tensors["a"] += 1
    assert engine.update(published(store, 2, tensors)) == ["a"]
    assert engine.has(tensors)


def test_an_engine_goes_back_to_the_version_before(store):
    tensors = start()
    engine = Engine(tensors)
    before = published(store, 1, tensors)
    engine.update(store.publish(2, {**tensors, "c": tensors["c"] + 1}.items()))  # too few engines made it
    engine.update(before)
    assert engine.has(tensors)


@pytest.mark.parametrize("what", ["weights", "label", "image"])
def test_all_is_brought_where_the_base_is_not_in_force(store, what):
    tensors = start()
    engine = Engine(tensors)
    engine.update(published(store, 1, tensors))
    if what == "weights":  # a sleep that drops them leaves the label
        engine.model.get_parameter("b").zero_()
    elif what == "label":  # an update by another transport
        engine.version = 7
    else:  # that version 1 was made in another process of the engine, maybe of another chain
        engine.worker.penstock_in_force = *engine.worker.penstock_in_force[:2], "/proc/1/fd/1"
    tensors["a"] += 1
    assert set(engine.update(published(store, 8, tensors))) == set(tensors)
    assert engine.has(tensors)


def test_who_cannot_load_a_part_is_given_all(store):
    tensors = start()
    engine = Engine(tensors)
    engine.update(published(store, 1, tensors))
    local = engine.prepare(published(store, 2, {**tensors, "c": tensors["c"] + 1}))
    engine.source.partial = False
    assert len(list(engine.source.tensors(local, lambda _: None))) == len(tensors)


def test_a_damaged_or_missing_file_is_refused_and_the_next_version_is_whole_again(store):
    tensors = start()
    engine = Engine(tensors)
    engine.update(published(store, 1, tensors))
    manifest = published(store, 2, {**tensors, "a": tensors["a"] + 1})
    file = Path(manifest.location["folder"]) / DeltaFiles.of(manifest).delta
    data = file.read_bytes()
    file.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(WeightsError, match="damaged"):
        engine.prepare(manifest)
    with pytest.raises(WeightsError, match="damaged"):
        store.adopt(manifest)
    file.unlink()
    with pytest.raises(WeightsError, match="No such file"):
        engine.prepare(manifest)
    file.write_bytes(data)
    engine.update(store.adopt(manifest))
    assert engine.has({**tensors, "a": tensors["a"] + 1})


def test_a_delta_of_other_versions_is_refused(store):
    tensors = start()
    manifests = [published(store, version, {**tensors, "c": tensors["c"] + version}) for version in (1, 2, 3)]
    with pytest.raises(WeightsError, match="cannot make 3 of 1"):
        Engine(tensors).prepare(replace(manifests[2], location=manifests[1].location))
    with pytest.raises(WeightsError, match="do not make version 3"):
        DeltaFiles.of(replace(manifests[2], location=manifests[0].location))


def test_a_result_that_was_not_meant_is_refused(store):
    tensors = start()
    published(store, 1, tensors)
    manifest = published(store, 2, {**tensors, "a": tensors["a"] + 1})
    wrong = tuple(replace(e, crc32=e.crc32 ^ 1) if e.name == "a" else e for e in manifest.tensors)
    with pytest.raises(WeightsError, match="'a' has crc32"):
        Engine(tensors).prepare(replace(manifest, tensors=wrong))


def test_tensors_of_another_form_come_whole_and_nan_is_not_sent(store):
    tensors = start()
    published(store, 1, tensors)
    assert DeltaFiles.of(published(store, 2, {**tensors, "c": torch.ones(9)})).delta == ""
    with pytest.raises(WeightsError, match="NaN"):
        store.publish(3, {**tensors, "c": torch.full((9,), float("nan"))}.items())
    assert DeltaFiles.of(published(store, 3, {**tensors, "c": torch.zeros(9)})).full_version == 2


def test_the_trainer_starts_again(store, tmp_path):
    tensors = start()
    published(store, 1, tensors)
    tensors["a"] += 1
    published(store, 2, tensors)
    store.close()
    again = DeltaStore(tmp_path / "weights")
    engine = Engine(start())
    engine.update(again.current)
    assert engine.has(tensors)
    assert DeltaFiles.of(published(again, 3, tensors)).delta == ""
    again.close()


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    count=st.integers(1, 300),
    chunk=st.integers(1, 120),
    positions=st.sets(st.integers(0, 299)),
    bits=st.integers(1, 255),
)
def test_any_change_survives(tmp_path_factory, dtype, count, chunk, positions, bits):
    old = torch.arange(count).remainder(100).to(getattr(torch, dtype))
    new = old.clone()
    size = old.element_size()
    for position in positions:
        if position < count:
            new.view(torch.uint8)[position * size + position % size] ^= bits
    entry = delta_format.TensorEntry("w", dtype, (count,), 0, 0)
    images = [bytearray(as_bytes(tensor).numpy().tobytes()) for tensor in (old, new)]
    path = tmp_path_factory.mktemp("delta") / "file"
    kept, delta_format.CHUNK = delta_format.CHUNK, chunk
    try:
        with path.open("wb") as file:
            delta_format.write(file, memoryview(images[0]), memoryview(images[1]), [entry], base=3, to=4)
        changed = delta_format.apply(memoryview(path.read_bytes()), memoryview(images[0]), [entry], base=3, to=4)
    finally:
        delta_format.CHUNK = kept
    assert images[0] == images[1]
    assert changed == ({0} if not torch.equal(as_bytes(old), as_bytes(new)) else set())


CHUNK = delta_format.Chunk(tensor=0, start=0, count=4000, changed=1, gap_bytes=1, nbytes=0)
CHUNKS = {
    "a fraction": {"changed": 1.5},
    "negative": {"changed": -1, "gap_bytes": -1},
    "no such tensor": {"tensor": 5},
    "too long": {"count": 4001},
    "too short": {"count": 3},
    "more than there is": {"changed": 1 << 25},
    "gaps too wide": {"gap_bytes": 9},
}
BOMB = zstd.compress(bytes(1 << 26))
CODES = {
    "a bomb": lambda _: BOMB,
    "more than there is": lambda _: BOMB,
    "two frames": lambda codes: codes + BOMB,
    "cut": lambda codes: codes[:-1],
    "no frame": lambda codes: bytes(len(codes)),
}
FOOTERS = {
    "no object": lambda _: b"7",
    "deep": lambda _: b"[" * 100_000,
    "infinite": lambda text: text.replace(b"4000", b"1e999"),
    "no base": lambda text: text.replace(b"base", b"bass"),
    "a field more": lambda text: text.replace(b"4000", b"4000,1"),
    "twice": lambda text: text.replace(b"]]", b"],[0,0,4000,1,1,0]]"),
}


def spoiled(spoil: str, codes: bytes, text: bytes) -> tuple[bytes, bytes]:
    """Codes and footer of a delta with one fault."""
    codes = CODES.get(spoil, bytes)(codes)
    chunk = {**asdict(CHUNK), "nbytes": len(codes), **CHUNKS.get(spoil, {})}
    text = orjson.dumps({**orjson.loads(text), "chunks": [[*chunk.values()]]})
    return codes, FOOTERS.get(spoil, bytes)(text)


@pytest.mark.parametrize("spoil", [*CHUNKS, *CODES, *FOOTERS])
def test_a_malformed_file_is_an_error_of_ours_and_takes_no_memory(tmp_path, spoil):
    old, new = bytearray(4000), bytearray(4000)
    new[17] = 1
    entry = delta_format.TensorEntry("w", "uint8", (4000,), 0, 0)
    with (tmp_path / "file").open("wb") as file:
        delta_format.write(file, memoryview(old), memoryview(new), [entry], base=1, to=2)
    data = (tmp_path / "file").read_bytes()
    length = int.from_bytes(data[-8:], "little")
    codes, text = spoiled(spoil, data[: -8 - length], data[-8 - length : -8])
    tracemalloc.start()
    try:
        with pytest.raises(WeightsError, match="malformed delta"):
            delta_format.apply(
                memoryview(codes + text + len(text).to_bytes(8, "little")), memoryview(old), [entry], base=1, to=2
            )
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("key", "value"), [("delta_bytes", "x"), ("delta_crc32", "1" * 5000), ("full", ""), ("full_version", "1e3")]
)
def test_a_malformed_location_is_refused(store, key, value):
    manifest = published(store, 1, start())
    with pytest.raises(WeightsError, match="malformed weight manifest"):
        Engine(start()).prepare(replace(manifest, location={**manifest.location, key: value}))
