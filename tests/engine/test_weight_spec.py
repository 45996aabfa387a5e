"""What an update has to bring is known from the checkpoint's headers, or without weights from its config."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from nano_models import save_dense, save_moe
from penstock.errors import WeightsError
from penstock.plugin.spec import TIED_HEAD, WeightSpec, expected_weights
from penstock.weights.checkpoint_names import checkpoint_tensors
from penstock.weights.manifest import TensorEntry, WeightManifest


def spec_of(folder: Path) -> WeightSpec:
    """As of vLLM's ModelConfig for this folder; what is read of it is transformers'."""
    config = AutoConfig.from_pretrained(folder)
    return expected_weights(
        SimpleNamespace(model=str(folder), dtype=torch.bfloat16, hf_config=config, hf_text_config=config)
    )


def manifest_of(tensors: dict[str, torch.Tensor]) -> WeightManifest:
    entries = tuple(TensorEntry(name, "float32", tuple(t.shape), 0, 0) for name, t in tensors.items())
    return WeightManifest(1, "shared_memory", {"path": "nowhere"}, entries)


@pytest.mark.parametrize("save", [save_moe, save_dense])
def test_a_config_alone_names_what_the_checkpoint_names(save: Any, tmp_path: Path) -> None:
    """Engines of dummy weights (`load_format: dummy`) have nothing but the config."""
    whole = spec_of(save(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    bare = spec_of(tmp_path)
    assert dict(bare.shapes) == dict(whole.shapes)
    assert set(bare.dtypes.values()) == {frozenset({"bfloat16"})}
    assert set(whole.dtypes.values()) == {frozenset({"bfloat16", "float32"})}
    assert bare.optional == whole.optional


def test_every_expert_is_asked_for_by_its_own_name(tmp_path: Path) -> None:
    spec = spec_of(save_moe(tmp_path))
    assert sum(".mlp.experts." in name for name in spec.shapes) == 2 * 4 * 3, "layers x experts x projections"
    given = load_file(tmp_path / "model.safetensors")
    spec.check(manifest_of(given))
    lost = given.pop("model.layers.1.mlp.experts.3.up_proj.weight")
    with pytest.raises(WeightsError, match=r"1 tensors .* are missing: model\.layers\.1\.mlp\.experts\.3\.up_proj"):
        spec.check(manifest_of(given))
    given["model.layers.1.mlp.experts.4.up_proj.weight"] = lost
    with pytest.raises(WeightsError, match=r"not in the engine's model: model\.layers\.1\.mlp\.experts\.4\.up_proj"):
        spec.check(manifest_of(given))


def test_a_trainers_model_is_named_as_its_checkpoint(tmp_path: Path) -> None:
    """In memory transformers keeps experts in one tensor, which no engine knows."""
    spec = spec_of(save_moe(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32")
    with pytest.raises(WeightsError, match=r"not in the engine's model: .*mlp\.experts\.down_proj"):
        spec.check(manifest_of(dict(model.named_parameters())))
    tensors = checkpoint_tensors(model)
    spec.check(manifest_of(tensors))
    saved = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in tensors.items())


def test_the_head_of_a_model_that_has_none_of_its_own_is_named() -> None:
    """A trainer's `state_dict()` has it beside the embedding."""
    embedding = {"model.embed_tokens.weight": torch.ones(2, 2)}
    tied = WeightSpec(
        dict.fromkeys(embedding, (2, 2)), dict.fromkeys(embedding, frozenset({"float32"})), frozenset({TIED_HEAD})
    )
    tied.check(manifest_of(embedding))
    with pytest.raises(WeightsError, match=r"lm_head\.weight; the embedding serves as head too: leave it out"):
        tied.check(manifest_of(embedding | {TIED_HEAD: torch.ones(2, 2)}))
