"""The plan of copies that stands for vLLM's reload on GPUs: proved for real models, refused where it is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.engine.process import free_port

TESTS = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What `direct_plan_program.py` says of each model."""
    program = [sys.executable, str(TESTS / "engine" / "direct_plan_program.py")]
    folder = tmp_path_factory.mktemp("plans")
    env = {**os.environ, "PYTHONPATH": str(TESTS)}
    done = subprocess.run(
        [*program, str(folder), str(free_port())], env=env, capture_output=True, text=True, timeout=180, check=False
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stderr[-3000:]
    return {line["model"]: line for line in lines}


@pytest.mark.parametrize("model", ["dense", "tied", "moe"])
def test_loading_is_found_to_be_copies_that_put_every_tensor_where_vllm_does(found, model):
    assert found[model]["planned"]
    assert found[model]["as_vllm_loads"]
    assert found[model]["in_place"] == found[model]["tensors"]


@pytest.mark.parametrize("model", ["dense", "tied", "moe"])
def test_a_plan_that_swaps_two_tensors_of_one_shape_is_refused_and_the_model_stays_as_it_was(found, model):
    assert "are not what vLLM loads" in found[model]["swapped"]
    assert found[model]["unchanged"]


@pytest.mark.parametrize("model", ["dense", "tied", "moe"])
def test_a_proof_that_fails_in_the_middle_of_a_layer_leaves_the_model_as_it_was(found, model):
    assert found[model]["failed_proof"] == {"plan": False, "same": True}


@pytest.mark.parametrize("model", ["dense", "tied", "moe"])
def test_a_reload_that_was_cut_can_be_done_again_whole(found, model):
    assert found[model]["repeated"]
