"""What weights must be: the tensors of an update, and what changes the checksum of those in force."""

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
from penstock.plugin.cores import check_replicas
from penstock.plugin.spec import TIED_HEAD, WeightSpec, expected_weights
from penstock.weights.checkpoint_names import checkpoint_tensors
from penstock.weights.manifest import TensorEntry, WeightManifest, kind_of


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


def weights_checksum(model: torch.nn.Module) -> str:
    from penstock.plugin import worker

    return worker.weights_checksum(model)


class Model(torch.nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = torch.nn.Parameter(torch.randn(3, 4, 6).to(dtype))
        self.bias = torch.nn.Parameter(torch.randn(6).to(dtype))
        self.scale = torch.nn.Parameter(torch.tensor(2.0).to(dtype))
        self.empty = torch.nn.Parameter(torch.empty(0, 4).to(dtype))


def swap(a: torch.Tensor, b: torch.Tensor) -> None:
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)


CHANGES = {
    "one value": lambda m: m.experts[0, 0, 0].add_(1e-3),
    "one sign": lambda m: m.scale.neg_(),
    "two rows": lambda m: swap(m.experts[1, 0], m.experts[1, 2]),
    "two experts": lambda m: swap(m.experts[0], m.experts[2]),
    "two values of a vector": lambda m: swap(m.bias[0], m.bias[2]),
    "two parameters": lambda m: swap(m.bias, m.experts[0, 0]),
}


@pytest.mark.vllm
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_the_model_changes_the_checksum(change) -> None:
    model = Model()
    with torch.no_grad():
        change(model)
    assert weights_checksum(model) != weights_checksum(Model())


@pytest.mark.vllm
def test_only_weights_of_equal_shapes_are_compared() -> None:
    same, split = Model(), Model()
    with torch.no_grad():
        same.experts.mul_(2)
    split.experts = torch.nn.Parameter(split.experts[:, :2].clone())
    assert kind_of(weights_checksum(same)) == kind_of(weights_checksum(Model())) != kind_of(weights_checksum(split))


@pytest.mark.vllm
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_equal_weights_have_equal_checksums_in_any_dtype(dtype: torch.dtype) -> None:
    assert weights_checksum(Model(dtype)) == weights_checksum(Model(dtype)) != weights_checksum(Model())


@pytest.mark.parametrize(
    ("checksums", "replicas"),
    [
        (["a"], 1),
        (["a", "b"], 1),
        (["a", "a"], 2),
        (["a", "b"] * 3, 3),
        (["sums:x", "a"], 2),
        (["sums:x", "sums:x", "sums:x", "b", "a", "b"], 3),
    ],
)
def test_shards_differ_and_replicas_do_not(checksums: list[str], replicas: int) -> None:
    check_replicas(checksums, replicas)


@pytest.mark.parametrize(
    ("checksums", "replicas", "message"),
    [
        (["a", "b"], 2, "replica 1 has on rank 0 weights of checksum b, replica 0 of a"),
        (["a", "b", "a", "b", "a", "c"], 3, "replica 2 has on rank 1 weights of checksum c, replica 0 of b"),
        (["a", "b", "b", "a"], 2, "replica 1 has on rank 0"),
        (["sums:x", "sums:y"], 2, "replica 1 has on rank 0 weights of checksum sums:y, replica 0 of sums:x"),
        (["sums:x", "a", "b"], 3, "replica 2 has on rank 0 weights of checksum b, replica 1 of a"),
    ],
)
def test_a_replica_with_other_weights_is_found(checksums: list[str], replicas: int, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        check_replicas(checksums, replicas)
