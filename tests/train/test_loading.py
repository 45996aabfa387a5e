"""A checkpoint that does not fill the model that ranks load module by module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from nano_models import SHAPE
from penstock.errors import ConfigError
from penstock.train.loading import ModuleLoader, checkpoint_files, without_weights


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
