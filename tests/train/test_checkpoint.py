from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.errors import CheckpointError
from penstock.train.checkpoint import FORMAT, KEEP, LearnerState, latest, load, save

VALUES = {"version": 3, "next_task": 17, "queue": [{"prompt": "a\nb", "ids": [1, 2]}], "lr": 1e-4}


def snapshot(fill: float = 1.0) -> LearnerState:
    return LearnerState({"model/w": torch.full((2, 3), fill), "rng/cpu": torch.arange(5, dtype=torch.uint8)}, VALUES)


def test_what_is_loaded_is_what_was_saved(tmp_path: Path):
    assert latest(tmp_path) is None
    path = save(tmp_path, 20, snapshot())
    assert latest(tmp_path) == path
    step, found = load(path)
    assert step == 20
    assert found.values == VALUES
    assert found.tensors.keys() == snapshot().tensors.keys()
    for name, tensor in snapshot().tensors.items():
        assert torch.equal(found.tensors[name], tensor)
        assert found.tensors[name].dtype == tensor.dtype


def test_the_last_two_are_kept_in_the_order_of_their_steps(tmp_path: Path):
    for step in (9, 10, 100, 101):
        save(tmp_path, step, snapshot(step))
    files = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert len(files) == KEEP
    assert load(latest(tmp_path))[0] == 101
    save(tmp_path, 101, snapshot(7))  # a run that was taken up again writes the same step once more
    assert load(latest(tmp_path))[1].tensors["model/w"][0, 0] == 7


def test_a_file_cut_at_any_byte_is_refused_with_its_name_and_a_remedy(tmp_path: Path):
    path = save(tmp_path, 1, snapshot())
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"step-00000001\.safetensors is truncated.*remove it"):
            load(path)
    path.write_bytes(whole)
    assert load(path)[0] == 1


@pytest.mark.parametrize("values", ["[" * 100_000, "{", ""])
def test_a_record_that_cannot_be_read_is_refused(tmp_path: Path, values: str):
    path = tmp_path / "step-00000001.safetensors"
    save_file({"w": torch.zeros(2)}, path, metadata={"format": FORMAT, "step": "1", "values": values})
    with pytest.raises(CheckpointError, match="is not JSON"):
        load(path)


def test_foreign_files_are_refused(tmp_path: Path):
    model = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(2)}, model, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="no checkpoint of Penstock"):
        load(model)
    save_file({"w": torch.zeros(2)}, model)
    with pytest.raises(CheckpointError, match="no checkpoint of Penstock"):
        load(model)
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        load(tmp_path / "step-00000009.safetensors")
    with pytest.raises(CheckpointError, match="damaged"):
        load(tmp_path)


def test_names_that_are_no_checkpoints_are_left_alone(tmp_path: Path):
    save(tmp_path, 1, snapshot())
    folder = tmp_path / "checkpoints"
    (folder / "step-notes.txt").write_text("mine")
    (folder / "step-00000099.safetensors.unfinished").write_text("left by a kill")
    assert load(latest(tmp_path))[0] == 1
    save(tmp_path, 2, snapshot())
    assert {p.name for p in folder.iterdir()} == {
        "step-00000001.safetensors", "step-00000002.safetensors", "step-notes.txt",
    }  # fmt: skip


def test_values_that_are_not_json_are_refused_and_nothing_is_written(tmp_path: Path):
    save(tmp_path, 1, snapshot())
    for value in (float("nan"), object()):
        with pytest.raises(CheckpointError, match="is not JSON"):
            save(tmp_path, 2, LearnerState({}, {"value": value}))
    assert load(latest(tmp_path))[0] == 1


def test_a_place_that_cannot_be_written_is_said_to_be_so(tmp_path: Path):
    (tmp_path / "checkpoints").write_text("a file in the way")
    with pytest.raises(CheckpointError, match="cannot write"):
        save(tmp_path, 1, snapshot())


WRITER = """
import sys, torch
from pathlib import Path
from penstock.train.checkpoint import LearnerState, save
for step in range(1, 10**6):
    save(Path(sys.argv[1]), step, LearnerState({"w": torch.full((256, 1024), float(step))}, {"step": step}))
    if step == 3:
        print("ready", flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path):
    for delay in (0.0, 0.007):
        run = tmp_path / str(delay)
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(run)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        try:
            writer.wait(timeout=delay)
        except subprocess.TimeoutExpired:
            os.kill(writer.pid, signal.SIGKILL)
        writer.wait(timeout=10)
        writer.stdout.close()
        step, found = load(latest(run))
        assert step >= 3
        assert found.values == {"step": step}
        assert (found.tensors["w"] == step).all()
