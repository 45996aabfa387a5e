from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_trajectories import score, trajectories_of, trajectory
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from nano_models import save_moe, save_routed, state_of
from penstock.config import TrainConfig
from penstock.errors import ConfigError, StateError, UserError, WeightsError
from penstock.plugin.spec import expected_weights
from penstock.train.batching import collate, plan
from penstock.train.grpo import Trainee, datum_of
from penstock.train.interface import AdamSpec, Datum, LoraSpec
from penstock.train.learner import LocalLearner, ServedDtype
from penstock.train.losses import POLICY_LOSSES, Limits, LossOutput, LossSpec, LossTerms
from penstock.weights.shared_memory import SharedMemoryStore


def learner_of(
    model: str,
    *,
    temperature: float = 1.0,
    double: bool = False,
    served_dtype: ServedDtype = "float32",
    **config: object,
) -> Trainee:
    settings = TrainConfig(**config)
    learner = Recording(model, settings, seed=0, served_dtype=served_dtype)
    if double:
        learner.policy.double()
    return Trainee(learner, settings, temperature, max_tokens=16)


class Recording(LocalLearner):
    """Keeps the gradient of its last step, after scaling and clipping."""

    gradients: dict[str, torch.Tensor]

    def _optimizer(self, adapter: str | None) -> torch.optim.AdamW:
        optimizer = super()._optimizer(adapter)
        held = self.policy.model.named_parameters()
        self.gradients = {name: p.grad.clone() for name, p in held if p.grad is not None}
        return optimizer


def gradients(trainee: Trainee) -> dict[str, torch.Tensor]:
    return trainee.learner.gradients


def held(trainee: Trainee) -> dict[str, torch.Tensor]:
    """The live master weights."""
    return {name: p.detach() for name, p in trainee.learner.policy.model.named_parameters()}


# --- batching ---------------------------------------------------------------------------------------------------------


@given(lengths=st.lists(st.integers(1, 50), max_size=60), max_tokens=st.integers(1, 300))
def test_the_plan_holds_every_sequence_once_within_the_bound(lengths: list[int], max_tokens: int):
    batches = plan(lengths, max_tokens)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or sum(lengths[i] for i in batch) <= max_tokens
    longest = [max(lengths[i] for i in batch) for batch in batches]
    assert longest == sorted(longest, reverse=True)


def test_collate_aligns_targets_with_the_positions_that_predict_them():
    first = trajectory([1, 2, 3], [4, 5, 6], mask=[1, 0, 1], logprobs=[-0.1, -9.0, -0.3])
    second = trajectory([9], [8], logprobs=[-0.5])
    data = [datum_of(first, 1.0), datum_of(second, -1.0)]
    assert data[0].input_ids == (1, 2, 3, 4, 5)
    assert data[0].target_ids == (2, 3, 4, 5, 6)
    assert data[0].weights == (0, 0, 1, 0, 1)
    assert data[0].logprobs == (0, 0, -0.1, 0, -0.3)
    batch = collate(data, LossSpec({"dapo": 1.0}))
    assert batch.input_ids_1_L.tolist() == [[1, 2, 3, 4, 5, 9]]
    assert batch.position_ids_1_L.tolist() == [[0, 1, 2, 3, 4, 0]]
    assert (batch.bounds.tolist(), batch.longest) == ([0, 5, 6], 5)
    assert batch.targets_K.tolist() == [4, 6, 8]
    assert [batch.input_ids_1_L.flatten()[p].item() for p in batch.positions_K] == [3, 5, 9]
    assert [places.tolist() for places in batch.places] == [[2, 4], [0]]
    assert batch.weights_B_T.tolist() == [[1, 1], [1, 0]]
    assert batch.advantages_B_T.tolist() == [[1, 1], [-1, 0]]
    torch.testing.assert_close(batch.behaviour_B_T, torch.tensor([[-0.1, -0.3], [-0.5, 0.0]]))
    every = collate(data, LossSpec({"dapo": 1.0}, all_logprobs=True))
    assert every.targets_K.tolist() == [2, 3, 4, 5, 6, 8]
    assert every.weights_B_T.tolist() == [[0, 0, 1, 0, 1], [1, 0, 0, 0, 0]]


# --- logprobs and gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_the_gradient_is_that_of_a_plain_forward_pass_over_one_padded_batch(micro_model: str, loss: str):
    learner = learner_of(micro_model, double=True, loss=loss, micro_batch_tokens=40, grad_clip_norm=1e9)
    trajectories = trajectories_of(learner)
    metrics = learner.step(trajectories)

    plain = AutoModelForCausalLM.from_pretrained(micro_model).double()
    width = max(len(t.prompt_ids) + len(t.response_ids) for t in trajectories)
    ids, attention = torch.zeros(12, width, dtype=torch.long), torch.zeros(12, width, dtype=torch.long)
    mask, behaviour = torch.zeros(12, width, dtype=torch.bool), torch.zeros(12, width, dtype=torch.float64)
    rewards = torch.tensor([t.reward for t in trajectories]).view(3, 4)
    for row, t in enumerate(trajectories):
        start, end = len(t.prompt_ids), len(t.prompt_ids) + len(t.response_ids)
        ids[row, :end] = torch.tensor(t.prompt_ids + t.response_ids)
        attention[row, :end] = 1
        mask[row, start:end] = torch.tensor(t.loss_mask) == 1
        behaviour[row, start:end] = torch.tensor(t.logprobs)
    logits = plain(input_ids=ids, attention_mask=attention).logits
    logprobs = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    std = rewards.std(-1, keepdim=True, correction=0)
    advantages = torch.where(std > 0, (rewards - rewards.mean(-1, keepdim=True)) / std, 0.0).flatten()
    terms = LossTerms(logprobs, behaviour[:, 1:], advantages.unsqueeze(-1), mask[:, 1:].float())
    output = POLICY_LOSSES[loss](terms, Limits(max_tokens=16))
    (output.loss / output.denominator).backward()

    assert metrics["loss"] == pytest.approx((output.loss / output.denominator).item(), rel=1e-6)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients(learner)[name], parameter.grad, rtol=1e-4, atol=1e-7)


# --- a step -----------------------------------------------------------------------------------------------------------


def test_tokens_over_kept_kv_raise_no_alarm(micro_model: str):
    """The trainer has no KV of older weights, so it differs by right."""
    learner = learner_of(micro_model)
    exact = score(learner, [1, 2], [3, 4, 5])
    far = trajectory([1, 2], [3, 4, 5], logprobs=[exact[0], exact[1] - 3, exact[2] - 3], versions=[0, 0, 0], reward=1)
    metrics = learner.step([replace(far, kv_kept=(False, True, True)), replace(far, reward=0.0, kv_kept=(True,) * 3)])
    assert metrics["logprob_diff_staleness/0"] == pytest.approx(0, abs=1e-5)
    assert (metrics["logprob_diff_equal_tokens"], metrics["kv_kept_share"]) == (1, pytest.approx(5 / 6))
    assert metrics["logprob_diff_kv_kept"] == pytest.approx((4 * 3 + 0) / 5, abs=1e-5)


def test_figures_of_the_logprob_difference_by_staleness(micro_model: str):
    learner = learner_of(micro_model)
    learner.learner.versions[None] = 3
    exact = score(learner, [1, 2], [3, 4, 5])
    fresh = trajectory([1, 2], [3, 4, 5], logprobs=[exact[0], exact[1] + 0.25, exact[2]], versions=[3, 3, 3], reward=1)
    mixed = trajectory([1, 2], [3, 4, 5], logprobs=[lp - 0.5 for lp in exact], versions=[1, 1, 2])
    metrics = learner.step([fresh, mixed])
    assert metrics["logprob_diff_equal_tokens"] == 3
    assert metrics["logprob_diff_max_equal"] == pytest.approx(0.25, abs=1e-5)
    assert metrics["logprob_diff_staleness/0"] == pytest.approx(0.25 / 3, abs=1e-5)
    assert metrics["logprob_diff_staleness/1"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["logprob_diff_staleness/2"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["logprob_diff_mean"] == pytest.approx((0.25 + 1.5) / 6, abs=1e-5)
    assert learner.version == 4
    # All tokens are old now: there is no largest difference at equal weights to speak of.
    metrics = learner.step([fresh, mixed])
    assert metrics["logprob_diff_equal_tokens"] == 0
    assert "logprob_diff_max_equal" not in metrics


def test_figures_of_a_step(micro_model: str):
    learner = learner_of(micro_model, grad_clip_norm=1e-3)
    trajectories = trajectories_of(learner)
    metrics = learner.step(trajectories)
    assert metrics["tokens"] == sum(len(t.prompt_ids) + len(t.response_ids) for t in trajectories)
    assert metrics["tokens_per_second"] == pytest.approx(metrics["tokens"] / metrics["seconds"])
    assert metrics["reward_mean"] == pytest.approx(sum(t.reward for t in trajectories) / 12)
    clipped = math.sqrt(sum(g.square().sum().item() for g in gradients(learner).values()))
    assert clipped == pytest.approx(1e-3, rel=1e-3)
    assert metrics["grad_norm"] > 1e-3
    assert all(math.isfinite(value) for value in metrics.values())


def test_groups_without_a_preference_change_nothing_but_are_measured(micro_model: str):
    learner = learner_of(micro_model)
    before = {name: tensor.clone() for name, tensor in held(learner).items()}
    metrics = learner.step([trajectory([1, 2], [3, 4], reward=1.0, logprobs=[-2, -2]) for _ in range(4)])
    assert metrics["trajectories_without_advantage"] == 1
    assert metrics["grad_norm"] == 0
    assert metrics["logprob_diff_equal_tokens"] == 8
    assert metrics["logprob_diff_mean"] > 0
    assert all(torch.equal(before[name], tensor) for name, tensor in held(learner).items())


def no_number(terms: LossTerms, _: Limits) -> LossOutput:
    """A sum that is NaN, with a finite gradient."""
    return LossOutput(terms.log_ratio().sum() + math.nan, terms.weights_B_T.sum(), {})


def test_a_gradient_that_is_no_number_changes_nothing(micro_model: str):
    learner = learner_of(micro_model)
    before = {name: tensor.clone() for name, tensor in held(learner).items()}
    good = [trajectory([1], [2, 3], logprobs=[-3.0, -1.0], reward=r) for r in (0.0, 1.0)]
    hook = learner.learner._parameters(None)["model.norm.weight"].register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(StateError, match=r"step 1 has loss .* and a gradient of norm nan: nothing was changed"):
        learner.step(good)
    hook.remove()
    lost = replace(learner, config=learner.config.model_copy(update={"loss": "test_learner:no_number"}))
    with pytest.raises(StateError, match=r"step 1 has loss nan and a gradient of norm nan: nothing was changed"):
        lost.step(good)
    with pytest.raises(UserError, match="sample 0 of the data has the logprob of a token that is no finite number"):
        learner.step([trajectory([1], [2, 3], logprobs=[math.nan, -1.0], reward=r) for r in (0.0, 1.0)])
    with pytest.raises(UserError, match="reward is no finite number"):
        learner.step([trajectory([1], [2, 3], logprobs=[-3.0, -1.0], reward=r) for r in (0.0, math.inf)])
    assert learner.version == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in held(learner).items())


# --- what engines are sent --------------------------------------------------------------------------------------------


def save_as_bf16(micro_model: str, folder: Path) -> str:
    """The checkpoint in bf16, but for its norms."""
    model = AutoModelForCausalLM.from_pretrained(micro_model, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = parameter.data.float()
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    return str(folder)


def check_as_an_engine_does(folder: str, served: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise what an engine of the checkpoint, of dtype auto on a GPU, raises of an update."""
    config = AutoConfig.from_pretrained(folder)
    spec = expected_weights(SimpleNamespace(model=folder, dtype=config.dtype, hf_config=config, hf_text_config=config))
    store = SharedMemoryStore()
    try:
        spec.check(store.publish(1, served))
    finally:
        store.close()


def test_a_bf16_checkpoint_is_served_in_the_dtypes_that_it_has(micro_model: str, tmp_path: Path):
    folder = save_as_bf16(micro_model, tmp_path / "bf16")
    learner = learner_of(folder, served_dtype="auto")
    with safe_open(f"{folder}/model.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16, torch.float32}
    served = dict(learner.learner.weights(None))
    assert {name: tensor.dtype for name, tensor in served.items()} == {name: t.dtype for name, t in stored.items()}
    assert all(torch.equal(served[name], stored[name]) for name in stored)
    assert {tensor.dtype for _, tensor in held(learner).items()} == {torch.float32}
    check_as_an_engine_does(folder, learner.learner.weights(None))
    with pytest.raises(WeightsError, match="is float32; the engine takes bfloat16"):
        check_as_an_engine_does(folder, held(learner).items())


def test_a_step_is_served_from_the_same_memory(micro_model: str, tmp_path: Path):
    learner = learner_of(save_as_bf16(micro_model, tmp_path), served_dtype="auto", learning_rate=1e-2)
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in learner.learner.weights(None)}
    learner.step(trajectories_of(learner))
    masters = held(learner)
    for name, tensor in learner.learner.weights(None):
        place, value = before[name]
        assert tensor.data_ptr() == place
        assert torch.equal(tensor, masters[name].to(tensor.dtype))
        assert not torch.equal(tensor, value)


@pytest.mark.parametrize("served_dtype", ["float32", "auto"])
def test_where_the_dtypes_agree_nothing_is_copied(micro_model: str, served_dtype: ServedDtype):
    learner = learner_of(micro_model, served_dtype=served_dtype)
    live = {name: tensor.data_ptr() for name, tensor in held(learner).items()}
    assert {name: tensor.data_ptr() for name, tensor in learner.learner.weights(None)} == live


@pytest.mark.parametrize("save", [save_moe, save_routed])
def test_experts_and_buffers_are_served_as_their_checkpoint_has_them(save: Callable[[Path], Path], tmp_path: Path):
    learner = learner_of(str(save(tmp_path / "model")))
    check_as_an_engine_does(str(tmp_path / "model"), learner.learner.weights(None))


def test_without_headers_the_config_says_what_is_served(micro_model: str, tmp_path: Path):
    """As under a hub name, and as an engine has it then."""
    folder = save_as_bf16(micro_model, tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    learner = learner_of(folder, served_dtype="auto")
    assert {tensor.dtype for _, tensor in learner.learner.weights(None)} == {torch.bfloat16}
    check_as_an_engine_does(folder, learner.learner.weights(None))


@pytest.mark.parametrize(
    ("trajectories", "message"),
    [
        ([], "at least one trajectory"),
        ([trajectory([], [1])], "empty prompt"),
        ([trajectory([1], [2, 3], mask=[0, 0])], "none of the 1 trajectories"),
        ([trajectory([1], [])], "none of the 1 trajectories"),
    ],
)
def test_a_batch_with_nothing_to_learn_is_refused(micro_model: str, trajectories: list, message: str):
    learner = learner_of(micro_model)
    with pytest.raises(UserError, match=message):
        learner.step(trajectories)
    assert learner.version == 0


def test_an_aborted_answer_without_tokens_is_let_through_beside_others(micro_model: str):
    learner = learner_of(micro_model, loss="grpo")
    metrics = learner.step([trajectory([1, 2], []), trajectory([1, 2], [3], reward=1.0)])
    assert math.isfinite(metrics["loss"])


def test_a_model_that_cannot_be_loaded_is_a_config_error(tmp_path, micro_model: str):
    with pytest.raises(ConfigError, match="no-such-model"):
        learner_of(str(tmp_path / "no-such-model"))
    model = AutoModelForCausalLM.from_pretrained(micro_model)
    model.config.final_logit_softcapping = 30.0
    model.save_pretrained(tmp_path / "capped")
    with pytest.raises(ConfigError, match="final_logit_softcapping"):
        learner_of(str(tmp_path / "capped"))


def test_there_is_no_dropout_as_engines_have_none(micro_model: str, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(micro_model)
    model.config.attention_dropout = 0.5
    model.save_pretrained(tmp_path)
    learner, spec = LocalLearner(str(tmp_path), TrainConfig(), seed=0), LossSpec({"cross_entropy": 1.0})
    data = [Datum([1, 2, 3], [2, 3, 4], [1.0] * 3, [0.0] * 3, [0.0] * 3)]
    losses = [learner.forward_backward(None, spec, data).losses, learner.forward(None, spec, data).losses]
    assert losses == [learner.forward_backward(None, spec, data).losses] * 2


# --- state ------------------------------------------------------------------------------------------------------------


def test_the_random_state_is_part_of_the_state(micro_model: str):
    learner = learner_of(micro_model)
    state = state_of(learner.learner, None)
    drawn = torch.rand(4)
    learner.learner.load_state(None, *state)
    assert torch.equal(torch.rand(4), drawn)


@pytest.mark.parametrize("adapter", [None, "a"])
def test_a_state_comes_without_the_gradient_held_before_it(micro_model: str, adapter: str | None):
    learner = LocalLearner(micro_model, TrainConfig(), seed=0)
    if adapter is not None:
        learner.create_adapter(adapter, LoraSpec(rank=2))
    data = [Datum([1, 2], [2, 3], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0])]
    state = state_of(learner, adapter)
    learner.forward_backward(adapter, LossSpec({"cross_entropy": 1.0}), data)
    learner.load_state(adapter, *state)
    assert learner.optim_step(adapter, AdamSpec(), scale=1.0) == 0


@pytest.mark.parametrize("adapter", [None, "a"])
def test_a_gradient_that_is_discarded_leaves_weights_optimiser_and_version(micro_model: str, adapter: str | None):
    learner = LocalLearner(micro_model, TrainConfig(), seed=0)
    if adapter is not None:
        learner.create_adapter(adapter, LoraSpec(rank=2))
    data = [Datum([1, 2], [2, 3], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0])]
    learner.forward_backward(adapter, LossSpec({"cross_entropy": 1.0}), data)
    learner.optim_step(adapter, AdamSpec(), scale=1.0)
    (before, _), version = state_of(learner, adapter), learner.versions[adapter]
    learner.forward_backward(adapter, LossSpec({"cross_entropy": 1.0}), data)
    learner.discard_gradient(adapter)
    after, _ = state_of(learner, adapter)
    assert learner.versions[adapter] == version
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert learner.optim_step(adapter, AdamSpec(), scale=1.0) == 0
