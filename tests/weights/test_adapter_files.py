"""Files of an adapter: copied from a folder that may be saved again, kept open where they are only replaced."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from patience import WAIT_S
from penstock.errors import WeightsError
from penstock.weights.adapter_files import SETTINGS, TENSORS, AdapterFiles

CONFIG = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}


def saved(folder: Path, value: float) -> None:
    """Save as PEFT does: over the file that is there."""
    folder.mkdir(exist_ok=True)
    save_file({"a.lora_A.weight": torch.full((2, 4), value)}, folder / "new")
    (folder / TENSORS).write_bytes((folder / "new").read_bytes())
    (folder / SETTINGS).write_text(json.dumps(CONFIG))


def value_of(files: AdapterFiles) -> float:
    return float(load_file(files.source["file"])["a.lora_A.weight"][0, 0])


def test_a_folder_is_copied_so_that_it_can_be_saved_again(tmp_path: Path) -> None:
    saved(tmp_path / "a", 1.0)
    files = AdapterFiles.of_folder(str(tmp_path / "a"))
    saved(tmp_path / "a", 2.0)
    assert value_of(files) == 1.0
    assert files.nbytes == (tmp_path / "a" / TENSORS).stat().st_size
    files.close()


def test_fixed_files_are_not_copied_and_outlive_being_replaced(tmp_path: Path) -> None:
    saved(tmp_path / "a", 1.0)
    files = AdapterFiles.of_folder(str(tmp_path / "a"), fixed=True)
    assert Path(files.source["file"]).stat().st_ino == (tmp_path / "a" / TENSORS).stat().st_ino
    saved(tmp_path / "b", 2.0)
    (tmp_path / "b" / TENSORS).replace(tmp_path / "a" / TENSORS)
    assert value_of(files) == 1.0
    assert files.source["config"]["r"] == 2
    files.close()


def test_settings_that_are_none_leave_nothing_open(tmp_path: Path) -> None:
    saved(tmp_path / "a", 1.0)
    (tmp_path / "a" / SETTINGS).write_text("{}")
    before = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(WeightsError, match="lacks r"):
        AdapterFiles.of_folder(str(tmp_path / "a"), fixed=True)
    assert len([*Path("/proc/self/fd").iterdir()]) == before


@pytest.mark.parametrize("name", [TENSORS, SETTINGS])
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(name: str, tmp_path: Path) -> None:
    saved(tmp_path / "a", 1.0)
    pipe = tmp_path / "a" / name
    pipe.unlink()
    os.mkfifo(pipe)
    said = list[str]()

    def load() -> None:
        try:
            AdapterFiles.of_folder(str(tmp_path / "a"))
        except WeightsError as error:
            said.append(str(error))

    loading = threading.Thread(target=load, daemon=True)
    loading.start()
    loading.join(WAIT_S)
    assert [str(pipe) in message and "no regular file" in message for message in said] == [True]
    assert not any(os.path.realpath(link) == str(pipe.resolve()) for link in Path("/proc/self/fd").iterdir())
