"""Adapters that share a pass over the base: each has the gradient, logprobs and sums of a pass of its own."""

from __future__ import annotations

from dataclasses import replace
from itertools import starmap
from pathlib import Path

import pytest
import torch
from test_lora import SFT, data_of, learner_of, trained, untied  # noqa: F401 - a fixture
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from penstock.errors import StateError
from penstock.train.interface import Datum, LoraSpec
from penstock.train.learner import LocalLearner
from penstock.train.losses import LossSpec

SPECS = {
    "a": LoraSpec(rank=4, alpha=8, seed=1),
    "b": LoraSpec(rank=2, alpha=32, train_mlp=False, seed=2),
    "c": LoraSpec(rank=3, train_unembed=True, seed=3),
}
POLICY = LossSpec({"importance_sampling": 1.0}, temperature=0.7)


def learner_with_all(model: str) -> LocalLearner:
    learner = learner_of(model)
    for number, (name, spec) in enumerate(SPECS.items()):
        learner.create_adapter(name, spec)
        trained(learner, name, data_of(model, seed=number), steps=2)
    return learner


def gradients(learner: LocalLearner) -> dict[str, torch.Tensor]:
    named = {f"{name}/{key}": p.grad for name in SPECS for key, p in learner._parameters(name).items()}
    return {key: grad.clone() for key, grad in named.items() if grad is not None}


def parts_of(model: str) -> list[tuple[str, LossSpec, list[Datum]]]:
    """Of one adapter no datum has a gradient to give, and one's data take several micro-batches."""
    flat = [data_of(model, seed=number) for number in range(3)]
    return [("a", SFT, flat[0] * 3), ("b", POLICY, flat[1][:2]), ("c", SFT, flat[2])]


def test_what_is_found_together_is_what_is_found_apart(untied: str):  # noqa: F811
    learner, parts = learner_with_all(untied), parts_of(untied)
    apart = list(starmap(learner.forward_backward, parts))
    wanted = gradients(learner)
    for name in SPECS:
        learner._optimizer(name).zero_grad()
    together = learner.forward_backward_together(parts)
    found = gradients(learner)
    assert found.keys() == wanted.keys()
    assert len(wanted) > 30
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[key], rtol=1e-3, atol=1e-4)
    for one, other in zip(apart, together, strict=True):
        for kind in ("losses", "denominators", "metrics"):
            assert getattr(other, kind) == pytest.approx(getattr(one, kind), rel=1e-5, abs=1e-5)
        for ours, theirs in zip(other.logprobs, one.logprobs, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_gradients_add_to_those_that_are_held(untied: str):  # noqa: F811
    learner, parts = learner_with_all(untied), parts_of(untied)
    learner.forward_backward_together(parts)
    once = gradients(learner)
    learner.forward_backward_together(parts[:2])
    for key, gradient in gradients(learner).items():
        factor = 1 if key.startswith("c/") else 2
        torch.testing.assert_close(gradient, factor * once[key], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("place", ["lora_A", "lora_B"])
def test_a_model_that_is_broken_changes_nobodys_gradient(untied: str, place: str):  # noqa: F811
    learner, parts = learner_with_all(untied), parts_of(untied)
    learner.forward_backward(*parts[0])
    before = gradients(learner)
    broken = next(p for key, p in learner._parameters("b").items() if place in key)
    with torch.no_grad():
        broken[0, 0] = float("nan")
    with pytest.raises(StateError, match="not finite"):
        learner.forward_backward_together(parts)
    after = gradients(learner)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
    learner.forward_backward_together([parts[0], parts[2]])
    assert all(gradient.isfinite().all() for gradient in gradients(learner).values())


def test_experts_of_one_adapters_data_are_replayed_in_a_shared_pass(tmp_path: Path):
    config = Qwen3MoeConfig(
        vocab_size=24, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(5)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    learner = learner_of(str(tmp_path))
    for name in ("a", "b"):
        learner.create_adapter(name, LoraSpec(rank=2, train_mlp=False))
    ids, ones = list(range(3, 12)), [1.0] * 9
    replayed = Datum(ids, ids, ones, ones, ones, experts=torch.tensor([[0, 1], [2, 3]]).expand(9, 2, 2))
    plain = Datum(ids[::-1], ids[::-1], ones, ones, ones)
    for parts in ([("a", SFT, [replayed]), ("b", SFT, [plain])], [("b", SFT, [plain]), ("a", SFT, [replayed])]):
        apart = [learner.forward(*part).losses for part in parts]
        assert [outputs.losses for outputs in learner.forward_backward_together(parts)] == [
            pytest.approx(losses, rel=1e-5) for losses in apart
        ]
    assert (
        learner.forward("a", SFT, [replace(replayed, experts=None)]).losses
        != learner.forward("a", SFT, [replayed]).losses
    )
