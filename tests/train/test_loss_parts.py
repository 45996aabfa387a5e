"""A loss of several parts: each is divided by its own denominator of the whole batch, over micro-batches too."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from random_trajectories import trajectories_of
from transformers import AutoModelForCausalLM

from penstock.config import LoraConfig, TrainConfig
from penstock.errors import PenstockError, UserError
from penstock.train.grpo import Trainee, datum_of, known_denominators
from penstock.train.interface import AdamSpec, Datum, LoraSpec
from penstock.train.learner import LocalLearner
from penstock.train.losses import LOSSES, Limits, LossOutput, LossSpec, LossTerms


class Kept(LocalLearner):
    """Keeps its gradient, as scaled for the step."""

    def optim_step(self, adapter, adam: AdamSpec, *, scale: float):
        parameters = self._parameters(adapter).items()
        self.gradients = {name: p.grad * scale for name, p in parameters if p.grad is not None}
        return super().optim_step(adapter, adam, scale=scale)


def trainee_of(model: str, **options: object) -> Trainee:
    config = TrainConfig(micro_batch_tokens=60, grad_clip_norm=1e9, **options)
    reference = LocalLearner(model, TrainConfig(), seed=0)
    return Trainee(Kept(model, config, seed=0), config, max_tokens=16, reference=reference)


@pytest.mark.parametrize("correction", ["tis", "icepop"])
@pytest.mark.parametrize("loss", ["dapo", "grpo"])
def test_the_gradient_is_that_of_the_parts_each_divided_by_its_own(micro_model: str, loss: str, correction: str):
    options = {"loss": loss, "correction": correction, "kl_coefficient": 0.3, "entropy_coefficient": 0.05}
    trainee = trainee_of(micro_model, **options)
    trajectories = trajectories_of(trainee, noise=0.6)
    trainee.step(trajectories)  # the policy moves away from its reference
    figures = trainee.step(trajectories)
    gradients = trainee.learner.gradients

    plain = AutoModelForCausalLM.from_pretrained(micro_model, dtype=torch.float32)
    moved = trainee_of(micro_model, **options)
    moved.step(trajectories)
    plain.load_state_dict(dict(moved.learner.weights(None)), strict=False)
    first = AutoModelForCausalLM.from_pretrained(micro_model, dtype=torch.float32)
    width = max(len(t.prompt_ids) + len(t.response_ids) for t in trajectories) - 1
    count = len(trajectories)
    logprobs, entropy, reference = (torch.zeros(count, width) for _ in range(3))
    weights, behaviour = torch.zeros(count, width), torch.zeros(count, width)
    for row, t in enumerate(trajectories):
        datum = datum_of(t, 0.0)
        size, target = len(datum.input_ids), torch.tensor(datum.target_ids)[:, None]
        every = torch.log_softmax(plain(torch.tensor([datum.input_ids])).logits[0], -1)
        logprobs[row, :size] = every.gather(-1, target).squeeze(-1)
        entropy[row, :size] = -(every.exp() * every).sum(-1)
        known = torch.log_softmax(first(torch.tensor([datum.input_ids])).logits[0], -1).detach()
        reference[row, :size] = known.gather(-1, target).squeeze(-1)
        weights[row, :size], behaviour[row, :size] = torch.tensor(datum.weights), torch.tensor(datum.logprobs)
    rewards = torch.tensor([t.reward for t in trajectories]).view(3, 4)
    std = rewards.std(-1, keepdim=True, correction=0)
    advantages = torch.where(std > 0, (rewards - rewards.mean(-1, keepdim=True)) / std, 0.0).view(-1, 1)
    terms = LossTerms(logprobs, behaviour, advantages, weights, entropy, reference)
    policy = LOSSES[loss](terms, Limits(correction=correction, max_tokens=16))
    tokens = weights.sum()
    ratio = (reference - logprobs)[weights > 0]
    moved_by = (logprobs.detach() - behaviour)[weights > 0].exp().clamp(max=2.0)
    kl = (moved_by * (ratio.exp() - 1 - ratio)).sum() / tokens
    bonus = (entropy * weights).sum() / tokens
    total = policy.loss / policy.denominator + 0.3 * kl - 0.05 * bonus
    total.backward()
    assert figures["loss"] == pytest.approx(total.item(), rel=1e-4)
    assert figures["loss_kl"] == pytest.approx(kl.item(), rel=1e-3)
    assert figures["loss_entropy"] == pytest.approx(-bonus.item(), rel=1e-4)
    assert kl > 0
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=2e-3, atol=2e-5)


def test_denominators_are_known_without_a_forward_pass_where_nothing_is_dropped(micro_model: str):
    trainee = trainee_of(micro_model)
    data = [datum_of(t, 1.0) for t in trajectories_of(trainee)]
    for loss in ("grpo", "dr_grpo", "dapo", "gspo", "cispo"):
        spec = LossSpec({loss: 1.0, "entropy": 1.0, "cross_entropy": 1.0})
        assert known_denominators(spec, data) == trainee.learner.forward(None, spec, data).denominators


def test_an_adapters_reference_is_its_base(micro_model: str):
    config = TrainConfig(lora=LoraConfig(), kl_coefficient=1.0, learning_rate=1e-2)
    learner = LocalLearner(micro_model, config, seed=0)
    learner.create_adapter("a", LoraSpec(rank=4))
    trainee = Trainee(learner, config, adapter="a")
    trajectories = trajectories_of(trainee)
    assert trainee.step(trajectories)["loss_kl"] == pytest.approx(0, abs=1e-6)
    assert trainee.step(trajectories)["loss_kl"] > 1e-5


def test_token_advantages_and_weights_count_token_by_token(micro_model: str):
    """As a client of several losses sends them: each token has its own."""
    learner = LocalLearner(micro_model, TrainConfig(), seed=0)
    ids, targets = [1, 2, 3, 4], [2, 3, 4, 5]
    weights, advantages = [0.0, 1.0, 0.5, -2.0], [9.0, 1.0, -1.0, 0.75]
    logprobs = learner.forward(
        None, LossSpec({}, all_logprobs=True), [Datum(ids, targets, weights, [0.0] * 4, advantages)]
    )
    exact = logprobs.logprobs[0]
    assert len(exact.nonzero()) == 4
    datum = Datum(ids, targets, weights, exact.tolist(), advantages)
    spec = LossSpec({"dapo": 1.0, "cross_entropy": 1.0}, Limits(correction="none"))
    outputs = learner.forward(None, spec, [datum])
    factors = torch.tensor(weights)
    assert outputs.losses["dapo"] == pytest.approx(-(factors * torch.tensor(advantages)).sum().item(), rel=1e-5)
    assert outputs.losses["cross_entropy"] == pytest.approx(-(factors * exact).sum().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("datum", "why"),
    [
        (Datum([1, 2, 3], [7], [1.0], [0.0], [1.0], positions=[4]), "sample 1 .* a target at place 4, and 3 input"),
        (Datum([1, 2, 3], [7], [1.0], [0.0], [1.0], positions=[-1]), "sample 1 .* a target at place -1, and 3 input"),
        (Datum([1, 2], [2, 3], [1.0, 1.0], [0.0, math.nan], [1.0, 1.0]), "sample 1 .* has the logprob of a"),
        (Datum([1, 2], [2, 3], [1.0, 1.0], [0.0, 0.0], [1.0, math.inf]), "sample 1 .* has the advantage of a token"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("correction", ["tis", "icepop"])
def test_places_and_numbers_that_mean_nothing_are_refused(micro_model: str, datum: Datum, why: str, correction: str):
    learner = LocalLearner(micro_model, TrainConfig(), seed=0)
    beside = Datum([5, 6, 8], [7], [1.0], [0.0], [1.0], positions=[2])
    with pytest.raises(UserError, match=why):
        learner.forward_backward(None, LossSpec({"dapo": 1.0}, Limits(correction=correction)), [beside, datum])


def near(terms: LossTerms, _: Limits) -> LossOutput:
    """Keep what has hardly moved."""
    weights_B_T = terms.weights_B_T * (terms.log_ratio().detach().abs() < 0.1)
    return LossOutput(-(terms.log_ratio().exp() * terms.advantages_B_T * weights_B_T).sum(), weights_B_T.sum(), {})


def without_gradient(terms: LossTerms, _: Limits) -> LossOutput:
    return LossOutput(terms.logprobs_B_T.detach().sum(), terms.weights_B_T.sum(), {})


def of_each_token(terms: LossTerms, _: Limits) -> LossOutput:
    return LossOutput(terms.logprobs_B_T, terms.weights_B_T.sum(), {})


def breaks_half_way(terms: LossTerms, _: Limits) -> LossOutput:
    if (terms.behaviour_B_T == -3.0).any() and (terms.logprobs_B_T != 0).any():
        raise ValueError("in the second micro-batch")
    return LossOutput(-terms.log_ratio().sum(), terms.weights_B_T.sum(), {})


def test_a_loss_of_ones_own_that_drops_tokens_leaves_the_other_parts_as_they_are(micro_model: str):
    """Both drop the same tokens, and without advantages the divergence alone has a gradient."""
    norms: list[float] = []
    for loss, correction in (("test_loss_parts:near", "tis"), ("dapo", "icepop")):
        options = {"loss": loss, "correction": correction, "kl_coefficient": 1.0, "ratio_band": (0.9048, 1.1052)}
        trainee = trainee_of(micro_model, **options)
        moved = trajectories_of(trainee, noise=0.3)
        trainee.learner.forward_backward(None, LossSpec({"cross_entropy": 1.0}), [datum_of(t, 0.0) for t in moved])
        trainee.learner.optim_step(None, AdamSpec(learning_rate=1e-2), scale=0.1)
        norms.append(trainee.step([replace(t, reward=0.0) for t in moved])["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4) != 0


@pytest.mark.parametrize("name", ["without_gradient", "of_each_token"])
def test_a_loss_of_ones_own_that_is_no_sum_with_a_gradient_is_named(micro_model: str, name: str):
    learner = LocalLearner(micro_model, TrainConfig(), seed=0)
    data = [Datum([1, 2], [2, 3], [1.0, 1.0], [0.0, 0.0], [1.0, 1.0])]
    with pytest.raises(PenstockError, match=f"train.loss 'test_loss_parts:{name}' must return one sum"):
        learner.forward_backward(None, LossSpec({f"test_loss_parts:{name}": 1.0}), data)


def test_a_call_that_fails_half_way_leaves_no_gradient(micro_model: str):
    learner = LocalLearner(micro_model, TrainConfig(micro_batch_tokens=2), seed=0)
    data = [Datum([1, 2], [2, 3], [1.0, 1.0], [mu, mu], [1.0, 1.0]) for mu in (-1.0, -3.0)]
    with pytest.raises(PenstockError, match="in the second micro-batch"):
        learner.forward_backward(None, LossSpec({"test_loss_parts:breaks_half_way": 1.0}), data)
    assert learner.optim_step(None, AdamSpec(), scale=1.0) == 0


def test_data_that_do_not_fit_are_refused(micro_model: str):
    learner = LocalLearner(micro_model, TrainConfig(), seed=0)
    with pytest.raises(UserError, match=r"of one length, one value for each token; got .*'weights': 1"):
        Datum([1, 2], [2, 3], [1.0], [0.0, 0.0], [0.0, 0.0])
    datum = Datum([1, 2], [2, 3], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0])
    with pytest.raises(UserError, match="unknown loss 'dpo'; known: grpo"):
        learner.forward(None, LossSpec({"dpo": 1.0}), [datum])
    with pytest.raises(UserError, match="'kl' needs data with reference logprobs"):
        learner.forward(None, LossSpec({"kl": 1.0}), [datum])
