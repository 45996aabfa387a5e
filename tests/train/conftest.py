from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from random_trajectories import VOCABULARY
from training_setup import save_nano_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from char_tokenizer import save_char_tokenizer


@pytest.fixture(scope="session")
def micro_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen3 of 20k random weights with tied embeddings, the size at which a step takes milliseconds."""
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    folder: Path = tmp_path_factory.mktemp("micro")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_nano_model(tmp_path_factory.mktemp("nano"))


@pytest.fixture(scope="session")
def chat_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The nano model with a tokenizer of characters."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(model, folder)
    save_char_tokenizer(folder, max_length=64, alphabet="0123456789=th")
    return folder
