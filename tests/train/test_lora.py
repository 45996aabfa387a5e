"""Adapters: gradients as plain PEFT has them, several on one base, merged or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from random_trajectories import trajectories_of
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from nano_models import state_of
from penstock.config import LoraConfig, TrainConfig
from penstock.errors import CheckpointError, StateError, UserError
from penstock.train.grpo import Trainee, datum_of
from penstock.train.interface import AdamSpec, Datum, LoraSpec
from penstock.train.learner import LocalLearner
from penstock.train.losses import LossSpec

SFT = LossSpec({"cross_entropy": 1.0}, all_logprobs=True)
ADAM = AdamSpec(learning_rate=1e-2)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(9)
    config = Qwen3Config(
        vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=False, initializer_range=0.3,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("untied")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def learner_of(model: str) -> LocalLearner:
    return LocalLearner(model, TrainConfig(lora=LoraConfig(), micro_batch_tokens=60), seed=0)


def data_of(model: str, seed: int = 0) -> list[Datum]:
    plain = Trainee(LocalLearner(model, TrainConfig(), seed=0), TrainConfig())
    return [datum_of(t, 2 * t.reward - 1) for t in trajectories_of(plain, seed=seed)]


def trained(learner: LocalLearner, name: str, data: list[Datum], steps: int = 2) -> None:
    for _ in range(steps):
        learner.forward_backward(name, SFT, data)
        learner.optim_step(name, ADAM, scale=0.1)


def held(learner: LocalLearner, adapter: str | None) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.weights(adapter)}


def logprobs_of(model: torch.nn.Module, datum: Datum) -> torch.Tensor:
    logits = model(torch.tensor([datum.input_ids])).logits[0]
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(datum.target_ids)[:, None]).squeeze(-1)


def as_peft(model: str, learner: LocalLearner, name: str, folder: Path) -> torch.nn.Module:
    """The adapter as plain PEFT loads it from what engines are sent."""
    folder.mkdir()
    save_file(held(learner, name), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(learner.adapter_config(name)))
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(base, folder, is_trainable=True)


@pytest.mark.parametrize("unembed", [False, True])
def test_gradients_and_logprobs_are_those_of_plain_peft(untied: str, tmp_path: Path, unembed: bool):  # noqa: FBT001
    learner, data = learner_of(untied), data_of(untied)
    learner.create_adapter("a", LoraSpec(rank=4, alpha=8, train_unembed=unembed))
    trained(learner, "a", data)  # B is 0 before the first step, and A's gradient with it
    plain = as_peft(untied, learner, "a", tmp_path / "a")
    outputs = learner.forward_backward("a", SFT, data)
    loss = torch.zeros(())
    for datum, found in zip(data, outputs.logprobs, strict=True):
        logprobs = logprobs_of(plain, datum)
        torch.testing.assert_close(found, logprobs.detach(), rtol=1e-4, atol=1e-4)
        loss = loss - (logprobs * torch.tensor(datum.weights)).sum()
    loss.backward()
    assert outputs.losses["cross_entropy"] == pytest.approx(loss.item(), rel=1e-5)
    want = {name.replace(".default", ""): p.grad for name, p in plain.named_parameters() if p.requires_grad}
    got = {name: p.grad for name, p in learner._parameters("a").items()}
    assert any("lm_head" in name for name in want) == unembed
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    assert all(p.grad is None for p in learner._parameters(None).values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_our_adapted_matrix_is_pefts_with_a_bias_and_in_bf16(tmp_path: Path, dtype: str):
    torch.manual_seed(9)
    config = Qwen2Config(
        vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    found: list[tuple[list[torch.Tensor], dict[str, torch.Tensor | None]]] = []
    for theirs in (False, True):
        options = TrainConfig(lora=LoraConfig(), micro_batch_tokens=60, dtype=dtype)
        learner = LocalLearner(str(tmp_path), options, seed=0)
        learner.create_adapter("a", LoraSpec(rank=4, alpha=8))
        for number, parameter in enumerate(learner._parameters("a").values()):  # B is 0 at first, and A's gradient
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(number))
        for layer in learner._adapters._layers if theirs else ():
            del layer.forward
        outputs = learner.forward_backward("a", SFT, data_of(str(tmp_path)))
        found.append((list(outputs.logprobs), {name: p.grad for name, p in learner._parameters("a").items()}))
    near = {"rtol": 1e-4, "atol": 1e-4} if dtype == "float32" else {"rtol": 0.1, "atol": 0.1}
    torch.testing.assert_close(*[logprobs for logprobs, _ in found], **near)
    ours, theirs = ([g.flatten() for g in gradients.values()] for _, gradients in found)
    alike = torch.nn.functional.cosine_similarity(torch.cat(ours), torch.cat(theirs), dim=0)
    assert alike > (0.999999 if dtype == "float32" else 0.995)


def test_two_adapters_of_different_ranks_do_not_touch_each_other(micro_model: str):
    learner, data = learner_of(micro_model), data_of(micro_model)
    learner.create_adapter("a", LoraSpec(rank=2))
    learner.create_adapter("b/with.dots:1", LoraSpec(rank=5, train_mlp=False, seed=3))
    base, other = held(learner, None), held(learner, "b/with.dots:1")
    before = learner.forward("b/with.dots:1", SFT, data)
    learner.forward_backward("b/with.dots:1", SFT, data)
    trained(learner, "a", data, steps=3)
    assert learner.versions == {None: 0, "a": 4, "b/with.dots:1": 1}
    torch.testing.assert_close(held(learner, "b/with.dots:1"), other, rtol=0, atol=0)
    torch.testing.assert_close(held(learner, None), base, rtol=0, atol=0)
    after = learner.forward("b/with.dots:1", SFT, data)
    torch.testing.assert_close(after.logprobs, before.logprobs, rtol=0, atol=0)
    assert learner.forward("a", SFT, data).losses["cross_entropy"] < before.losses["cross_entropy"]
    learner.optim_step("b/with.dots:1", ADAM, scale=1.0)  # with the gradient from before the other's steps
    alone = learner_of(micro_model)
    alone.create_adapter("b", LoraSpec(rank=5, train_mlp=False, seed=3))
    alone.forward_backward("b", SFT, data)
    alone.optim_step("b", ADAM, scale=1.0)
    torch.testing.assert_close(held(learner, "b/with.dots:1"), held(alone, "b"), rtol=0, atol=0)
    assert all("mlp" not in name for name in other)


def test_a_new_adapter_changes_nothing_and_a_dropped_one_is_gone(micro_model: str):
    learner, data = learner_of(micro_model), data_of(micro_model)
    base, names = learner.forward(None, SFT, data), held(learner, None).keys()
    learner.create_adapter("a", LoraSpec())
    for adapter in (None, "a"):
        torch.testing.assert_close(learner.forward(adapter, SFT, data).logprobs, base.logprobs, rtol=0, atol=0)
    assert held(learner, None).keys() == names
    learner.create_adapter("b", LoraSpec(rank=2))
    trained(learner, "b", data)
    learner.drop_adapter("a")
    with pytest.raises(UserError, match="has no adapter 'a'; it has 'b'"):
        learner.forward("a", SFT, data)
    torch.testing.assert_close(learner.forward(None, SFT, data).logprobs, base.logprobs, rtol=0, atol=0)
    learner.drop_adapter("b")
    kept: Any = learner.policy.model
    assert kept.peft_config == {}, "the settings of every adapter there ever was"
    learner.create_adapter("a", LoraSpec(rank=3))
    torch.testing.assert_close(learner.forward("a", SFT, data).logprobs, base.logprobs, rtol=0, atol=0)


def test_merged_weights_compute_what_the_adapter_does(micro_model: str, untied: str):
    for model, unembed in ((micro_model, False), (untied, True)):
        learner, data = learner_of(model), data_of(model)
        learner.create_adapter("a", LoraSpec(rank=4, train_unembed=unembed))
        trained(learner, "a", data)
        merged = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        missing = merged.load_state_dict({n: t.clone() for n, t in learner.merged_weights("a")}, strict=False)
        assert not missing.unexpected_keys
        for datum, found in zip(data, learner.forward("a", SFT, data).logprobs, strict=True):
            torch.testing.assert_close(found, logprobs_of(merged, datum).detach(), rtol=1e-4, atol=1e-4)


def test_an_adapter_goes_on_bit_for_bit_from_its_state(micro_model: str):
    learner, data = learner_of(micro_model), data_of(micro_model)
    learner.create_adapter("a", LoraSpec(rank=2))
    trained(learner, "a", data)
    state = state_of(learner, "a")
    assert not any("embed_tokens" in name for name in state[0]), "the base is not in it"
    other = learner_of(micro_model)
    other.create_adapter("x", LoraSpec(rank=2, seed=8))
    other.load_state("x", *state)
    for each, name in ((learner, "a"), (other, "x")):
        trained(each, name, data, steps=1)
    assert other.versions["x"] == learner.versions["a"] == 4
    torch.testing.assert_close(held(other, "x"), held(learner, "a"), rtol=0, atol=0)


def test_what_does_not_fit_is_refused(micro_model: str, untied: str):
    learner, data = learner_of(micro_model), data_of(micro_model)
    learner.create_adapter("a", LoraSpec(rank=2))
    with pytest.raises(UserError, match="has an adapter 'a' already"):
        learner.create_adapter("a", LoraSpec())
    with pytest.raises(UserError, match="a loss of no parts has no gradient"):
        learner.forward_backward("a", LossSpec({}), data)
    with pytest.raises(UserError, match="chooses no matrix"):
        learner.create_adapter("b", LoraSpec(train_attn=False, train_mlp=False))
    with pytest.raises(StateError, match="base's weights are frozen"):
        learner.forward_backward(None, SFT, data)
    learner.create_adapter("head", LoraSpec(train_unembed=True))
    with pytest.raises(UserError, match="cannot be merged"):
        learner.merged_weights("head")
    other = learner_of(untied)
    other.create_adapter("a", LoraSpec(rank=2))
    with pytest.raises(CheckpointError, match="adapter of another base model"):
        other.load_state("a", *state_of(learner, "a"))
    other = learner_of(micro_model)
    with torch.no_grad():
        other.policy.model.base_model.embed_tokens.weight[-1, -1] += 1.0
    other.create_adapter("a", LoraSpec(rank=2))
    with pytest.raises(CheckpointError, match="adapter of another base model"):
        other.load_state("a", *state_of(learner, "a"))
    with pytest.raises(CheckpointError, match="is of another model"):
        learner.load_state("a", *state_of(learner, "head"))


def test_merging_reaches_a_matrix_that_the_checkpoint_calls_otherwise(tmp_path: Path):
    learner = learner_of(neox(tmp_path / "neox"))
    learner.create_adapter("a", LoraSpec(rank=2, train_unembed=True))
    generator = torch.Generator().manual_seed(1)
    learner.set_adapter("a", {n: torch.randn(t.shape, generator=generator) for n, t in learner.weights("a")})
    base, found = held(learner, None), {n: t.clone() for n, t in learner.merged_weights("a")}
    assert len({name for name, tensor in found.items() if not torch.equal(tensor, base[name])}) == 9
    assert not torch.equal(found["embed_out.weight"], base["embed_out.weight"])


def test_what_a_new_or_replaced_adapter_leaves_alone(micro_model: str):
    learner, data = learner_of(micro_model), data_of(micro_model)
    random = torch.get_rng_state()
    learner.create_adapter("a", LoraSpec(rank=2))
    assert torch.equal(torch.get_rng_state(), random), "it draws from a generator of its own"
    first = held(learner, "a")
    trained(learner, "a", data, steps=3)
    learner.set_adapter("a", first)
    trained(learner, "a", data, steps=1)
    other = learner_of(micro_model)
    other.create_adapter("a", LoraSpec(rank=2))
    trained(other, "a", data, steps=1)
    torch.testing.assert_close(held(learner, "a"), held(other, "a"), rtol=0, atol=0)
    key = next(iter(first))
    with pytest.raises(UserError, match=f"{key} has a value that is no finite number"):
        learner.set_adapter("a", {**first, key: torch.full_like(first[key], torch.nan)})
    torch.testing.assert_close(held(learner, "a"), held(other, "a"), rtol=0, atol=0)
    with pytest.raises(StateError, match="base's weights are frozen"):
        learner.optim_step(None, ADAM, scale=1.0)
    assert learner.versions[None] == 0


def neox(folder: Path) -> str:
    config = GPTNeoXConfig(
        vocab_size=24, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    GPTNeoXForCausalLM(config).save_pretrained(folder)
    return str(folder)


def test_an_adapter_changes_all_that_its_spec_asks_for_or_is_refused(tmp_path: Path):
    learner = learner_of(neox(tmp_path / "neox"))
    learner.create_adapter("a", LoraSpec(rank=2))
    changed = {name.split(".")[-3] for name in held(learner, "a")}
    assert changed == {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}
    experts = Qwen2MoeConfig(
        vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_experts=4,
        num_key_value_heads=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    )  # fmt: skip
    Qwen2MoeForCausalLM(experts).save_pretrained(tmp_path / "experts")
    learner = learner_of(str(tmp_path / "experts"))
    with pytest.raises(UserError, match="cannot change this model's experts; set train_mlp to false"):
        learner.create_adapter("a", LoraSpec(rank=2))
    learner.create_adapter("a", LoraSpec(rank=2, train_mlp=False))
    assert all("self_attn" in name for name in held(learner, "a"))
    assert learner.adapter_config("a")["base_model_name_or_path"] == str(tmp_path / "experts")


def test_the_base_is_frozen_by_an_adapter_and_not_by_a_refused_one(micro_model: str):
    learner, data = learner_of(micro_model), data_of(micro_model)
    learner.forward_backward(None, SFT, data)
    for spec in (LoraSpec(rank=0), LoraSpec(train_attn=False, train_mlp=False)):
        with pytest.raises(UserError):
            learner.create_adapter("a", spec)
    assert learner.versions == {None: 0}
    learner.forward_backward(None, SFT, data)
    assert learner._parameters(None).keys() == dict(learner.policy.model.named_parameters()).keys()
    assert any(p.grad is not None for p in learner._parameters(None).values())
    learner.create_adapter("a", LoraSpec(rank=2))
    assert all(p.grad is None for p in learner._parameters(None).values()), "nothing will step with it"
    with pytest.raises(StateError, match="base's weights are frozen"):
        learner.forward_backward(None, SFT, data)


def test_a_gradient_that_is_no_number_changes_no_adapter(micro_model: str):
    learner, data = learner_of(micro_model), data_of(micro_model)
    learner.create_adapter("a", LoraSpec(rank=2))
    before = state_of(learner, "a")
    learner.forward_backward("a", SFT, data)
    with pytest.raises(StateError, match="gradient of norm nan: nothing was changed"):
        learner.optim_step("a", ADAM, scale=float("nan"))
    after = state_of(learner, "a")
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=0)
    assert after[1] == before[1]
    trained(learner, "a", data, steps=1)  # the bad gradient is forgotten
    assert all(tensor.isfinite().all() for tensor in held(learner, "a").values())


def test_a_frozen_base_is_held_in_the_dtype_that_computes(micro_model: str):
    config = TrainConfig(lora=LoraConfig(), dtype="bfloat16")
    learner, data = LocalLearner(micro_model, config, seed=0), data_of(micro_model)
    learner.create_adapter("a", LoraSpec())
    trained(learner, "a", data)
    assert {p.dtype for p in learner._parameters(None).values()} == {torch.bfloat16}
    assert {p.dtype for p in learner._parameters("a").values()} == {torch.float32}
