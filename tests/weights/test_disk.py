"""Versions in a folder: whole or not there, removed in time, and of one writer."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_stores import TENSORS, loaded, same

from penstock.errors import StateError, WeightsError
from penstock.weights.disk import DiskSource, DiskStore, VersionFile, check_file, open_version

DIES = """
import os, sys, torch
from penstock.weights.disk import DiskStore
store = DiskStore(sys.argv[1])
def tensors():
    yield "w", torch.ones(4)
store.commit(store.publish(1, tensors()))
import penstock.weights.pack as pack
pack.write = lambda *_: os.kill(os.getpid(), 9)
store.publish(2, tensors())
"""


@pytest.fixture
def store(tmp_path):
    store = DiskStore(tmp_path / "weights")
    yield store
    store.close()


def files(store: DiskStore) -> list[str]:
    return sorted(file.name for file in store.folder.glob("v*"))


def by_a_worker(manifest):
    return list(DiskSource(torch.device("cpu")).tensors(manifest, lambda _: None))


def test_other_programs_read_it(store):
    manifest = store.publish(3, TENSORS.items())
    assert same(load_file(Path(manifest.location["folder"]) / manifest.location["file"]), TENSORS)
    assert all(entry.offset % TENSORS[entry.name].element_size() == 0 for entry in manifest.tensors)


def test_two_versions_are_kept(store):
    manifests = []
    for version in range(1, 5):
        manifest = store.publish(version, [("w", torch.full((4,), float(version)))])
        assert len(files(store)) == min(version, 2)  # the current one, and this one
        store.commit(manifest)
        manifests.append(manifest)
    assert files(store) == [m.location["file"] for m in manifests[-2:]]
    assert loaded(store.current)["w"][0] == 4


def test_a_version_that_was_not_committed_leaves_the_current_one(store):
    store.commit(store.publish(1, [("w", torch.ones(4))]))
    store.publish(2, [("w", torch.zeros(4))])
    with pytest.raises(WeightsError, match="NaN"):
        store.publish(2, [("w", torch.full((4,), float("nan")))])
    assert files(store) == [store.current.location["file"]]
    assert loaded(store.current)["w"][0] == 1


def test_what_a_killed_writer_left_gives_way_to_the_next_version(tmp_path):
    done = subprocess.run([sys.executable, "-c", DIES, tmp_path], timeout=60, check=False, capture_output=True)
    assert done.returncode == -9, done.stderr
    assert len([*tmp_path.glob("*.safetensors")]) == len([*tmp_path.glob("*.part")]) == 1
    store = DiskStore(tmp_path)
    manifest = store.publish(2, TENSORS.items())
    assert files(store) == [manifest.location["file"]]
    store.close()


def test_one_writer_for_a_folder(store):
    store.publish(1, TENSORS.items())
    other = DiskStore(store.folder)
    with pytest.raises(StateError, match="another store"):
        other.publish(1, TENSORS.items())
    store.close()
    other.publish(1, TENSORS.items())
    other.close()
    with pytest.raises(StateError, match="closed"):
        other.publish(2, TENSORS.items())


def test_a_version_of_another_process_is_adopted(store, tmp_path):
    manifest = store.publish(4, TENSORS.items())
    fleets = DiskStore(tmp_path / "fleets")
    fleets.commit(fleets.adopt(manifest))
    assert same(loaded(fleets.current), TENSORS)
    longer = replace(manifest, tensors=(*manifest.tensors, replace(manifest.tensors[0], offset=10_000)))
    for wrong, why in (
        (replace(manifest, transport="shared_memory"), "shared_memory"),
        (replace(manifest, location={**manifest.location, "file": "v4-00000000.safetensors"}), "No such file"),
        (replace(manifest, location={**manifest.location, "file": "../../etc/passwd"}), "no file of a store"),
        (longer, "bytes"),
    ):
        with pytest.raises(WeightsError, match=why):
            fleets.adopt(wrong)
    fleets.close()


def test_too_little_space_is_seen_before_a_byte_is_written(store, monkeypatch):
    store.commit(store.publish(1, [("w", torch.ones(4))]))
    real = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((*real(path)[:4], 1, *real(path)[5:])))
    with pytest.raises(WeightsError, match="are free"):
        store.publish(2, [("w", torch.ones(20_000_000))])
    assert loaded(store.current)["w"][0] == 1


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(WeightsError, match="give another folder"):
        DiskStore(tmp_path / "file").publish(1, TENSORS.items())


def test_a_folder_that_is_gone_is_said_and_one_that_is_back_is_used(store, tmp_path):
    store.commit(store.publish(1, TENSORS.items()))
    (tmp_path / "weights").rename(tmp_path / "away")
    with pytest.raises(WeightsError, match=r"cannot keep weights in .*weights any more: No such file or directory"):
        store.publish(2, TENSORS.items())
    (tmp_path / "away").rename(tmp_path / "weights")
    assert same(loaded(store.publish(2, TENSORS.items())), TENSORS)


def test_an_open_version_outlives_its_name(store):
    manifest = store.publish(1, [("w", torch.ones(4))])
    with open_version(manifest) as file:
        store.keep(())
        assert file.size >= manifest.extent
        file.read(0, file.size)


@pytest.mark.parametrize("read", [check_file, by_a_worker])
def test_a_file_that_shrinks_while_it_is_read_is_an_error_of_ours(store, read, monkeypatch):
    """Its reader would be killed by SIGBUS, were it mapped."""
    manifest = store.publish(1, [("first", torch.ones(4)), ("w", torch.ones(10_000))])
    path = Path(manifest.location["folder"]) / manifest.location["file"]

    def shrink(file: VersionFile, target: memoryview, offset: int) -> None:
        os.truncate(path, 1000)
        read_into(file, target, offset)

    read_into = VersionFile.read_into
    monkeypatch.setattr(VersionFile, "read_into", shrink)
    with pytest.raises(WeightsError, match="the file has shrunk"):
        read(manifest)


def test_nothing_is_written_through_a_link(tmp_path):
    """In a folder that others can write to, one of them may have left links under names that it can guess."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "lock").symlink_to(tmp_path / "made")
    with pytest.raises(WeightsError, match="give another folder"):
        DiskStore(tmp_path / "other").publish(1, TENSORS.items())
    assert not (tmp_path / "made").exists()
