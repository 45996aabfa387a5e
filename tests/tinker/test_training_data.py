"""The SDK's training data as a learner takes them: losses and gradients are those of plain peft and transformers."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import save_file
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from penstock.config import LoraConfig, TrainConfig
from penstock.errors import StateError, UserError
from penstock.tinker.learner_process import spec_of
from penstock.tinker.models import Models
from penstock.tinker.training_data import Sizes, decode, encode, joined
from penstock.train.interface import AdamSpec
from penstock.train.learner import LocalLearner
from tinker import types

VOCABULARY = 24
SIZES = Sizes(VOCABULARY, 64)
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=False, initializer_range=0.3,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("base")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def models_of(base: str, folder: Path) -> Models:
    learner = LocalLearner(base, TrainConfig(lora=LoraConfig(), micro_batch_tokens=40, threads=1), seed=0)
    return Models(learner, folder / "models", "base", max_rank=8)


def trained(base: str, folder: Path, **lora: Any) -> Models:
    """A model whose B is not 0, so that every gradient is something."""
    models = models_of(base, folder)
    models.create("m", spec_of({"rank": 4, "seed": 1, **lora}))
    models.run("m", decode(request("cross_entropy", data_of(3)), SIZES))
    models.step("m", AdamSpec(learning_rate=3e-2))
    return models


def data_of(seed: int, count: int = 5, **extra: Callable[[np.random.Generator, int], Any]) -> list[types.Datum]:
    rng = np.random.default_rng(seed)
    data = []
    for _ in range(count):
        length = int(rng.integers(3, 17))
        inputs: dict[str, Any] = {"target_tokens": rng.integers(0, VOCABULARY, length)}
        inputs |= {name: make(rng, length) for name, make in extra.items()}
        tokens = rng.integers(0, VOCABULARY, length).tolist()
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs))
    return data


def request(loss: str, data: Sequence[types.Datum], *, config: Any = None, forward_only: bool = False) -> bytes:
    given = types.ForwardBackwardInput(data=list(data), loss_fn=loss, loss_fn_config=config)  # pyright: ignore[reportArgumentType]
    sent = types.ForwardBackwardRequest(forward_backward_input=given, model_id="m", seq_id=1)
    message = forward_backward_request_to_proto(sent)
    message.forward_only = forward_only
    return message.SerializeToString()


def done(models: Models, body: bytes) -> types.ForwardBackwardOutput:
    batch = decode(body, SIZES)
    return deserialize_forward_backward_output(encode(batch, models.run("m", batch)))


def plain_of(base: str, models: Models, folder: Path) -> torch.nn.Module:
    """The adapter as plain PEFT loads it from what is saved for sampling."""
    models.writer("m")(folder)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, folder, is_trainable=True)


def logprobs_of(model: torch.nn.Module, datum: types.Datum) -> torch.Tensor:
    """[T] or [T, K]."""
    logits = model(torch.tensor([datum.model_input.to_ints()])).logits[0]
    targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"].to_numpy())
    every = torch.log_softmax(logits, -1)
    found = every.gather(-1, targets if targets.ndim > 1 else targets[:, None])
    return found if targets.ndim > 1 else found.squeeze(-1)


def gradients(models: Models) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in models.learner._parameters("m").items()}  # pyright: ignore[reportAttributeAccessIssue]


def normal(scale: float) -> Callable[[np.random.Generator, int], Any]:
    return lambda rng, n: (scale * rng.standard_normal(n)).astype(np.float32)


def near(rng: np.random.Generator, n: int) -> Any:
    return (-math.log(VOCABULARY) + rng.standard_normal(n)).astype(np.float32)


def ppo(lp: torch.Tensor, q: torch.Tensor, a: torch.Tensor, _w: torch.Tensor) -> torch.Tensor:
    ratio = (lp - q).exp()
    return -torch.minimum(ratio * a, ratio.clamp(0.7, 1.1) * a).sum()


def cispo(lp: torch.Tensor, q: torch.Tensor, a: torch.Tensor, _w: torch.Tensor) -> torch.Tensor:
    return -((lp - q).exp().clamp(0.7, 1.1).detach() * lp * a).sum()


def gspo(lp: torch.Tensor, q: torch.Tensor, a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    mean = (lp.detach() - q)[w != 0].mean()
    ratio = (mean + lp - lp.detach()).exp()
    return -torch.minimum(ratio * a, ratio.clamp(0.7, 1.1) * a).sum()


CLIP = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1}
LOSSES: Mapping[str, tuple[Loss, Any]] = {
    "cross_entropy": (lambda lp, _q, _a, w: -(lp * w).sum(), None),
    "importance_sampling": (lambda lp, q, a, _w: -((lp - q).exp() * a).sum(), None),
    "ppo": (ppo, CLIP),
    "cispo": (cispo, CLIP),
    "dro": (lambda lp, q, a, _w: -(lp * a - 0.5 * 0.1 * (lp - q) ** 2).sum(), {"beta": 0.1}),
    "gspo": (gspo, CLIP),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_gradients_are_those_of_plain_peft(base: str, tmp_path: Path, loss: str):
    models = trained(base, tmp_path)
    policy = {"logprobs": near, "advantages": normal(1.0)}
    mask = lambda rng, n: np.array([0.0, 0.0, *[1.0] * (n - 2)], np.float32)  # noqa: E731, ARG005
    inputs = {"cross_entropy": {"weights": normal(1.0)}, "gspo": {**policy, "sequence_ratio_mask": mask}}
    data = data_of(7, **inputs.get(loss, policy))
    formula, config = LOSSES[loss]
    result = done(models, request(loss, data, config=config))
    plain = plain_of(base, models, tmp_path / "adapter")
    total = torch.zeros(())
    for datum, found in zip(data, result.loss_fn_outputs, strict=True):
        logprobs = logprobs_of(plain, datum)
        np.testing.assert_allclose(found["logprobs"].to_numpy(), logprobs.detach().numpy(), rtol=1e-4, atol=1e-4)
        given = {name: torch.from_numpy(tensor.to_numpy()) for name, tensor in datum.loss_fn_inputs.items()}
        zero = torch.zeros_like(logprobs)
        weights = given.get("weights", given.get("sequence_ratio_mask", zero))
        total = total + formula(logprobs, given.get("logprobs", zero), given.get("advantages", zero), weights)
    total.backward()
    assert result.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-4)
    want = {name.replace(".default", ""): p.grad for name, p in plain.named_parameters() if p.requires_grad}
    assert any("lm_head" in name for name in want)
    torch.testing.assert_close(gradients(models), want, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("sparse", [False, True])
def test_several_targets_a_token_are_summed_as_plain_peft_sums_them(base: str, tmp_path: Path, sparse: bool):  # noqa: FBT001
    models, data = trained(base, tmp_path), []
    rng = np.random.default_rng(1)
    for width in (3, 3, 9):
        length = int(rng.integers(4, 9))
        targets = torch.from_numpy(rng.integers(1, VOCABULARY, (length, width)))
        weights = torch.from_numpy(rng.standard_normal((length, width)).astype(np.float32))
        hidden = torch.from_numpy(rng.random((length, width)) < 0.7)
        if sparse:
            targets, weights = targets.masked_fill(hidden, 0), weights.masked_fill(hidden, 0.0)
        tokens = types.ModelInput.from_ints(rng.integers(0, VOCABULARY, length).tolist())
        data.append(types.Datum(model_input=tokens, loss_fn_inputs={"target_tokens": targets, "weights": weights}))
    csr = [datum.loss_fn_inputs["target_tokens"].sparse_crow_indices is not None for datum in data]
    assert any(csr) == sparse
    result = done(models, request("cross_entropy", data))
    plain = plain_of(base, models, tmp_path / "adapter")
    total = torch.zeros(())
    for datum, found, is_sparse in zip(data, result.loss_fn_outputs, csr, strict=True):
        logprobs = logprobs_of(plain, datum)
        weights = torch.from_numpy(datum.loss_fn_inputs["weights"].to_numpy())
        listed = datum.loss_fn_inputs["target_tokens"].to_numpy() != 0 if is_sparse else np.ones(weights.shape, bool)
        expected = np.where(listed, logprobs.detach().numpy(), 0.0)
        np.testing.assert_allclose(found["logprobs"].to_numpy(), expected, rtol=1e-4, atol=1e-4)
        total = total - (weights * logprobs).sum()
    total.backward()
    assert result.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-4)
    want = {name.replace(".default", ""): p.grad for name, p in plain.named_parameters() if p.requires_grad}
    torch.testing.assert_close(gradients(models), want, rtol=1e-3, atol=2e-4)


def test_a_batch_in_parts_is_the_whole_batch(base: str, tmp_path: Path):
    models, body = trained(base, tmp_path), request("cross_entropy", data_of(7, 9, weights=normal(1.0)))
    batch = decode(body, SIZES)
    parts = list(batch.parts(30))
    lengths = [sum(len(datum.input_ids) for datum in part.data) for part in parts]
    assert len(parts) > 1
    assert max(lengths) <= 30
    assert len(list(batch.parts(1))) == 9
    found = deserialize_forward_backward_output(encode(batch, joined([models.run("m", part) for part in parts])))
    in_parts = gradients(models)
    models.step("m", AdamSpec(learning_rate=0.0))
    whole = done(models, body)
    torch.testing.assert_close(gradients(models), in_parts, rtol=1e-3, atol=1e-4)
    assert found.metrics == pytest.approx(whole.metrics, rel=1e-5)
    for one, other in zip(found.loss_fn_outputs, whole.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(one["logprobs"].to_numpy(), other["logprobs"].to_numpy(), atol=1e-5)


def test_a_sparse_tensor_beside_a_dense_one_keeps_token_0(base: str, tmp_path: Path):
    models = trained(base, tmp_path)
    targets = types.TensorData([5], "int64", [2, 8], sparse_crow_indices=[0, 1, 1], sparse_col_indices=[2])
    weights = np.zeros((2, 8), np.float32)
    weights[0, 2], weights[1, 4] = 1.0, 2.0  # at [1, 4] the target is token 0, which a sparse tensor does not list
    inputs = {"target_tokens": targets, "weights": weights}
    datum = types.Datum(model_input=types.ModelInput.from_ints([3, 4]), loss_fn_inputs=inputs)
    found = done(models, request("cross_entropy", [datum], forward_only=True))
    logprobs = found.loss_fn_outputs[0]["logprobs"].to_numpy()
    assert sorted(zip(*logprobs.nonzero(), strict=True)) == [(0, 2), (1, 4)]
    assert found.metrics["loss:sum"] == pytest.approx(-logprobs[0, 2] - 2 * logprobs[1, 4])


def test_bounds_of_each_token_stand_in_for_those_of_the_config(base: str, tmp_path: Path):
    models = trained(base, tmp_path)
    policy = {"logprobs": near, "advantages": normal(1.0)}
    bounds = {"clip_low_threshold": lambda _, n: np.full(n, 0.7, np.float32)}
    bounds["clip_high_threshold"] = lambda _, n: np.full(n, 1.1, np.float32)
    of_all = done(models, request("ppo", data_of(5, **policy), config=CLIP, forward_only=True))
    each = done(models, request("ppo", data_of(5, **policy, **bounds), forward_only=True))
    neither = done(models, request("ppo", data_of(5, **policy), forward_only=True))
    assert each.metrics["loss:sum"] == pytest.approx(of_all.metrics["loss:sum"])
    assert neither.metrics["loss:sum"] != pytest.approx(of_all.metrics["loss:sum"])


def datum_of(tokens: Sequence[int] = (1, 2, 3), **inputs: Any) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens)),
        loss_fn_inputs={"target_tokens": [2, 3, 4], **inputs} if "target_tokens" not in inputs else inputs,
    )


BAD: Mapping[str, tuple[str, list[types.Datum], Any, str]] = {
    "loss": ("stable_reinforce", [datum_of()], None, "loss_fn 'stable_reinforce' is not supported here; use cross_en"),
    "config": ("ppo", [datum_of()], {"clip": 0.2}, "loss_fn_config of 'ppo' has no clip as a number; it has clip_low"),
    "infinite": ("dro", [datum_of()], {"beta": math.inf}, "loss_fn_config beta must be a number of at least 0, got"),
    "missing": ("ppo", [datum_of()], None, "datum 0 has no advantages, logprobs, which the loss 'ppo' needs"),
    "unknown": ("cross_entropy", [datum_of(mask=np.ones(3))], None, "datum 0 has mask in loss_fn_inputs; 'cross_en"),
    "length": ("cross_entropy", [datum_of(), datum_of(weights=[1.0])], None, "datum 1: weights has shape .1., model"),
    "tokens": ("cross_entropy", [datum_of([1, 2])], None, "datum 0: target_tokens has shape .3., model_input has 2 t"),
    "range": ("cross_entropy", [datum_of([1, 2, 24])], None, "model_input has token 24 at place 2; the vocabulary is"),
    "target": ("cross_entropy", [datum_of(target_tokens=[1, 2, -1])], None, "target_tokens has token -1 at place 2"),
    "long": ("cross_entropy", [datum_of([1] * 65)], None, "model_input has 65 tokens; the model takes 1 to 64"),
    "empty": ("cross_entropy", [datum_of([])], None, "model_input has 0 tokens"),
    "nan": ("cross_entropy", [datum_of(weights=[1.0, math.nan, 1.0])], None, "weights has nan at place 1; give finite"),
    "wide": ("ppo", [datum_of(target_tokens=[[1], [2], [3]], logprobs=np.ones((3, 1), np.float32),
                              advantages=np.ones((3, 1), np.float32))], None, "only cross_entropy takes several"),
    "floats": ("cross_entropy", [datum_of(target_tokens=np.ones(3, np.float32))], None, "target_tokens is float32"),
    "none": ("cross_entropy", [], None, "forward_backward has no data"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_trained_on_is_refused_with_its_place(case: str):
    loss, data, config, message = BAD[case]
    with pytest.raises(UserError, match=message):
        decode(request(loss, data, config=config), SIZES)


def test_bytes_that_are_no_request_are_refused():
    with pytest.raises(UserError, match="no ForwardBackwardRequest"):
        decode(b"\xff\xff\xff", SIZES)
    broken = types.TensorData([1, 2], "int64", [3, 4], sparse_crow_indices=[0, 1, 1, 2], sparse_col_indices=[0, 9])
    with pytest.raises(UserError, match=r"is no CSR tensor of the shape .3, 4.: columns must ascend"):
        decode(request("cross_entropy", [datum_of(target_tokens=broken)]), SIZES)
    image = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=3)])
    datum = types.Datum(model_input=image, loss_fn_inputs={"target_tokens": [1, 2, 3]})
    with pytest.raises(UserError, match="a chunk of image; this service trains on text only"):
        decode(request("cross_entropy", [datum]), SIZES)


# --- models ----------------------------------------------------------------------------------------------------------


def state_of(models: Models) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in models.learner.weights("m")}


def step(models: Models, seed: int) -> None:
    models.run("m", decode(request("cross_entropy", data_of(seed)), SIZES))
    models.step("m", AdamSpec(learning_rate=1e-2))


@pytest.mark.parametrize("optimizer", [True, False])
def test_a_checkpoint_that_is_deleted_while_it_is_loaded_is_loaded_whole(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, optimizer: bool
):
    models, method = trained(base, tmp_path), "load" if optimizer else "set_adapter"
    models.save("m", tmp_path / "a")
    saved, load = dict(models.learner.weights("m")), getattr(models.learner, method)
    models.create("other", spec_of({"rank": 4}))

    def deleted_meanwhile(*given: Any) -> None:
        load(*given)
        shutil.rmtree(tmp_path / "a")

    monkeypatch.setattr(models.learner, method, deleted_meanwhile)
    models.load("other", tmp_path / "a", optimizer=optimizer)
    again = models_of(base, tmp_path)
    again.restore()
    for each in (models, again):
        torch.testing.assert_close(dict(each.learner.weights("other")), saved, rtol=0, atol=0)


def test_a_model_comes_back_as_it_was_last_saved_even_if_that_was_deleted(base: str, tmp_path: Path):
    models = trained(base, tmp_path)
    models.create("other", spec_of({"rank": 2, "seed": 2, "train_unembed": False}))
    models.save("m", tmp_path / "a")
    saved = state_of(models)
    step(models, 9)
    after, status = state_of(models), models.status()["m"]
    assert (status["steps"], status["saved_steps"], status["saved"]) == (2, 1, str(tmp_path / "a"))
    shutil.rmtree(tmp_path / "a")
    again = models_of(base, tmp_path)
    again.restore()
    assert again.status()["m"]["steps"] == 1
    assert again.status()["other"]["steps"] == 0
    torch.testing.assert_close(state_of(again), saved, rtol=0, atol=0)
    step(again, 9)  # with the optimiser's state, so the same as before
    torch.testing.assert_close(state_of(again), after, rtol=1e-5, atol=1e-6)
    again.drop("m")
    third = models_of(base, tmp_path)
    third.restore()
    assert third.status().keys() == {"other"}


def test_a_model_that_cannot_be_read_holds_up_no_other(base: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    models = trained(base, tmp_path)
    models.save("m", tmp_path / "a")
    models.create("other", spec_of({"rank": 2}))
    (next((tmp_path / "models" / "m" / "last" / "state").glob("*.distcp"))).write_bytes(b"damaged")
    again = models_of(base, tmp_path)
    again.restore()
    assert again.status().keys() == {"other"}
    assert "a model is lost, as its files cannot be read" in caplog.text
    again.create("m", spec_of({"rank": 4}))


def test_a_checkpoint_is_loaded_with_its_optimiser_or_without(base: str, tmp_path: Path):
    models = trained(base, tmp_path)
    models.save("m", tmp_path / "a")
    models.writer("m")(tmp_path / "s")
    saved = state_of(models)
    step(models, 9)
    after = state_of(models)
    models.load("m", tmp_path / "a", optimizer=True)
    torch.testing.assert_close(state_of(models), saved, rtol=0, atol=0)
    step(models, 9)
    torch.testing.assert_close(state_of(models), after, rtol=1e-5, atol=1e-6)
    models.load("m", tmp_path / "s", optimizer=False)
    torch.testing.assert_close(state_of(models), saved, rtol=0, atol=0)
    step(models, 9)
    assert any((state_of(models)[name] - after[name]).abs().max() > 1e-4 for name in after), "no fresh optimiser"
    with pytest.raises(UserError, match="weights without an optimiser state"):
        models.load("m", tmp_path / "s", optimizer=True)
    models.create("small", spec_of({"rank": 2}))
    with pytest.raises(UserError, match=r"the checkpoint's adapter is rank=4.*and the model's rank=2"):
        models.load("small", tmp_path / "a", optimizer=True)
    models.load("new", tmp_path / "a", optimizer=True)
    assert models.status()["new"]["steps"] == 0


def test_a_step_after_half_a_gradient_is_refused_once(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    models = trained(base, tmp_path)
    before = state_of(models)
    batch = decode(request("cross_entropy", data_of(4)), SIZES)
    learner: Any = models.learner
    measured, calls = learner._measure, iter((True, False))

    def fail_later(*args: Any) -> Any:
        if next(calls):
            return measured(*args)
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(learner, "_measure", fail_later)
        with pytest.raises(RuntimeError, match="out of memory"):
            models.run("m", batch)
    with monkeypatch.context() as patch:
        patch.setattr(learner, "optim_step", None)  # a discarded gradient takes none
        with pytest.raises(StateError, match="no step was taken: a forward_backward before it failed half way"):
            models.step("m", AdamSpec())
    torch.testing.assert_close(state_of(models), before, rtol=0, atol=0)
    step(models, 4)
    assert models.status()["m"]["steps"] == 2


def test_what_is_saved_is_peft_s(base: str, tmp_path: Path):
    models = trained(base, tmp_path, train_mlp=False, train_unembed=False)
    models.save("m", tmp_path / "a")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 32.0, "LORA")
    assert all("self_attn" in name for name in config["target_modules"])
    save_file({"x": torch.ones(1)}, tmp_path / "a" / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"the adapter's tensor base_model.*has the shape None"):
        models.load("m", tmp_path / "a", optimizer=False)
    with pytest.raises(UserError, match="rank 9 is more than the engines of this service take; use at most 8"):
        models.create("big", spec_of({"rank": 9}))


@pytest.mark.parametrize("values", [{"learning_rate": float("nan")}, {"beta1": 1.0}, {"eps": 0.0}])
def test_settings_that_would_ruin_an_adapter_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(UserError, match="AdamW's"):
        AdamSpec(**values)
