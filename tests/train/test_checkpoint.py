from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from patience import WAIT_S
from penstock.errors import CheckpointError
from penstock.train.checkpoint import FORMAT, KEEP, RECORD, latest, load, read_tensors, save, write_tensors

VALUES = {"version": 3, "next_task": 17, "queue": [{"prompt": "a\nb", "ids": [1, 2]}], "lr": 1e-4}


def tensors(fill: float = 1.0) -> dict[str, Tensor]:
    return {"model/w": torch.full((2, 3), fill), "rng/cpu": torch.arange(5, dtype=torch.uint8), "n": torch.tensor(fill)}


def writer(fill: float = 1.0, values: Mapping[str, Any] = VALUES) -> Callable[[Path], Mapping[str, Any]]:
    def write(folder: Path) -> Mapping[str, Any]:
        write_tensors(folder, tensors(fill))
        return values

    return write


def read(path: Path | None) -> dict[str, Tensor]:
    assert path is not None
    return read_tensors(path, lambda _, shape, dtype: torch.empty(tuple(shape), dtype=dtype))


def test_what_is_loaded_is_what_was_saved(tmp_path: Path):
    assert latest(tmp_path) is None
    path = save(tmp_path, 20, writer())
    assert latest(tmp_path) == path
    assert load(path) == (20, VALUES)
    found = read(path)
    assert found.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype


def test_the_last_two_are_kept_in_the_order_of_their_steps(tmp_path: Path):
    for step in (9, 10, 100, 101):
        save(tmp_path, step, writer(step))
    assert len(list((tmp_path / "checkpoints").iterdir())) == KEEP
    assert load(latest(tmp_path))[0] == 101
    save(tmp_path, 101, writer(7))  # a run that was taken up again writes the same step once more
    assert read(latest(tmp_path))["n"] == 7


def test_a_file_that_is_cut_or_missing_is_refused_with_a_remedy(tmp_path: Path):
    path = save(tmp_path, 1, writer())
    for file in path.iterdir():
        whole = file.read_bytes()
        for content in (whole[:97], b"\0" * len(whole), None):
            file.unlink() if content is None else file.write_bytes(content)
            with pytest.raises(CheckpointError, match=r"step-00000001 .*remove it"):
                load(path)
        file.write_bytes(whole)
    assert load(path)[0] == read(path)["n"] == 1


def test_a_file_of_another_checkpoint_or_with_another_bit_is_refused(tmp_path: Path):
    path, other = [save(tmp_path, step, writer(step)) for step in (1, 2)]
    file = next(path.glob("*.distcp"))
    whole, swapped = file.read_bytes(), (other / file.name).read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for content in (swapped, flipped):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"damaged: {file.name} is not as it was written; remove it"):
            load(path)


@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda file: file.write_bytes(b""), lambda file: os.truncate(file, 50)]
)
def test_tensors_whose_list_is_lost_or_damaged_are_refused(tmp_path: Path, damage: Callable[[Path], object]):
    path = save(tmp_path, 1, writer())
    damage(path / ".metadata")
    with pytest.raises(CheckpointError, match=r"cannot be read .rank 0: .*go on from another checkpoint"):
        read(path)


@pytest.mark.parametrize(
    "record", ["[" * 100_000, "{", "", "[]", "7", '{"format": "other"}', f'{{"format": "{FORMAT}"}}']
)
def test_a_record_that_cannot_be_read_is_refused(tmp_path: Path, record: str):
    path = save(tmp_path, 1, writer())
    (path / RECORD).write_text(record)
    with pytest.raises(CheckpointError, match=r"is not JSON|no checkpoint of Penstock|damaged"):
        load(path)


def test_foreign_files_are_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="does not exist"):
        load(tmp_path / "step-00000009")
    with pytest.raises(CheckpointError, match="not all of one"):
        load(tmp_path)


def test_names_that_are_no_checkpoints_are_left_alone(tmp_path: Path):
    save(tmp_path, 1, writer())
    folder = tmp_path / "checkpoints"
    (folder / "step-notes.txt").write_text("mine")
    (folder / "step-00000099.unfinished").mkdir()
    assert load(latest(tmp_path))[0] == 1
    save(tmp_path, 2, writer())
    assert {p.name for p in folder.iterdir()} == {"step-00000001", "step-00000002", "step-notes.txt"}


def test_values_that_are_not_json_are_refused_and_nothing_is_written(tmp_path: Path):
    save(tmp_path, 1, writer())
    for value in (float("nan"), object()):
        with pytest.raises(CheckpointError, match="is not JSON"):
            save(tmp_path, 2, writer(values={"value": value}))
    assert load(latest(tmp_path))[0] == 1


def test_a_place_that_cannot_be_written_is_said_to_be_so(tmp_path: Path):
    (tmp_path / "checkpoints").write_text("a file in the way")
    with pytest.raises(CheckpointError, match="cannot write"):
        save(tmp_path, 1, writer())


def test_a_disk_that_takes_no_more_is_named_and_leaves_the_last_checkpoint(tmp_path: Path):
    path = save(tmp_path, 1, writer())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # Python ignores the signal, so that writes fail
    try:
        with pytest.raises(
            CheckpointError, match=r"cannot write checkpoint .*step-00000002.*rank 0: .* MiB free there.; free space"
        ):
            save(tmp_path, 2, lambda folder: write_tensors(folder, {"w": torch.zeros(1 << 16)}) or {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert latest(tmp_path) == path
    assert read(path)["n"] == 1


WRITER = """
import sys, torch
from pathlib import Path
from penstock.train.checkpoint import save, write_tensors

def write(folder):
    write_tensors(folder, {"w": torch.full((256, 1024), float(step))})
    return {"step": step}

for step in range(1, 10**6):
    save(Path(sys.argv[1]), step, write)
    if step == 3:
        print("ready", flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path):
    for delay in (0.0, 0.007):
        run = tmp_path / str(delay)
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(run)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            process.wait(timeout=delay)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=WAIT_S)
        process.stdout.close()
        path = latest(run)
        assert path is not None
        step, values = load(path)
        assert step >= 3
        assert values == {"step": step}
        assert (read(path)["w"] == step).all()
        json.loads((path / RECORD).read_text())
