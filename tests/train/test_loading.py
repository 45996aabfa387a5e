"""Models that do not fit the memory, and checkpoints that do not fill the model that ranks load module by module."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from nano_models import SHAPE
from penstock.config import LoraConfig, TrainConfig
from penstock.errors import ConfigError
from penstock.train import loading
from penstock.train.learner import LocalLearner
from penstock.train.loading import ModuleLoader, check_fits, checkpoint_files, parameter_count, without_weights

CPU = torch.device("cpu")


def test_parameters_are_counted_as_the_checkpoint_has_them(micro_model: str):
    with safe_open(f"{micro_model}/model.safetensors", "pt") as file:
        stored = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    assert parameter_count(micro_model) == stored


def test_a_model_that_cannot_fit_is_refused_with_the_arithmetic_and_not_loaded(micro_model: str, tmp_path: Path):
    """8e9 parameters: there are no weights in the folder, and none are looked for."""
    config = json.loads((Path(micro_model) / "config.json").read_text())
    config |= {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 400, "vocab_size": 150_000}
    config["layer_types"] = ["full_attention"] * 400
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"e9 parameters and cannot be trained in .* GiB of free CPU memory: weights"):
        LocalLearner(str(tmp_path), TrainConfig(), seed=0)


def test_a_configuration_that_contradicts_itself_is_refused(micro_model: str, tmp_path: Path):
    config = json.loads((Path(micro_model) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 90}))
    with pytest.raises(ConfigError, match=r"cannot load model .* for training: "):
        LocalLearner(str(tmp_path), TrainConfig(), seed=0)


def test_ranks_share_and_an_adapter_needs_the_base_alone(micro_model: str, monkeypatch: pytest.MonkeyPatch):
    count = parameter_count(micro_model)
    monkeypatch.setattr(loading, "_free_bytes", lambda _device: 8 * count)
    says = r"weights \d.* \+ gradients \d.* \+ AdamW \d.* = \d.* GiB; train an adapter"
    with pytest.raises(ConfigError, match=says):
        check_fits(micro_model, TrainConfig(), CPU)
    check_fits(micro_model, TrainConfig(), CPU, ranks=2)
    check_fits(micro_model, TrainConfig(lora=LoraConfig()), CPU)
    monkeypatch.setattr(loading, "_free_bytes", lambda _device: 3 * count)
    check_fits(micro_model, TrainConfig(lora=LoraConfig()), CPU, frozen_bytes=2)
    with pytest.raises(ConfigError, match="frozen weights"):
        check_fits(micro_model, TrainConfig(lora=LoraConfig()), CPU)


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
