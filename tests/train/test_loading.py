"""What two ranks hold while they load a checkpoint, and whether it is the checkpoint that they then have."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from nano_models import SHAPE
from penstock.errors import ConfigError
from penstock.train.loading import ModuleLoader, checkpoint_files, without_weights

LAYERS = 12
WIDE = {**SHAPE, "vocab_size": 64, "hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": LAYERS}
LORA = {"lora": {"merge": True}, "dtype": "bfloat16"}


def save_wide(folder: Path, dtype: torch.dtype) -> Path:
    Qwen3ForCausalLM(Qwen3Config(**WIDE, tie_word_embeddings=True)).to(dtype).save_pretrained(folder)
    return folder


def save_mixed(folder: Path) -> Path:
    """Of two dtypes and in several files."""
    save_wide(folder, torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = [{}, {}]
    for number, (name, tensor) in enumerate(tensors.items()):
        parts[number % 2][name] = tensor.float() if "down_proj" in name or "norm" in name else tensor
    files = {}
    for number, part in enumerate(parts):
        file = f"model-{number}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    save_file({"x": torch.zeros(1)}, folder / "consolidated.safetensors")  # of another program
    return folder


def save_experts(folder: Path) -> Path:
    config = Qwen3MoeConfig(
        **{**WIDE, "intermediate_size": 256}, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256,
        decoder_sparse_step=1, mlp_only_layers=[], tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def as_hub_name(cache: Path, folder: Path) -> str:
    """Put a checkpoint where the hub's own library keeps what it has downloaded."""
    repository = cache / "models--penstock--wide"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("1" * 40)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / ("1" * 40)).symlink_to(folder)
    return "penstock/wide"


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What rank 0 says of each checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoints")
    half = save_wide(folder / "half", torch.bfloat16)
    full = save_wide(folder / "full", torch.float32)
    rows: dict[str, dict[str, Any]] = {
        "half": {"model": str(half)},
        "mixed": {"model": str(save_mixed(folder / "mixed"))},
        "hub": {"model": as_hub_name(folder / "cache", half)},
        "experts": {"model": str(save_experts(folder / "experts"))},
        "adapter": {"model": str(full), "config": LORA},
        "whole": {"model": str(half), "whole": True},
    }
    told = "".join(json.dumps({"config": {}, "whole": False, **row}) + "\n" for row in rows.values())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | {
        "HF_HUB_CACHE": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",  # what is freed goes back at once, and is measured as such
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(Path(__file__).with_name("load_peaks.py"))]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(port)],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write(told)
            rank.stdin.close()
            rank.stdin = None
        said, errors = ranks[0].communicate(timeout=280)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    answers = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert len(answers) == len(rows), errors[-2000:]
    return dict(zip(rows, answers, strict=True))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["half", "mixed", "hub", "experts", "adapter"])
def test_a_rank_holds_its_shards_and_a_layer_while_it_loads(peaks: dict[str, dict[str, Any]], kind: str):
    assert peaks[kind]["equal"], "the weights are those of the files"
    assert 0.4 < peaks[kind]["peak"] < 0.5 + 3.5 / LAYERS, peaks  # experts are copied to be put together
    assert peaks["whole"]["peak"] > 0.9, peaks  # it is measured: a rank that loads all of it shows


@pytest.mark.parametrize("change", ["lacks", "shape"])
def test_a_checkpoint_that_does_not_fill_the_model_is_refused(tmp_path: Path, change: str):
    config = Qwen3Config(**{**SHAPE, "vocab_size": 64, "num_hidden_layers": 2}, tie_word_embeddings=True)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name][:3].clone()
    if change == "lacks":
        del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = without_weights(str(tmp_path), torch.float32)
    loader = ModuleLoader(model, str(tmp_path), checkpoint_files(str(tmp_path)))
    loader.load(model.model.layers[0])
    with pytest.raises(ConfigError, match=r"its checkpoint lacks .*layers\.1\.mlp\.up_proj\.weight"):
        loader.load(model.model.layers[1])
