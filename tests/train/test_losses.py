from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.config import LOSSES as LOSS_NAMES
from penstock.config import TrainConfig, load_config
from penstock.errors import ConfigError, PenstockError, UserError
from penstock.train.losses import CORRECTIONS, Limits, LossOutput, LossSpec, LossTerms, kl, loss_named
from penstock.train.losses import POLICY_LOSSES as LOSSES

LIMITS = Limits(low=0.2, high=0.28, importance_cap=2.0, max_tokens=9)


def terms_of(seed: int, rows: int = 5, width: int = 7, spread: float = 0.8) -> LossTerms:
    """Random sequences with holes in the mask and rubbish outside it, in float64."""
    generator = torch.Generator().manual_seed(seed)
    behaviour_B_T = -3 * torch.rand(rows, width, generator=generator, dtype=torch.float64)
    noise_B_T = spread * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    mask_B_T = torch.rand(rows, width, generator=generator) < 0.7
    mask_B_T[:, 0] = True
    logprobs_B_T = (behaviour_B_T + noise_B_T).masked_fill(~mask_B_T, 1e6).requires_grad_()
    advantages_B = torch.randn(rows, generator=generator, dtype=torch.float64)
    return LossTerms(
        logprobs_B_T, behaviour_B_T.masked_fill(~mask_B_T, -77.0), advantages_B.unsqueeze(-1), mask_B_T.double()
    )


def divided(output: LossOutput) -> Tensor:
    return output.loss / output.denominator


# --- loops over single numbers, written from the papers' formulas -----------------------------------------------------


def surrogate(ratio: float, advantage: float) -> tuple[float, float]:
    """-min(r A, clip(r) A) with the weight cut at the cap, and its derivative by log pi."""
    low, high, cap = 1 - LIMITS.low, 1 + LIMITS.high, LIMITS.importance_cap
    if advantage > 0 and ratio > high:
        return -high * advantage, 0.0
    if advantage < 0 and ratio < low:
        return -low * advantage, 0.0
    weight = min(ratio, cap)
    return -weight * advantage, -weight * advantage


def tokens_of(terms: LossTerms, row: int) -> list[tuple[int, float, float]]:
    """Position, log pi and log mu of each token under the mask."""
    return [
        (t, terms.logprobs_B_T[row, t].item(), terms.behaviour_B_T[row, t].item())
        for t in range(terms.mask().shape[1])
        if terms.mask()[row, t]
    ]


def by_loops(name: str, terms: LossTerms) -> tuple[float, Tensor]:
    """The loss, and its gradient by `logprobs_B_T`."""
    loss = 0.0
    gradient_B_T = torch.zeros_like(terms.logprobs_B_T)
    rows, all_tokens = len(terms.advantages_B_T), int(terms.mask().sum())
    for row, advantage in enumerate(terms.advantages_B_T[:, 0].tolist()):
        tokens = tokens_of(terms, row)
        size = len(tokens)
        scale = {
            "grpo": 1 / (size * rows),
            "dr_grpo": 1 / (LIMITS.max_tokens * rows),
            "gspo": 1 / rows,
        }.get(name, 1 / all_tokens)
        if name == "gspo":
            sequence_ratio = math.exp(sum(new - old for _, new, old in tokens) / size)
            value, slope = surrogate(sequence_ratio, advantage)
            loss += scale * value
            for t, _, _ in tokens:
                gradient_B_T[row, t] = scale * slope / size
            continue
        for t, new, old in tokens:
            ratio = math.exp(new - old)
            if name == "cispo":
                slope = -min(ratio, 1 + LIMITS.high, LIMITS.importance_cap) * advantage
                value = slope * new
            else:
                value, slope = surrogate(ratio, advantage)
            loss += scale * value
            gradient_B_T[row, t] = scale * slope
    return loss, gradient_B_T


def test_every_loss_of_the_config_is_here():
    assert tuple(LOSSES) == LOSS_NAMES


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(8))
def test_value_and_gradient_are_those_of_the_loops(name: str, seed: int):
    terms = terms_of(seed)
    loss = divided(LOSSES[name](terms, LIMITS))
    loss.backward()
    want, gradient_B_T = by_loops(name, terms)
    assert loss.item() == pytest.approx(want, rel=1e-12, abs=1e-14)
    torch.testing.assert_close(terms.logprobs_B_T.grad, gradient_B_T, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("name", LOSSES)
def test_parts_of_a_batch_add_up_to_the_whole(name: str):
    """Loss, gradient, denominator and metrics of micro-batches sum to those of the batch."""
    whole = terms_of(11, rows=6)
    output = LOSSES[name](whole, LIMITS)
    output.loss.backward()
    leaf_B_T = whole.logprobs_B_T.detach().clone().requires_grad_()
    parts = []
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        part = LossTerms(leaf_B_T[rows], whole.behaviour_B_T[rows], whole.advantages_B_T[rows], whole.weights_B_T[rows])
        parts.append(LOSSES[name](part, LIMITS))
        parts[-1].loss.backward()
    assert sum(p.loss.item() for p in parts) == pytest.approx(output.loss.item(), rel=1e-12)
    assert sum(p.denominator.item() for p in parts) == output.denominator.item()
    torch.testing.assert_close(leaf_B_T.grad, whole.logprobs_B_T.grad)
    for key, value in output.metrics.items():
        assert sum(p.metrics[key].item() for p in parts) == pytest.approx(
            value.item(), rel=1e-6
        )  # counts divide in fp32


def one_token(ratio: float, advantage: float) -> LossTerms:
    logprobs_B_T = torch.tensor([[math.log(ratio) - 1.0]], dtype=torch.float64, requires_grad=True)
    behaviour_B_T = torch.tensor([[-1.0]], dtype=torch.float64)
    advantages_B_T = torch.tensor([[advantage]], dtype=torch.float64)
    return LossTerms(logprobs_B_T, behaviour_B_T, advantages_B_T, torch.ones(1, 1))


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope", "clipped", "truncated"),
    [
        (1.0, 1.0, -1.0, 0, 0),
        (1.27, 1.0, -1.27, 0, 0),  # within the upper limit of clip-higher, above that of a symmetric clip
        (1.29, 1.0, 0.0, 1, 0),  # likelier by enough
        (0.5, 1.0, -0.5, 0, 0),  # less likely: the pessimistic side keeps its gradient
        (0.79, -1.0, 0.0, 1, 0),  # unlikelier by enough
        (1.9, -1.0, 1.9, 0, 0),
        (7.0, -1.0, 2.0, 0, 1),  # likelier and bad: pushed down, with the weight cut at the cap
        (7.0, 0.0, 0.0, 0, 0),
    ],
)
def test_where_the_clip_and_the_cap_act(ratio: float, advantage: float, slope: float, clipped: int, truncated: int):
    terms = one_token(ratio, advantage)
    output = LOSSES["dapo"](terms, LIMITS)
    output.loss.backward()
    assert terms.logprobs_B_T.grad.item() == pytest.approx(slope, abs=1e-12)
    assert output.metrics["clip_fraction"].item() == clipped
    assert output.metrics["truncated_fraction"].item() == truncated
    assert output.metrics["ratio_mean"].item() == pytest.approx(ratio)
    assert output.metrics["kl"].item() == pytest.approx(ratio - 1 - math.log(ratio))


@pytest.mark.parametrize("name", LOSSES)
def test_a_ratio_beyond_floats_stays_finite(name: str):
    for shift in (-300.0, 300.0):
        terms = LossTerms(
            torch.tensor([[-1.0, -2.0]], requires_grad=True),
            torch.tensor([[-1.0 - shift, -2.0 - shift]]),
            torch.tensor([[-1.0]]),
            torch.ones(1, 2),
        )
        output = LOSSES[name](terms, LIMITS)
        output.loss.backward()
        assert output.loss.isfinite()
        assert terms.logprobs_B_T.grad.isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_a_sequence_without_tokens_of_the_policy_adds_nothing(name: str):
    logprobs_B_T = torch.full((1, 3), -1.0, requires_grad=True)
    empty = LossTerms(logprobs_B_T, torch.zeros(1, 3), torch.ones(1, 1), torch.zeros(1, 3))
    output = LOSSES[name](empty, LIMITS)
    output.loss.backward()
    assert output.loss.item() == 0
    assert logprobs_B_T.grad.abs().max() == 0
    assert all(value.item() == 0 for value in output.metrics.values())


def test_the_divergence_from_a_reference_is_that_of_the_policy_in_training():
    """E_mu[r k3] = KL(pi || reference), summed over a small vocabulary; the cap is far."""
    mu_V, pi_V, reference_V = (
        torch.tensor(p, dtype=torch.float64) for p in ([0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.3, 0.4, 0.3])
    )
    ones = torch.ones(3, 1)
    terms = LossTerms(
        pi_V.log()[:, None].requires_grad_(), mu_V.log()[:, None], ones, ones, reference_B_T=reference_V.log()[:, None]
    )
    want = (pi_V * (pi_V / reference_V).log()).sum().item()
    output = kl(replace(terms, weights_B_T=mu_V[:, None]), Limits(importance_cap=9.0))
    assert output.loss.item() == pytest.approx(want)
    capped = kl(terms, Limits(importance_cap=2.0))
    capped.loss.backward()
    ratio_V = (pi_V / mu_V).clamp(max=2.0)
    torch.testing.assert_close(terms.logprobs_B_T.grad[:, 0], ratio_V * (1 - reference_V / pi_V))


# --- corrections -----------------------------------------------------------------------------------------------------


def test_every_correction_of_the_config_is_here():
    assert set(CORRECTIONS) == set(TrainConfig.model_fields["correction"].annotation.__args__)


def sequences(ratios: list[list[float]], advantages: list[float]) -> LossTerms:
    """Of tokens with probability 0.5 under mu."""
    behaviour_B_T = torch.full((len(ratios), len(ratios[0])), math.log(0.5), dtype=torch.float64)
    logprobs_B_T = (behaviour_B_T + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    advantages_B_T = torch.tensor(advantages, dtype=torch.float64).unsqueeze(-1)
    return LossTerms(logprobs_B_T, behaviour_B_T, advantages_B_T, torch.ones(behaviour_B_T.shape))


@pytest.mark.parametrize(
    ("correction", "kept"),
    [
        # Ratios: near 1; one far below; all low. Advantages: +1, -1, -1.
        ("none", [[1, 1], [1, 1], [1, 1]]),
        ("tis", [[1, 1], [1, 1], [1, 1]]),
        ("icepop", [[1, 1], [1, 0], [1, 1]]),  # a token of ratio 0.1
        ("mis", [[1, 1], [0, 0], [1, 1]]),  # geometric means 1.18, 0.32, 0.6
        ("dppo", [[0, 1], [1, 0], [1, 1]]),  # probabilities 0.5 to 0.7 for good ones, 0.5 to 0.05 for bad ones
        ("sequence_mask", [[1, 1], [0, 0], [0, 0]]),  # means of log mu - log pi: -0.17, 1.15, 0.51
    ],
)
def test_what_a_correction_keeps(correction: str, kept: list[list[int]]):
    terms = sequences([[1.41, 1.0], [1.0, 0.1], [0.61, 0.61]], [1.0, -1.0, -1.0])
    limits = Limits(correction=correction, low=0.99, high=9.0)
    assert CORRECTIONS[correction](terms, limits).long().tolist() == kept
    output = LOSSES["dapo"](terms, limits)
    output.loss.backward()
    assert output.denominator.item() == sum(map(sum, kept))  # what was dropped thins nothing out
    assert output.metrics["masked_fraction"].item() == 6 - sum(map(sum, kept))
    assert (terms.logprobs_B_T.grad != 0).long().tolist() == kept


def test_a_long_sequence_is_masked_by_the_mean_of_its_gaps():
    terms = sequences([[0.9] * 8], [-1.0])  # a gap of 0.105 a token, 0.84 in all
    assert CORRECTIONS["sequence_mask"](terms, Limits(sequence_gap=0.2)).all()


def test_the_ratio_of_gspo_is_that_of_the_tokens_kept():
    terms = sequences([[1.2, 1.2, 0.1]], [1.0])
    output = LOSSES["gspo"](terms, Limits(correction="icepop", low=0.99, high=9.0))
    assert output.loss.item() == pytest.approx(-1.2)


@pytest.mark.parametrize("name", LOSSES)
def test_the_mask_of_dppo_replaces_the_clip(name: str):
    """An unlikely token is kept at any ratio, as its probability has hardly moved (arXiv:2602.04879)."""
    behaviour_B_T = torch.tensor([[0.01], [0.01]], dtype=torch.float64).log()
    logprobs_B_T = torch.tensor([[0.015], [0.005]], dtype=torch.float64).log().requires_grad_()
    terms = LossTerms(logprobs_B_T, behaviour_B_T, torch.tensor([[1.0], [-1.0]]), torch.ones(2, 1))
    output = LOSSES[name](terms, Limits(correction="dppo"))
    output.loss.backward()
    assert output.metrics["clip_fraction"] == output.metrics["masked_fraction"] == 0
    assert logprobs_B_T.grad[:, 0].tolist() == pytest.approx([-1.5, 0.5])


@pytest.mark.parametrize("name", LOSSES)
def test_a_batch_of_which_nothing_is_kept_has_no_gradient(name: str):
    terms = sequences([[0.1, 0.1]], [-1.0])
    output = LOSSES[name](terms, Limits(correction="mis"))
    output.loss.backward()
    assert output.denominator.item() == output.loss.item() == 0
    assert terms.logprobs_B_T.grad.abs().max() == 0


OWN = """
from penstock.train.losses import dapo

def mine(terms, limits):
    return dapo(terms, limits)

def broken(terms, limits):
    return terms.nothing

def number(terms, limits):
    return 0.0

text = "dapo"
"""


def test_a_loss_of_ones_own_is_named_by_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_losses.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    terms = terms_of(1)
    ours, theirs = (loss_named(name)(terms, LIMITS) for name in ("own_losses:mine", "dapo"))
    assert (ours.loss, ours.denominator) == (theirs.loss, theirs.denominator)
    for name, message in {
        "dapoo": "unknown loss 'dapoo'; known: grpo",
        "own_losses:min": "no 'min' in it; did you mean 'mine'",
        "own_losses:text": "is no function",
    }.items():
        with pytest.raises(UserError, match=message):
            loss_named(name)
    for name, message in {
        "own_losses:broken": r"failed: AttributeError: .*nothing.* \(.*own_losses.py, line 8\)",
        "own_losses:number": "must return penstock.train.losses.LossOutput, got 0.0",
    }.items():
        with pytest.raises(PenstockError, match=message):
            loss_named(name)(terms, LIMITS)


def test_limits_that_correct_nothing_are_refused():
    with pytest.raises(UserError, match="unknown correction 'tiss'; known: tis, mis"):
        Limits(correction="tiss")
    with pytest.raises(UserError, match=r"ratio_band must be around 1, .* got \(5.0, 0.5\)"):
        Limits(ratio_band=(5.0, 0.5))
    for temperature in (0.0, math.nan, math.inf):
        with pytest.raises(UserError, match="temperature of sampling must be above 0, got"):
            LossSpec({"dapo": 1.0}, temperature=temperature)


def test_a_loss_that_is_not_there_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no loss 'dapoo'; did you mean 'dapo'.; or 'module:function' of your own"):
        load_config(None, ["engine.model=m", "train.loss=dapoo"])
