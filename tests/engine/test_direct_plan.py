"""The plan of copies that stands for vLLM's reload on GPUs: proved for real models, refused where it is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.engine.launch import reserved_port

TESTS = Path(__file__).parent.parent
EVERY_MODEL = pytest.mark.parametrize("model", ["dense", "tied", "moe", "biased", "routed"])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What `direct_plan_program.py` says of each model."""
    program = [sys.executable, str(TESTS / "engine" / "direct_plan_program.py")]
    folder = tmp_path_factory.mktemp("plans")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    with reserved_port() as port:
        done = subprocess.run(
            [*program, str(folder), str(port)], env=env, capture_output=True, text=True, timeout=180, check=False
        )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stderr[-3000:]
    return {line["model"]: line for line in lines}


@EVERY_MODEL
def test_the_first_update_is_vllms_reload_and_proves_the_copies(found, model):
    assert found[model]["proved"]
    assert found[model]["first_as_vllm_loads"]
    assert not found[model]["first_known"], "what is in force is read again for its checksum"


@EVERY_MODEL
def test_later_updates_are_copied_and_put_every_tensor_where_vllm_does(found, model):
    assert found[model]["as_vllm_loads"]
    assert found[model]["second_known"]
    assert found[model]["second_in_place"]
    assert found[model]["in_place"] == found[model]["tensors"]


@EVERY_MODEL
def test_nothing_in_force_changes_while_a_plan_is_made(found, model):
    assert found[model]["unchanged"]


@pytest.mark.parametrize(("model", "pairs"), [("dense", 1), ("tied", 1), ("moe", 1), ("biased", 2), ("routed", 3)])
def test_a_plan_that_swaps_or_misses_a_tensor_is_not_proved_and_what_is_loaded_is_right(found, model, pairs):
    assert found[model]["swapped"] == [[False, False, True]] * 2 * pairs, "proved, kept, loaded"


@EVERY_MODEL
def test_a_reload_that_was_cut_can_be_done_again_whole(found, model):
    assert found[model]["repeated"]


@EVERY_MODEL
def test_a_reload_needs_no_tensor_of_its_source_once_it_has_asked_for_the_next(found, model):
    assert found[model]["reused"]


def test_a_model_whose_loading_does_more_than_copy_has_no_plan_and_stays_as_it_was(found):
    refused = found["dense"]["refused"]
    assert len(refused) == 5
    assert refused == dict.fromkeys(refused, False)
    assert found["dense"]["unchanged_by_refused"]


def test_attention_that_keeps_a_copy_of_its_sinks_has_no_plan(found):
    """Only a reload refreshes the copy."""
    assert found["dense"]["sinks"] == {"unknown": False, "copied": False, "shared": True}


def test_gpu_memory_is_given_back_after_a_reload(found):
    assert found["dense"]["freed"] == [1, 1]
